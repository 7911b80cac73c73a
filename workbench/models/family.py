"""Model families: their keys in ``config.json``, the options of their layers, and the names of their tensors."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class HeadNorm(enum.Enum):
    """The RMSNorm of queries and keys before RoPE."""

    EACH = "each head"
    """Every head alone, with one weight of the head's width for all."""
    WHOLE = "all heads"
    """All heads of a token together, with a weight of their whole width."""


class Norm(enum.Enum):
    """The norm before attention, before the experts and before the head."""

    RMS = "RMS"
    LAYER = "layer"
    """Mean and variance, without a bias."""
    LAYER_BIAS = "layer with bias"


@dataclass(frozen=True)
class Stacked:
    """A tensor that holds a matrix of every routed expert.

    Attributes
    ----------
    name : str
        Its name within the mixture.
    transposed : bool
        True if its matrices are (inputs, outputs).
    flat : bool
        True if their rows follow one another in one matrix, and not along a dimension of the experts.
    bias : str or None
        Name of the experts' biases.
    """

    name: str
    transposed: bool = False
    flat: bool = False
    bias: str | None = None


@dataclass(frozen=True)
class TensorNames:
    """Names of the tensors of a checkpoint that differ among families; the defaults are those of most families.

    Attributes
    ----------
    mixture : str
        The mixture of experts, within its layer.
    gate, up, down : str
        The projections of an expert, of a shared expert and of a dense network.
    router, choice_bias : str
        The router, and the bias of its scores for the choice, within the mixture.
    choice_bias_in_row : bool
        True if that is a matrix of one row.
    shared : str or None
        The shared expert within the mixture, if `run` computes one; its gate has the same name with ``_gate`` added.
    layers, embedding, final_norm : str
        The layers, the embedding and the norm before the head.
    attention_norm, mixture_norm, attention, out : str
        The two norms, attention, and its output projection within attention.
    qkv : str or None
        The one projection of queries, keys and values within attention, if they have no three.
    gate_up, down_stack : tuple of Stacked
        Tensors that hold the matrices of all experts, if each expert has none of its own.
    """

    mixture: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    choice_bias_in_row: bool = False
    shared: str | None = None
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    attention_norm: str = "input_layernorm"
    mixture_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    out: str = "o_proj"
    qkv: str | None = None
    gate_up: tuple[Stacked, ...] = ()
    down_stack: tuple[Stacked, ...] = ()

    def expert(self, number: int) -> str:
        """Name of one routed expert."""
        return f"{self.mixture}.experts.{number}"

    @property
    def shared_expert(self) -> str:
        """Name of the shared expert."""
        return f"{self.mixture}.{self.shared}"


LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys of latent attention."""


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face decoders whose layers are attention and a mixture of experts.

    A family with an `architecture` can be run; any other can only be predicted.

    Attributes
    ----------
    model_type : str
        The ``model_type`` in ``config.json``.
    architecture : str or None
        Name of the class in transformers, if `run` executes it.
    other_names : tuple of str
        Other names of the class in published checkpoints.
    gguf : str or None
        Its ``general.architecture`` in GGUF files, if they are understood.
    keys : mapping of str to str
        Keys of ``config.json`` by Mixtral's name for the same number, if the two differ; ``outer.inner`` is a key of
        the object ``outer``.
    defaults : mapping
        Values of keys that a ``config.json`` may leave out.
    rope_theta : float
        RoPE's base where ``config.json`` has none.
    shared_in_code : bool
        True if every layer has one shared expert, as wide as a routed one, that ``config.json`` does not mention.
    tensors : TensorNames
    own_keys : tuple of str
        Keys of its ``config.json`` beside those of all families.
    qkv_bias : bool
        True if queries, keys and values always have biases; they also have them where ``attention_bias`` is set.
    out_bias : bool
        True if the output projection has a bias where ``attention_bias`` is set.
    qk_norm : HeadNorm or None
        RMSNorm of queries and keys before RoPE.
    norm : Norm
    interleaved : bool
        True if RoPE turns pairs of neighbours, and not of two halves.
    sinks : bool
        True if every head has a score that adds to the softmax' denominator alone.
    scoring : str
        The router's scores: "softmax", "sigmoid" or "sparsemixer".
    window_everywhere : bool
        True if a sliding window is that of all layers where ``layer_types`` does not tell.
    choice_bias, router_bias : bool
        True if a bias is added to the scores for the choice, or to the router's logits.
    exact_router, kept_router : bool
        True if the router's product is in fp32 whatever the weights are in, and if its matrix stays in fp32 too.
    activation : str
        The experts' activation, as `workbench.kernels.fused_moe` calls it.
    shared_gate : bool
        True if the shared expert's output is multiplied by the sigmoid of a gate.
    options : tuple of str
        Keys of options that its layers have, and that `run` executes with any value.
    only : mapping of str to tuple
        Values of keys that `run` can execute, beside an absent key; a checkpoint with another value is refused.
    never_null : tuple of str
        Keys that may be absent, but not null, which means something else.
    example : mapping
        Fields of a small `ModelConfig` that show the family's options; the tests of all families run such a model.
    """

    model_type: str
    architecture: str | None = None
    gguf: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 1e6
    shared_in_code: bool = False
    tensors: TensorNames = TensorNames()
    own_keys: tuple[str, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: HeadNorm | None = None
    norm: Norm = Norm.RMS
    interleaved: bool = False
    sinks: bool = False
    scoring: str = "softmax"
    window_everywhere: bool = False
    choice_bias: bool = False
    router_bias: bool = False
    exact_router: bool = False
    kept_router: bool = False
    activation: str = "swiglu"
    shared_gate: bool = False
    options: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    never_null: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
