"""The mixing of tokens in one layer: attention of several forms, linear attention, state spaces, convolutions.

A module is told by the names of its tensors; one with any other name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.units import is_whole
from workbench.models.layers import Own, Recurrence, Sparse

OUT = frozenset({"o_proj", "out_proj", "o_a_proj", "o_b_proj"})
"""Projections behind the mixing of tokens."""
_QUERIES = frozenset({"q_proj", "k_proj", "v_proj"})
_GATES = frozenset({"gate_proj", "g_proj"})
_RELATIVE = frozenset({"r_proj", "rel_logits_proj", "sink_proj", "k_sconv", "v_sconv", "q_l2_clip", "rel_l2_clip"})
"""Inkling: relative positions, sinks from the input, short convolutions of keys and values."""
_HEAD_NORMS = frozenset(
    {
        *("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"),
        *("sinks", "gate_bias"),
    }
)
_LATENT = frozenset({"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"})
_LATENT_TOO = frozenset(
    {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "q_gate_proj", "indexer", "sinks", "k_rope_only_layernorm"}
)
_COMPRESSED = frozenset(
    {"sinks", "q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj", "compressor"}
)
_KEY_DELTA = frozenset({"q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "o_norm", "o_proj"})
_KEY_DELTA_GATES = frozenset({"g_proj", "g_a_proj", "g_b_proj"})
_DELTA = frozenset({"conv1d", "A_log", "dt_bias", "norm", "out_proj"})
_DELTA_IN = (
    frozenset({"in_proj_qkvz", "in_proj_ba"}),
    frozenset({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}),
)
_MAMBA = frozenset({"in_proj", "x_proj", "dt_proj", "conv1d", "out_proj", "A_log", "D"})
_MAMBA_NORMS = frozenset({"dt_layernorm", "b_layernorm", "c_layernorm"})
_MAMBA_2 = frozenset({"in_proj", "conv1d", "out_proj", "A_log", "D", "dt_bias", "norm"})
_LIGHTNING = frozenset({"qkv_proj", "out_proj", "output_gate", "norm"})
_CONVOLUTION = frozenset({"in_proj", "conv", "out_proj"})
_COMPRESSED_HEADS = frozenset({"qkv_proj", "qk_norm", "o_proj"})
"""Zaya: queries, keys and values behind short convolutions."""
_DELTA_MACS = 3.5
"""Multiply-adds of the delta rule per element of its state and token: decay (half a one), read, write, read."""
_SCAN_MACS = 2.5
"""Multiply-adds of a state space or of linear attention per element of its state and token: decay, write, read."""
_FULL = (None, "full_attention", "hybrid", "indexed_attention", "attention")
_SLIDING = ("sliding_attention", "hybrid_sliding")
_COMPRESSING = ("compressed_sparse_attention", "heavily_compressed_attention")


@dataclass(frozen=True)
class Mixer:
    """A module that mixes tokens, and the shapes of its tensors by their names within it."""

    module: Any
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, name: str, module: Any, shapes: Mapping[str, tuple[int, ...]]) -> Mixer:
        """The module of this name of a layer with these tensors."""
        begin = f"{name}."
        return cls(module, {key.removeprefix(begin): shape for key, shape in shapes.items() if key.startswith(begin)})

    @property
    def parts(self) -> frozenset[str]:
        """First parts of the names of its tensors."""
        return frozenset(name.split(".")[0] for name in self.shapes)

    @property
    def given(self) -> int:
        """Inputs of the output projections."""
        return sum(
            shape[1] for name, shape in self.shapes.items() if name.split(".")[0] in OUT and name.endswith(".weight")
        )

    def rows(self, begin: str) -> int:
        """Outputs of all matrices whose names begin like this."""
        return sum(shape[0] for name, shape in self.shapes.items() if name.startswith(begin) and len(shape) == 2)

    def recurrence(self, name: str, state: int, macs: float) -> Own:
        """A recurrent layer with a state of so many elements, and with the last inputs of its convolutions."""
        kept = 0
        taps = 0
        taken = 0
        for tensor, shape in self.shapes.items():
            if len(shape) == 3 and shape[1] == 1:
                kept += shape[0] * (shape[2] - 1)
                taps += shape[0] * shape[2]
            elif len(shape) == 2 and tensor.endswith(".weight") and tensor.split(".")[0] not in OUT:
                taken += shape[0]
        return Own(recurrence=Recurrence(name, state + kept, macs * state + taps, taken, self.given))


def mixing(mixers: Sequence[Mixer], config: Any, words: str | None, what: str) -> Own:
    """Sizes of a layer's mixing of tokens.

    Parameters
    ----------
    mixers : sequence of Mixer
        The modules of the layer that mix tokens.
    config
        The config of transformers.
    words : str or None
        The config's word for the layer's attention.
    what : str
        The layer, for errors.

    Raises
    ------
    CheckpointError
        If it is not understood.
    """
    if not mixers:
        return Own(recurrence=Recurrence("no attention", 0, 0.0, 0, 0))
    if len(mixers) > 1:
        raise CheckpointError(f"{what} mixes tokens twice, which is not understood; use another model.")
    mixer = mixers[0]
    found = _recurrent(mixer) or _attention(mixer, config, words, what)
    if found is None:
        raise CheckpointError(
            f"{what} mixes tokens with {type(mixer.module).__name__} of {', '.join(sorted(mixer.parts))}, which is not "
            "understood; use another model."
        )
    return found


def _recurrent(mixer: Mixer) -> Own | None:
    """The state of a recurrent layer; None if it is none."""
    module = mixer.module
    parts = mixer.parts
    if _KEY_DELTA <= parts <= _KEY_DELTA | _KEY_DELTA_GATES:
        return mixer.recurrence("delta rule", module.num_heads * module.head_dim**2, _DELTA_MACS)
    if any(parts == _DELTA | one for one in _DELTA_IN):
        state = module.num_v_heads * module.head_k_dim * module.head_v_dim
        return mixer.recurrence("delta rule", state, _DELTA_MACS)
    if _MAMBA <= parts <= _MAMBA | _MAMBA_NORMS:
        return mixer.recurrence("Mamba", module.intermediate_size * module.ssm_state_size, _SCAN_MACS)
    if parts == _MAMBA_2:
        state = module.num_heads * module.head_dim * module.ssm_state_size
        return mixer.recurrence("Mamba 2", state, _SCAN_MACS)
    if parts == _LIGHTNING and hasattr(module, "block_size"):
        state = module.num_attention_heads * module.head_dim**2
        return mixer.recurrence("linear attention", state, _SCAN_MACS)
    if parts == _CONVOLUTION:
        return mixer.recurrence("short convolution", 0, 0.0)
    return None


def _attention(mixer: Mixer, config: Any, words: str | None, what: str) -> Own | None:
    """Sizes of attention; None if it is not understood."""
    parts = mixer.parts
    if words in _COMPRESSING:
        return _compressed(mixer) if parts == _COMPRESSED else None
    window = _window(mixer.module, config, words, what)
    if _LATENT <= parts <= _LATENT | _LATENT_TOO | _GATES:
        return _latent(mixer, window, _indexed(mixer.module, config, words))
    if _QUERIES <= parts <= _QUERIES | OUT | _GATES | _RELATIVE | _HEAD_NORMS:
        return _grouped(mixer, window, "")
    if parts == _COMPRESSED_HEADS:
        return _grouped(mixer, window, "qkv_proj.")
    return None


def _window(module: Any, config: Any, words: str | None, what: str) -> int | None:
    """Tokens that attention is limited to; None for all."""
    if words == "chunked_attention":
        return int(config.attention_chunk_size)
    if words not in (*_SLIDING, *_FULL):
        raise CheckpointError(
            f"{what} has attention of the kind {words!r}, which is not understood; use another model."
        )
    kinds = getattr(config, "layer_types", None) or ()
    by_config = not hasattr(module, "sliding_window") and not set(kinds) & set(_SLIDING)
    window = getattr(module, "sliding_window", None)
    if by_config or (words in _SLIDING and not window):
        window = getattr(config, "sliding_window", None)
    limited = words in _SLIDING or words is None or by_config
    if words in _SLIDING and not is_whole(window):
        raise CheckpointError(f"{what} has a sliding window of unknown size; complete its config.")
    return int(window) if limited and is_whole(window) and window else None


def _grouped(mixer: Mixer, window: int | None, begin: str) -> Own | None:
    """Attention with grouped queries; None if its projections do not fit its heads."""
    module = mixer.module
    dim = int(module.head_dim)
    groups = mixer.rows(f"{begin}k_proj") // dim
    heads = groups * int(module.num_key_value_groups)
    values = mixer.rows(f"{begin}v_proj") // groups
    queries = mixer.rows(f"{begin}q_proj")
    fits = (
        groups * dim == mixer.rows(f"{begin}k_proj"),
        groups * values == mixer.rows(f"{begin}v_proj"),
        queries in (heads * dim, 2 * heads * dim),  # an output gate may be in the same matrix
        mixer.given == heads * values,
    )
    if not all(fits):
        return None
    return Own(
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=dim,
        v_head_dim=values,
        sliding_window=window,
    )


def _latent(mixer: Mixer, window: int | None, sparse: Sparse | None) -> Own | None:
    """Latent attention (DeepSeek's MLA); None if its projections do not fit its heads."""
    module = mixer.module
    heads = int(module.num_heads)
    rank = int(module.kv_lora_rank)
    rotated = int(module.qk_rope_head_dim)
    plain = int(module.qk_nope_head_dim)
    values = int(module.v_head_dim)
    fits = (
        mixer.rows("kv_a_proj_with_mqa") == rank + rotated,
        mixer.shapes["kv_b_proj.weight"] == (heads * (plain + values), rank),
        mixer.shapes["o_proj.weight"][1] == heads * values,
    )
    if not all(fits):
        return None
    return Own(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=plain + rotated,
        v_head_dim=values,
        q_lora_rank=getattr(module, "q_lora_rank", None) or None,
        kv_lora_rank=rank,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotated,
        sliding_window=window,
        sparse=sparse,
    )


def _indexed(module: Any, config: Any, words: str | None) -> Sparse | None:
    """The index of DeepSeek's sparse attention; a layer without its own takes the choice of an earlier one."""
    top = getattr(config, "index_topk", None)
    if words != "indexed_attention" or not is_whole(top):
        return None
    index = getattr(module, "indexer", None)
    if index is None:
        return Sparse(int(top))
    return Sparse(int(top), keys=int(index.head_dim), macs=int(index.n_heads) * int(index.head_dim))


def _compressed(mixer: Mixer) -> Own:
    """DeepSeek-V4's attention: one key that is also the value, in entries of several tokens beside a window."""
    module = mixer.module
    compressor = module.compressor
    index = getattr(compressor, "indexer", None)
    dim = int(module.head_dim)
    sparse = Sparse(
        top=0 if index is None else int(index.index_topk),
        ratio=int(compressor.compress_rate),
        window=int(module.sliding_window),
        keys=0 if index is None else int(index.head_dim),
        macs=0 if index is None else int(index.num_heads) * int(index.head_dim),
    )
    return Own(
        num_attention_heads=int(module.num_heads),
        num_key_value_heads=1,
        head_dim=dim,
        v_head_dim=dim,
        kv_lora_rank=dim,
        sparse=sparse,
    )
