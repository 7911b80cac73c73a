"""Description of a model: its sizes under Hugging Face's names, and everything that follows from them."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property

from workbench.core.display import html_table
from workbench.core.units import DTYPE_BYTES, WEIGHT_BYTES
from workbench.models.config.networks import NetworkSizes
from workbench.models.layers import fold, spelled


class ModelConfig(NetworkSizes):
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

    # Sizes that every priced operation needs are cached: a simulation prices millions of operations.

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
        return self.attention_params + self._network_params / self.num_hidden_layers

    @property
    def _network_params(self) -> int:
        """Parameters of routers, shared experts and dense networks of all layers."""
        moe = self.moe_layers * (self.router_params + self.shared_params)
        return moe + self.dense_layers * self.dense_params

    @property
    def always_params(self) -> int:
        """Parameters that every pass reads: attention, routers, shared experts, dense networks and head."""
        if self.unlike:
            layers = sum(count * model.each_always for model, count in self.unlike)
            return round(layers) + self.head_params
        return round(self.num_hidden_layers * self.attention_params) + self._network_params + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied with; the embedding is a look-up and does not count."""
        chosen = self.num_experts_per_tok * self.computed_share
        return self.always_params + round(self.moe_layers * chosen * self.expert_params)

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

    @cached_property
    def has_formats(self) -> bool:
        """True if single operations have formats of their own."""
        return any(model.formats for model, _ in self.unlike or ((self, 1),))

    def format_of(self, op: str) -> float | None:
        """Bytes per weight of an operation, if it has a format of its own; mean over the layers that have it."""
        found = dict(self.formats).get(op)
        if found is not None or op in ("embed", "head"):
            return found
        having = [(model, count) for model, count in self.unlike if op != "experts" or not model.dense_layers]
        if not any(dict(model.formats).get(op) for model, _ in having):
            return None
        usual = WEIGHT_BYTES[(self.expert_dtype if op == "experts" else self.other_dtype) or self.dtype]
        total = sum((dict(model.formats).get(op) or usual) * count for model, count in having)
        return float(total / sum(count for _, count in having))

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
            heads += f", {spelled(self.layers)}"
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
