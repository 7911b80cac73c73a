"""The sizes of the model in a GGUF file, under the names of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.units import is_number, is_whole
from workbench.models.families import FAMILIES
from workbench.models.family import Family
from workbench.models.gguf.header import Header

_FAMILIES = [family for family in FAMILIES.values() if family.gguf]
_SIGMOID = 2
"""``expert_gating_func`` of a sigmoid router."""
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "max_position_embeddings": "context_length",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "rope_theta": "rope.freq_base",
    "clip_qkv": "attention.clamp_kqv",
    "routed_scaling_factor": "expert_weights_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
"""Keys of metadata, behind the architecture's name, by those of ``config.json``."""
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_WINDOW_EVERY = {"gpt-oss": 2, "phimoe": 1}
"""Of how many layers the last one has no sliding window, where the metadata do not tell; with 1, all have one."""
_SCALINGS = ("linear", "yarn")


def config_of(header: Header) -> dict[str, Any]:
    """The sizes of a file's model as a ``config.json`` has them, from its metadata and the shapes of its tensors.

    Raises
    ------
    CheckpointError
        If its architecture is not understood, or its layers are not alike in more than experts and windows.
    """
    metadata = _Metadata(header)
    config: dict[str, Any] = {key: metadata.number(known) for key, known in _KEYS.items()}
    config["model_type"] = metadata.family.model_type
    config["torch_dtype"] = "bfloat16"
    config["rms_norm_eps"] = next((value for key in _EPSILONS if (value := metadata.number(key))), None)
    config["norm_topk_prob"] = metadata.get("expert_weights_norm")
    config |= _vocabulary(metadata, config)
    config |= _feed_forward(metadata, config)
    config |= _latent(metadata) if config["kv_lora_rank"] else _heads(metadata, config)
    config |= _rope(metadata, config)
    config |= _windows(metadata, config)
    return {key: value for key, value in config.items() if value is not None}


class _Metadata:
    """Metadata of a file's architecture, and the shapes of its tensors."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = str(header.values.get("general.architecture"))
        self.families = [family for family in _FAMILIES if family.gguf == self.architecture]
        if not self.families:
            known = dict.fromkeys(family.gguf for family in _FAMILIES)
            raise CheckpointError(
                f"{header.name!r} is of the architecture {short(self.architecture)}, which is not understood; use one "
                f"of {', '.join(map(str, known))}."
            )
        blocks = self.number("block_count")
        further = self.number("nextn_predict_layers") or 0
        if not is_whole(blocks) or not is_whole(further) or not 0 <= further < blocks <= len(header.tensors):
            raise self.wrong("block_count", blocks, "a number of layers that the file has")
        self.layers = int(blocks - further)

    @property
    def family(self) -> Family:
        """The family of this architecture, by its router and its shared experts where there are several."""
        scoring = "sigmoid" if self.get("expert_gating_func") == _SIGMOID else "softmax"
        named = [family for family in self.families if family.scoring == scoring] or self.families
        shared = "shared_expert_intermediate_size"
        has_shared = self.width("ffn_down_shexp", 0) is not None
        return next((family for family in named if (shared in family.keys) is has_shared), named[0])

    def get(self, key: str) -> Any:
        """A value of the architecture's own; None if there is none."""
        return self.header.values.get(f"{self.architecture}.{key}")

    def number(self, key: str) -> Any:
        """A number; None for 0 and if there is none.

        Raises
        ------
        CheckpointError
            If it is a list of numbers that differ.
        """
        value = self.get(key)
        if isinstance(value, list):
            value = self._same(key, value)
        if value is not None and not is_number(value):
            raise self.wrong(key, value, "a number")
        return value or None

    def _same(self, key: str, values: list[Any]) -> Any:
        """The number that a list has for every layer; of widths, which tensors tell as well, the largest."""
        if not values or not all(is_number(value) for value in values):
            raise self.wrong(key, values, "numbers")
        if len(set(values)) > 1 and key != "feed_forward_length":
            raise self.wrong(key, values, "one number for all layers, others are not understood")
        return max(values)

    def wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        """The error for a value."""
        told = f"{self.header.name!r} has {self.architecture}.{key}={short(value)}"
        return CheckpointError(f"{told}; give {wanted}, or use a model without.")

    def has(self, tensor: str) -> bool:
        """True if the file or one of its layers has this tensor."""
        return tensor in self.header.tensors or self._in_layers(tensor) is not None

    def width(self, tensor: str, dim: int) -> int | None:
        """A size of the first layer's tensor that has this name; None if no layer has it."""
        shape = self._in_layers(f"{tensor}.weight")
        return None if shape is None or dim >= len(shape) else shape[dim]

    def _in_layers(self, tensor: str) -> tuple[int, ...] | None:
        names = (f"blk.{layer}.{tensor}" for layer in range(self.layers))
        found = next((self.header.tensors[name] for name in names if name in self.header.tensors), None)
        return None if found is None else found.shape


def _vocabulary(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    embedding = metadata.header.tensors.get("token_embd.weight")
    shape = embedding.shape if embedding is not None and len(embedding.shape) == 2 else (None, None)
    return {
        "num_hidden_layers": metadata.layers,
        "hidden_size": config["hidden_size"] or shape[0],
        "vocab_size": shape[1],
        "tie_word_embeddings": not metadata.has("output.weight"),
        "lm_head_bias": metadata.has("output.bias"),
    }


def _feed_forward(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Widths of experts, shared experts and dense networks, and the layers that have experts."""
    expert = metadata.width("ffn_down_exps", 0) or metadata.width("ffn_down.0", 0)
    if expert is None:
        raise CheckpointError(f"{metadata.header.name!r} has no experts; give a mixture of experts.")
    shared = metadata.width("ffn_down_shexp", 0) or 0
    tensors = metadata.header.tensors
    kinds = ["sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense" for layer in range(metadata.layers)]
    return {
        "mlp_layer_types": kinds,
        "intermediate_size": metadata.width("ffn_down", 0) or config["intermediate_size"] or expert,
        "moe_intermediate_size": expert,
        "shared_expert_intermediate_size": shared,
        metadata.family.keys.get("n_shared_experts", "n_shared_experts"): 0,
        "num_local_experts": config["num_local_experts"] or metadata.width("ffn_gate_inp", 1),
    }


def _heads(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of grouped queries."""
    heads = config["num_attention_heads"]
    rows = metadata.width("attn_q", 1)
    head_dim = metadata.number("attention.key_length")
    if head_dim is None and rows and heads:
        head_dim = rows // heads
    values = metadata.number("attention.value_length")
    if values not in (None, head_dim):
        raise metadata.wrong("attention.value_length", values, f"as many dims as keys have, {head_dim}")
    keys = metadata.width("attn_k", 1)
    groups = config["num_key_value_heads"]
    if groups is None and keys and head_dim:
        groups = keys // head_dim
    return {
        "head_dim": head_dim,
        "num_key_value_heads": groups,
        "attention_bias": metadata.has("attn_q.bias") or metadata.has("attn_qkv.bias"),
        "use_qk_norm": metadata.has("attn_q_norm.weight"),
    }


def _latent(metadata: _Metadata) -> dict[str, Any]:
    """Sizes of latent attention; newer files have those of the absorbed form as key_length and value_length."""
    both = metadata.number("attention.key_length_mla") or metadata.number("attention.key_length")
    rotated = metadata.number("rope.dimension_count")
    if not is_whole(both) or not is_whole(rotated) or rotated >= both:
        raise metadata.wrong("rope.dimension_count", rotated, f"fewer dims than keys have, {short(both)}")
    return {
        "qk_nope_head_dim": both - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": metadata.number("attention.value_length_mla") or metadata.number("attention.value_length"),
    }


def _rope(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotated share of a head, and the scaling of its frequencies."""
    found: dict[str, Any] = {}
    rotated = metadata.number("rope.dimension_count")
    if rotated and config.get("head_dim") and rotated < config["head_dim"]:
        found["partial_rotary_factor"] = rotated / config["head_dim"]
    kind = metadata.get("rope.scaling.type")
    if kind in _SCALINGS:
        trained = metadata.number("rope.scaling.original_context_length")
        scaling = {
            "rope_type": kind,
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": trained or config["max_position_embeddings"],
        }
        found["rope_scaling"] = scaling if scaling["factor"] else None
    return found


def _windows(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window, and the layers that have it."""
    window = metadata.number("attention.sliding_window")
    longest = config["max_position_embeddings"]
    if window is None or metadata.architecture == "llama4" or (longest and window >= longest):
        return {}
    pattern = metadata.get("attention.sliding_window_pattern") or _WINDOW_EVERY.get(metadata.architecture)
    if is_whole(pattern):
        pattern = [pattern == 1 or layer % pattern < pattern - 1 for layer in range(metadata.layers)]
    if not isinstance(pattern, list) or len(pattern) < metadata.layers:
        raise metadata.wrong("attention.sliding_window_pattern", pattern, "a flag for each layer")
    kinds = ["sliding_attention" if near else "full_attention" for near in pattern[: metadata.layers]]
    return {"sliding_window": window, "layer_types": kinds}
