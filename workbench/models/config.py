"""Description of a model: its sizes under Hugging Face's names, and everything that follows from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short

import numpy as np
import numpy.typing as npt

from workbench.core.display import html_table
from workbench.core.errors import ScenarioError
from workbench.core.units import DTYPE_BYTES, WEIGHT_BYTES, is_number, is_whole
from workbench.models.families import FAMILIES, RUNNABLE
from workbench.models.family import Family, HeadNorm, Norm
from workbench.models.layers import (
    Counted,
    LayerKind,
    Layers,
    Pattern,
    Recurrence,
    Sparse,
    contradiction,
    fold,
    spelled,
    unfold,
)
from workbench.models.rope import PLAIN, Rope

LARGEST = 2**40
"""Largest value of any size: products of a few sizes then stay within floats."""
FORMATTED = ("embed", "qkv", "out_proj", "route", "experts", "shared_experts", "head")
"""Operations whose weights may have a format of their own."""


@dataclass(frozen=True, repr=False)
class ModelConfig:
    """A decoder whose layers are attention followed by a mixture of experts.

    Field names are those of Hugging Face's ``config.json``. Numbers of parameters count matrices; norms count only in
    `layer_params` and `params`; biases, sinks and the norms of heads count only in `vectors` and its parts (below 0.1 %
    of the total).

    Attributes
    ----------
    name : str
    intermediate_size, moe_intermediate_size : int, int or None
        Inner width of the feed-forward network of a dense layer, and of one routed expert; an expert's is
        `intermediate_size` where the other is None.
    shared_expert_intermediate_size : int
        Inner width of all shared experts of a layer together: every token passes them.
    first_k_dense_replace : int
        Layers that have an ordinary feed-forward network instead of experts; the first ones, unless `layers` has
        another order.
    q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim : int or None
        Latent attention (DeepSeek's MLA), if `kv_lora_rank` is given; `head_dim` is then the sum of the two qk widths.
    sliding_window, windowed_layers : int
        Tokens that a sliding-window layer attends to, and number of layers with a window.
    layers : tuple of (tuple of LayerKind, int)
        Order of the layers: patterns of kinds, and the number of times that each is repeated. Unless given, windowed
        layers come before the others, and the first `first_k_dense_replace` layers are dense.
    counted : Counted or None
        Weights of each layer, where they were counted tensor by tensor and do not follow from the other sizes.
    recurrence, sparse : Recurrence or None, Sparse or None
        The layers' state in the place of keys and values, or their choice among earlier tokens.
    chunked : bool
        True if a window is the chunk that a token is in, and not the last tokens (Llama 4).
    idle_experts : int
        Choices of the router that compute nothing, beside the experts (LongCat-Flash).
    outside_params : int
        Weights outside of the layers, beside embedding, head and final norm.
    formats : tuple of (str, float)
        Bytes per weight by operation ("embed", "qkv", "out_proj", "route", "experts", "shared_experts", "head"), where
        they differ from those of `dtype`, `expert_dtype` and `other_dtype`.
    rope : Rope
        Rotated part of a head, and scaling of its frequencies.
    attention_bias, use_qk_norm, lm_head_bias : bool
        True if projections of attention have biases, queries and keys the family's norm, and the head a bias.
    clip_qkv : float or None
        Largest magnitude of queries, keys and values before RoPE.
    n_group, topk_group : int
        Groups of experts, and the best of them, from which a token's experts are chosen.
    routed_scaling_factor : float
        Factor of the weights of a token's experts.
    attention_multiplier : float or None
        Factor of the attention scores, if it is not 1 / sqrt(head_dim).
    embedding_multiplier, residual_multiplier, logits_scaling : float
        Factors of the embedding and of what each sublayer adds, and divisor of the logits (Granite).
    dtype : str
        Precision of activations, and of all weights without a format of their own: "fp32", "bf16" or "fp16".
    expert_dtype, other_dtype : str or None
        Format of the routed experts, and of the layers' other weights, if it is not `dtype` (see
        `workbench.core.units.WEIGHT_BYTES`). Embedding and head stay in `dtype`.
    coverage : tuple of (float, float)
        Share of a layer's experts that a number of tokens touches, for rising numbers of tokens; empty for uniform
        independent routing, which touches the most (see `workbench.perfmodels.coverage.routed`).
    norm_topk_prob : bool
        True if the weights of a token's chosen experts are scaled to a sum of 1.
    architecture : str or None
        Name of its class in transformers, if `run` executes it (see `workbench.models.families`).
    path : Path or None
        Folder of the weights, or None if only the sizes are known.

    Raises
    ------
    ScenarioError
        If a size is no whole number or too small, a count is larger than the whole that it belongs to, a format is
        unknown, or `layers` contradicts the counts of layers.
    """

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    tie_word_embeddings: bool = False
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int = 0
    windowed_layers: int = 0
    dtype: str = "bf16"
    expert_dtype: str | None = None
    other_dtype: str | None = None
    coverage: tuple[tuple[float, float], ...] = ()
    norm_topk_prob: bool = True
    architecture: str | None = None
    path: Path | None = None
    layers: Layers = ()
    rope: Rope = PLAIN
    attention_bias: bool = False
    use_qk_norm: bool = True
    lm_head_bias: bool = False
    clip_qkv: float | None = None
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    counted: Counted | None = None
    recurrence: Recurrence | None = None
    sparse: Sparse | None = None
    chunked: bool = False
    idle_experts: int = 0
    outside_params: int = 0
    formats: tuple[tuple[str, float], ...] = ()

    def __repr__(self) -> str:
        """The fields, later ones only if they are set: saved digests of scenarios are made of this text."""
        values = {known.name: getattr(self, known.name) for known in fields(self)}
        later = ("counted", "recurrence", "sparse", "chunked", "idle_experts", "outside_params", "formats")
        told = ", ".join(f"{name}={value!r}" for name, value in values.items() if value or name not in later)
        return f"ModelConfig({told})"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.default == 0 else 1
            optional = field.default is None and value is None
            if field.type.startswith("int") and not optional:
                if not is_whole(value) or not least <= value <= LARGEST:
                    told = f"{self.name} has {field.name}={short(value)}"
                    raise ScenarioError(f"{told}; give a whole number from {least} on, up to 2**40.")
                object.__setattr__(self, field.name, int(value))
            if field.type.startswith("float") and not optional and not (is_number(value) and 0 < value < math.inf):
                raise ScenarioError(f"{self.name} has {field.name}={short(value)}; give a positive number.")
        for name, most, what in (
            ("num_experts_per_tok", self.num_local_experts, "experts"),
            ("first_k_dense_replace", self.num_hidden_layers, "layers"),
            ("windowed_layers", self.num_hidden_layers, "layers"),
        ):
            if getattr(self, name) > most:
                raise ScenarioError(f"{self.name} has {name}={getattr(self, name)}; give at most its {most} {what}.")
        for name, known in (("dtype", DTYPE_BYTES), ("expert_dtype", WEIGHT_BYTES), ("other_dtype", WEIGHT_BYTES)):
            value = getattr(self, name)
            if value not in (*known, *((None,) if name != "dtype" else ())):
                raise ScenarioError(f"{self.name} has {name}={value!r}; give one of {', '.join(known)}.")

        if self.architecture not in (None, *RUNNABLE):
            raise ScenarioError(
                f"{self.name} has architecture={self.architecture!r}; give one of {', '.join(RUNNABLE)}."
            )
        tokens, shares = zip(*self.coverage, strict=True) if self.coverage else ((1,), (1,))
        if not (tokens[0] >= 1 and all(a < b for a, b in pairwise(tokens)) and min(shares) > 0 and max(shares) <= 1):
            raise ScenarioError(f"{self.name} has coverage={self.coverage}; give shares of 0 to 1 for rising tokens.")
        counts = {
            "num_hidden_layers": self.num_hidden_layers,
            "first_k_dense_replace": self.first_k_dense_replace,
            "windowed_layers": self.windowed_layers,
        }
        problem = contradiction(self.layers, counts) if self.layers else None
        if problem:
            raise ScenarioError(f"{self.name} has {problem}.")
        for op, each in self.formats:
            if op not in FORMATTED or not (is_number(each) and 0 < each < math.inf):
                raise ScenarioError(
                    f"{self.name} has formats=({op!r}, {each!r}); give bytes per weight of {', '.join(FORMATTED)}."
                )

    @cached_property
    def layer_kinds(self) -> Pattern:
        """Kind of every layer, in order."""
        if self.layers:
            return unfold(self.layers)
        dense = self.first_k_dense_replace
        windowed = self.windowed_layers
        return tuple(
            LayerKind.of(dense=layer < dense, windowed=layer < windowed) for layer in range(self.num_hidden_layers)
        )

    def of_kind(self, kind: LayerKind) -> ModelConfig:
        """The model with as many layers, all of this kind."""
        return replace(
            self,
            first_k_dense_replace=self.num_hidden_layers if kind.dense else 0,
            windowed_layers=self.num_hidden_layers if kind.windowed else 0,
            layers=(),
            **kind.own.given(),
        )

    @cached_property
    def unlike(self) -> tuple[tuple[ModelConfig, int], ...]:
        """A model of each kind of layers, and the number of such layers; empty if no kind has sizes of its own."""
        if not any(kind.own.given() for pattern, _ in self.layers for kind in pattern):
            return ()
        return tuple((self.of_kind(kind), count) for kind, count in Counter(self.layer_kinds).items())

    def _sum(self, size: str) -> float:
        """Sum of a size of one layer over all layers, of which some have sizes of their own."""
        return float(sum(count * getattr(model, size) for model, count in self.unlike))

    def _mean(self, size: str) -> float:
        """Mean of a size of one layer over such layers."""
        return self._sum(size) / self.num_hidden_layers

    def _mean_of(self, count: Callable[[ModelConfig], npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """Mean over the layers, of which some have sizes of their own, of what is counted for a model of one kind."""
        total: npt.NDArray[np.float64] = np.sum([layers * count(model) for model, layers in self.unlike], axis=0)
        return total / self.num_hidden_layers

    def first(self, layers: int) -> ModelConfig:
        """The model of its first layers alone."""
        kinds = self.layer_kinds[:layers]
        return replace(
            self,
            num_hidden_layers=layers,
            first_k_dense_replace=sum(kind.dense for kind in kinds),
            windowed_layers=sum(kind.windowed for kind in kinds),
            layers=fold(kinds) if self.layers else (),
        )

    @property
    def family(self) -> Family:
        """Options of its layers and names of its tensors: Mixtral's where no architecture is named."""
        return RUNNABLE[self.architecture] if self.architecture else FAMILIES["mixtral"]

    # Sizes that every priced operation needs are cached: a simulation prices millions of operations.

    # ------------------------------------------------------------------------------------------------- attention

    @cached_property
    def q_size(self) -> int:
        """Elements of all query heads of one token (H D)."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all keys (or all values) of one token and layer (K D), with grouped queries."""
        return self.num_key_value_heads * self.head_dim

    @property
    def v_size(self) -> int:
        """Elements of all values of one token and layer, with grouped queries."""
        return self.num_key_value_heads * (self.v_head_dim or self.head_dim)

    @cached_property
    def attn_size(self) -> int:
        """Elements of the attention output of one token."""
        return self.num_attention_heads * (self.v_head_dim or self.head_dim)

    @property
    def _latent(self) -> tuple[int, int]:
        """Widths of the cache entry of latent attention per token and layer: the latent, and the rotated key."""
        return self.kv_lora_rank or 0, self.qk_rope_head_dim or 0

    @property
    def latent_size(self) -> int:
        """Elements of the cache entry of latent attention per token and layer."""
        return sum(self._latent)

    @cached_property
    def kv_width(self) -> int:
        """Elements of keys and values of one token in a layer with attention: 2 K D, or d_c + d_r."""
        return self.latent_size if self.kv_lora_rank else self.kv_size + self.v_size

    @cached_property
    def kv_elements(self) -> float:
        """KV-cache elements of one token and layer: 2 K D, or d_c + d_r for latent attention; mean over the layers."""
        if self.unlike:
            return self._mean("kv_elements")
        if self.recurrence is not None:
            return 0
        if self.sparse is None:
            return self.kv_width
        return (self.kv_width + self.sparse.keys) / self.sparse.ratio

    @cached_property
    def state_elements(self) -> float:
        """Elements that a sequence keeps beside its KV cache, in fp32, mean over the layers: recurrent states.

        The last tokens that sparse attention reads one by one are among them.
        """
        if self.unlike:
            return self._mean("state_elements")
        if self.recurrence is not None:
            return self.recurrence.state
        if self.sparse is None or self.sparse.ratio == 1:
            return 0
        return self.sparse.window * self.kv_width

    @property
    def keeps_states(self) -> bool:
        """True if some layers keep states, or a choice of earlier tokens, in the place of all keys and values."""
        return any(model.recurrence or model.sparse for model, _ in self.unlike or ((self, 1),))

    @cached_property
    def absorbed_q_size(self) -> int:
        """Query elements of one token in the form that is multiplied with the cache: H D, or H (d_c + d_r)."""
        return self.num_attention_heads * self.latent_size if self.kv_lora_rank else self.q_size

    @cached_property
    def absorbed_attn_size(self) -> int:
        """Attention output of one token before a latent is expanded: H D, or H d_c."""
        return self.num_attention_heads * self._latent[0] if self.kv_lora_rank else self.attn_size

    @cached_property
    def pair_macs(self) -> float:
        """Multiply-adds per query token and key of a prefill, keys and values expanded: H (D + D_v)."""
        if self.unlike:
            return self._mean("pair_macs")
        return 0 if self.recurrence is not None else self.q_size + self.attn_size

    @cached_property
    def entry_macs(self) -> float:
        """Multiply-adds per query token and cache entry of a decode, latent absorbed: 2 H D, or H (2 d_c + d_r)."""
        if self.unlike:
            return self._mean("entry_macs")
        return 0 if self.recurrence is not None else self.absorbed_q_size + self.absorbed_attn_size

    @property
    def query_group(self) -> float:
        """Multiply-adds per KV element and query token: H / K, or H (2 d_c + d_r) / (d_c + d_r)."""
        return self.entry_macs / self.kv_elements if self.kv_elements else 0.0

    @cached_property
    def attention_in_params(self) -> float:
        """Parameters of one layer before its attention: Q, K and V, or down to the latent and the keys' half of up.

        The expansion of latent keys counts here, and that of values in `attention_out_params`. It costs the same per
        token if it is absorbed into queries and outputs or applied to keys and values.
        """
        if self.unlike:
            return self._mean("attention_in_params")
        if self.counted is not None:
            return self.counted.qkv
        hidden = self.hidden_size
        heads = self.num_attention_heads
        if not self.kv_lora_rank:
            return hidden * (self.q_size + self.kv_size + self.v_size)
        query = self.q_lora_rank * (hidden + self.q_size) if self.q_lora_rank else hidden * self.q_size
        return query + hidden * self.kv_elements + self.kv_lora_rank * heads * (self.qk_nope_head_dim or 0)

    @cached_property
    def attention_out_params(self) -> float:
        """Parameters of one layer behind its attention: the O projection, and the expansion of latent values."""
        if self.unlike:
            return self._mean("attention_out_params")
        if self.counted is not None:
            return self.counted.out_proj
        return self.attn_size * (self.hidden_size + self._latent[0])

    @property
    def attention_params(self) -> float:
        """Parameters of one layer's attention: all projections."""
        return self.attention_in_params + self.attention_out_params

    @cached_property
    def attention_vectors(self) -> float:
        """Elements of one layer's biases of queries, keys and values, and of the norms of their heads or latents.

        Of a layer that was counted tensor by tensor, all that are no matrices, without two norms.
        """
        if self.unlike:
            return self._mean("attention_vectors")
        if self.counted is not None:
            return self.counted.vectors - 2 * self.norm_size
        if self.kv_lora_rank:
            return (self.q_lora_rank or 0) + self.kv_lora_rank
        biases = self.q_size + 2 * self.kv_size if self.has_qkv_bias else 0
        return biases + sum(self.head_norm_sizes)

    @property
    def has_qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return self.family.qkv_bias or self.attention_bias

    @property
    def out_vectors(self) -> int:
        """Elements of the bias of one layer's output projection."""
        return self.hidden_size if self.attention_bias and self.family.out_bias else 0

    @property
    def norm_size(self) -> int:
        """Elements of one norm of the residual stream."""
        return self.hidden_size * (2 if self.family.norm is Norm.LAYER_BIAS else 1)

    @property
    def rotated_dims(self) -> int:
        """Dims of a head that RoPE rotates."""
        return self.qk_rope_head_dim or int(self.head_dim * self.rope.share)

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        usual = self.attention_multiplier or self.head_dim**-0.5
        return usual * self.rope.score_factor if self.kv_lora_rank else usual

    @property
    def head_norm_sizes(self) -> tuple[int, int]:
        """Elements of the norms of queries and of keys; 0 if there are none."""
        sizes = {
            None: (0, 0),
            HeadNorm.EACH: (self.head_dim, self.head_dim),
            HeadNorm.WHOLE: (self.q_size, self.kv_size),
        }
        return sizes[self.family.qk_norm if self.use_qk_norm else None]

    # ---------------------------------------------------------------------------------------------- feed-forward

    @property
    def router_vectors(self) -> int:
        """Elements of the bias of one MoE layer's router."""
        return self.num_local_experts if self.family.router_bias and self.counted is None else 0

    @property
    def choice_vectors(self) -> int:
        """Elements of what one MoE layer's router adds for the choice."""
        return self.num_local_experts if self.family.choice_bias else 0

    @property
    def kept_router_params(self) -> int:
        """Elements of one MoE layer's router that stay in fp32 whatever the precision of the others."""
        return self.choice_vectors + (self.router_params if self.family.kept_router else 0)

    @property
    def expert_vectors(self) -> int:
        """Elements of the biases of one MoE layer's routed experts."""
        if self._with_experts is not None:
            return self._with_experts.expert_vectors
        stacks = (*self.family.tensors.gate_up, *self.family.tensors.down_stack)
        biased = any(stack.bias for stack in stacks)
        return self.num_local_experts * (2 * self.expert_width + self.hidden_size) if biased else 0

    @property
    def vectors(self) -> float:
        """Elements of the whole model that `params` leaves out: biases, sinks and the norms of heads."""
        if self._with_experts is not None:
            return 0
        layers = self.num_hidden_layers
        per_layer = self.attention_vectors + self.out_vectors + 2 * (self.norm_size - self.hidden_size)
        per_layer += self.num_attention_heads if self.family.sinks else 0
        per_moe = self.router_vectors + self.choice_vectors + self.expert_vectors
        head = self.norm_size - self.hidden_size + (self.vocab_size if self.lm_head_bias else 0)
        return layers * per_layer + self.moe_layers * per_moe + head

    @cached_property
    def _with_experts(self) -> Counted | None:
        """Weights of a layer with experts, if layers were counted tensor by tensor."""
        if not self.unlike:
            return self.counted
        found = (model.counted for model, _ in self.unlike if not model.dense_layers)
        return next(found, None)

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.first_k_dense_replace

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @cached_property
    def moe_share(self) -> float:
        """Share of the layers that have routed experts."""
        return self.moe_layers / self.num_hidden_layers

    @property
    def expert_width(self) -> int:
        """Inner width of one routed expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @cached_property
    def expert_params(self) -> int:
        """Parameters of one expert: gate, up and down projection."""
        if self._with_experts is not None:
            return self._with_experts.expert
        return 3 * self.hidden_size * self.expert_width

    @cached_property
    def shared_params(self) -> int:
        """Parameters of all shared experts of one MoE layer, and of their gate."""
        if self._with_experts is not None:
            return self._with_experts.unrouted if self.moe_layers else 0
        gate = self.hidden_size if self.family.shared_gate and self.shared_expert_intermediate_size else 0
        return 3 * self.hidden_size * self.shared_expert_intermediate_size + gate

    @property
    def dense_params(self) -> int:
        """Parameters of the feed-forward network of one dense layer; 0 if there is none."""
        if self.unlike:
            dense = [(model.dense_params, count) for model, count in self.unlike if model.dense_layers]
            return round(sum(each * count for each, count in dense) / sum(count for _, count in dense)) if dense else 0
        if self.counted is not None:
            return self.counted.unrouted if self.dense_layers else 0
        return 3 * self.hidden_size * self.intermediate_size if self.dense_layers else 0

    @cached_property
    def unrouted_params(self) -> float:
        """Parameters of shared experts and dense networks, which every token passes; mean over the layers."""
        if self.unlike:
            return self._mean("unrouted_params")
        return (self.moe_layers * self.shared_params + self.dense_layers * self.dense_params) / self.num_hidden_layers

    @cached_property
    def router_params(self) -> int:
        """Parameters of the router of one MoE layer."""
        if self._with_experts is not None:
            return self._with_experts.route
        return self.num_local_experts * self.hidden_size

    # ----------------------------------------------------------------------------------------------- whole model

    @property
    def _counted_vectors(self) -> float:
        """Elements beside matrices and two norms a layer, if layers were counted tensor by tensor."""
        return self.num_hidden_layers * self.attention_vectors + self.moe_layers * self.expert_vectors

    @property
    def layer_params(self) -> float:
        """Parameters of one MoE layer, its two norms included."""
        routed = self.num_local_experts * self.expert_params
        return self.attention_params + self.router_params + self.shared_params + routed + 2 * self.hidden_size

    @cached_property
    def head_params(self) -> int:
        """Parameters of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Parameters of the input embedding; 0 if it is the head."""
        return 0 if self.tie_word_embeddings else self.head_params

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.moe_layers * self.num_local_experts * self.expert_params

    @property
    def each_always(self) -> float:
        """Parameters of one layer that every pass reads, mean over the layers."""
        moe = self.moe_layers * (self.router_params + self.shared_params)
        dense = self.dense_layers * self.dense_params
        return self.attention_params + (moe + dense) / self.num_hidden_layers

    @property
    def always_params(self) -> int:
        """Parameters that every pass reads: attention, routers, shared experts, dense networks and head."""
        if self.unlike:
            layers = sum(count * model.each_always for model, count in self.unlike)
            return round(layers) + self.head_params
        moe = self.moe_layers * (self.router_params + self.shared_params)
        dense = self.dense_layers * self.dense_params
        return round(self.num_hidden_layers * self.attention_params) + moe + dense + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied with; the embedding is a look-up and does not count."""
        chosen = self.num_experts_per_tok * self.computed_share
        return self.always_params + round(self.moe_layers * chosen * self.expert_params)

    @property
    def computed_share(self) -> float:
        """Share of a token's choices that are experts; the others compute nothing."""
        return self.num_local_experts / (self.num_local_experts + self.idle_experts)

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        matrices = self.always_params + self.routed_params + self.embedding_params
        if self._with_experts is None:
            return matrices + norms
        return matrices + norms + round(self._counted_vectors) + self.outside_params

    # ------------------------------------------------------------------------------------------ bytes and FLOP

    @property
    def expert_bytes(self) -> float:
        """Bytes per parameter of the routed experts."""
        return self.format_of("experts") or WEIGHT_BYTES[self.expert_dtype or self.dtype]

    @property
    def other_bytes(self) -> float:
        """Bytes per parameter of the layers' other weights, mean over them."""
        usual = WEIGHT_BYTES[self.other_dtype or self.dtype]
        if not (self.formats or self.unlike):
            return usual
        total = 0.0
        count = 0.0
        for model, layers in self.unlike or ((self, self.num_hidden_layers),):
            for op, size in model.matrices.items():
                count += layers * size
                total += layers * size * (model.format_of(op) or usual)
        return total / count

    @property
    def matrices(self) -> dict[str, float]:
        """Parameters of one layer beside its routed experts, by operation; mean over the layers."""
        return {
            "qkv": self.attention_in_params,
            "out_proj": self.attention_out_params,
            "route": self.moe_share * self.router_params,
            "shared_experts": self.unrouted_params,
        }

    @property
    def has_formats(self) -> bool:
        """True if single operations have formats of their own."""
        return any(model.formats for model, _ in self.unlike or ((self, 1),))

    def format_of(self, op: str) -> float | None:
        """Bytes per weight of an operation, if it has a format of its own; mean over the layers that have it."""
        if not self.unlike:
            return dict(self.formats).get(op)
        having = [(model, count) for model, count in self.unlike if op != "experts" or not model.dense_layers]
        found = [(dict(model.formats).get(op), count) for model, count in having]
        if any(each is None for each, _ in found):
            return None
        return sum((each or 0.0) * count for each, count in found) / sum(count for _, count in found)

    @property
    def head_bytes(self) -> float:
        """Size of the LM head [B]."""
        return float(self.head_params * (self.format_of("head") or DTYPE_BYTES[self.dtype]))

    @property
    def embedding_bytes(self) -> float:
        """Size of the input embedding [B]; 0 if it is the head."""
        return float(self.embedding_params * (self.format_of("embed") or DTYPE_BYTES[self.dtype]))

    @property
    def routed_bytes(self) -> float:
        """Size of all routed experts of all layers [B]."""
        return self.routed_params * self.expert_bytes

    @property
    def always_bytes(self) -> float:
        """Bytes that every pass reads, without the routed experts [B]."""
        return (self.always_params - self.head_params) * self.other_bytes + self.head_bytes

    @property
    def weight_bytes(self) -> float:
        """Size of the whole model, without norms [B]."""
        return self.routed_bytes + self.always_bytes + self.embedding_bytes

    def kv_bytes_per_token(self, dtype: str) -> float:
        """KV cache of one token over all layers [B]; layers with a sliding window also keep all tokens."""
        return self.num_hidden_layers * self.kv_elements * DTYPE_BYTES[dtype]

    def attended(self, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Cache entries that one query token attends to, mean over the layers, in a context of so many tokens."""
        tokens = np.asarray(context, dtype=np.float64)
        if self.unlike:
            return self._mean_of(lambda model: model.attended(tokens))
        if self.sparse is not None:
            return self.sparse.attended(tokens)
        if not self.windowed_layers:
            return tokens
        share = self.windowed_layers / self.num_hidden_layers
        inside = self._in_chunk(tokens) if self.chunked else np.minimum(tokens, self.sliding_window)
        near: npt.NDArray[np.float64] = (1 - share) * tokens + share * inside
        return near

    def attended_below(self, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Sum of `attended` over contexts of 1 up to `context` tokens."""
        tokens = np.asarray(context, dtype=np.float64)
        if self.unlike:
            return self._mean_of(lambda model: model.attended_below(tokens))
        if self.sparse is not None:
            return self.sparse.attended_below(tokens)
        every = tokens * (tokens + 1) / 2
        if not self.windowed_layers:
            return every
        share = self.windowed_layers / self.num_hidden_layers
        window = self.sliding_window
        inside = self._in_chunk(tokens) if self.chunked else np.minimum(tokens, window)
        begun = inside * (inside + 1) / 2
        before = (tokens - inside) * ((window + 1) / 2 if self.chunked else window)
        near = begun + before
        summed: npt.NDArray[np.float64] = (1 - share) * every + share * near
        return summed

    def _in_chunk(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Tokens of a context that are in the chunk of its last one."""
        inside: npt.NDArray[np.float64] = np.where(tokens > 0, (tokens - 1) % self.sliding_window + 1, 0.0)
        return inside

    def touched_experts(self, tokens: float, each: int | None = None) -> float:
        """Expected number of distinct experts of a layer that `tokens` tokens are routed to.

        `each` is the number of experts per token that count; by default all chosen ones do. The coverage is
        interpolated in log2 of the tokens, proportional to them below its first entry, and constant above its last.
        """
        every = self.num_local_experts
        each = self.num_experts_per_tok if each is None else each
        if not self.coverage:
            missed: float = (1.0 - each / (every + self.idle_experts)) ** tokens
            return every * (1.0 - missed)
        tokens *= each / self.num_experts_per_tok
        points, shares = self._coverage_columns
        low = math.log2(max(tokens, self.coverage[0][0]))
        return every * min(tokens / self.coverage[0][0], 1.0) * float(np.interp(low, points, shares))

    @cached_property
    def _coverage_columns(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        tokens, shares = np.array(self.coverage).T
        return np.log2(tokens), shares

    def flops_per_token(self) -> float:
        """GEMM FLOP to push one token through the model, head included."""
        return 2.0 * self.active_params

    # --------------------------------------------------------------------------------------------------- in words

    @property
    def shape(self) -> str:
        """Text of everything that decides the times of one layer's operations and of the head."""
        heads = f"{self.num_attention_heads}/{self.num_key_value_heads}x{self.head_dim}"
        if self.kv_lora_rank:
            heads = f"{self.num_attention_heads}x{self.head_dim} latent {self.kv_elements}"
        if self.unlike:
            heads = spelled(self.layers)
        experts = f"{self.num_experts_per_tok}/{self.num_local_experts}x{self.expert_width}"
        rest = f", unrouted {self.unrouted_params:.0f}" if self.unrouted_params else ""
        rest += f", vectors {self.attention_vectors}" if self.attention_vectors else ""
        return f"hidden {self.hidden_size}, heads {heads}, experts {experts}{rest}, vocabulary {self.vocab_size}"

    @property
    def layers_in_words(self) -> str:
        """Order of the layers, such as ``1 x dense, 12 x (windowed, full)``."""
        return spelled(fold(self.layer_kinds))

    def __str__(self) -> str:
        billions = self.params / 1e9
        return (
            f"{self.name}: {self.num_hidden_layers} layers, {self.hidden_size} wide, {self.num_experts_per_tok} of "
            f"{self.num_local_experts} experts, {billions:{'.3g' if billions < 1000 else '.0f'}} B parameters"
        )

    def _repr_html_(self) -> str:
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        known["layers"] = self.layers_in_words
        return html_table((name, str(value)) for name, value in known.items() if value is not None)
