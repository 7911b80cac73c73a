"""Sizes of attention, or of what a layer has instead: heads, cache, states, weights, and the tokens attended to."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from workbench.core.units import DTYPE_BYTES
from workbench.models.config.fields import ModelFields
from workbench.models.family import HeadNorm, Norm


class AttentionSizes(ModelFields):
    """Sizes of one layer's attention; the mean over the layers where these differ."""

    @cached_property
    def q_size(self) -> int:
        """Elements of all query heads of one token (H D), or that a recurrent layer takes."""
        if self.recurrence is not None:
            return self.recurrence.taken
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
        """Elements of the attention output of one token, or of what a recurrent layer hands on."""
        if self.recurrence is not None:
            return self.recurrence.given
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
        """Elements of keys and values of one token: 2 K D, or d_c + d_r; 0 in a recurrent layer."""
        if self.recurrence is not None:
            return 0
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
        """Elements of a sequence's recurrent state, in fp32, mean over the layers."""
        if self.unlike:
            return self._mean("state_elements")
        return 0 if self.recurrence is None else self.recurrence.state

    @cached_property
    def near_elements(self) -> float:
        """Elements of a sequence's last tokens, which are kept one by one beside entries of several tokens; mean."""
        if self.unlike:
            return self._mean("near_elements")
        return 0 if self.sparse is None or self.sparse.ratio == 1 else self.sparse.window * self.kv_width

    @property
    def keeps_states(self) -> bool:
        """True if some layers keep states, or a choice of earlier tokens, in the place of all keys and values."""
        return any(model.recurrence or model.sparse for model, _ in self.unlike or ((self, 1),))

    @cached_property
    def absorbed_q_size(self) -> int:
        """Query elements of one token in the form that is multiplied with the cache: H D, or H (d_c + d_r)."""
        latent = self.kv_lora_rank and self.recurrence is None
        return self.num_attention_heads * self.latent_size if latent else self.q_size

    @cached_property
    def absorbed_attn_size(self) -> int:
        """Attention output of one token before a latent is expanded: H D, or H d_c."""
        latent = self.kv_lora_rank and self.recurrence is None
        return self.num_attention_heads * self._latent[0] if latent else self.attn_size

    @cached_property
    def sent_sizes(self) -> tuple[int, int, int]:
        """Elements of one token beside queries, and of its key and value, that attention on another device gets.

        The queries of an index, the key with the index' own, and the value. A recurrent layer's are all in `q_size`.
        """
        if self.recurrence is not None:
            return 0, 0, 0
        queries, keys = (0, 0) if self.sparse is None else (self.sparse.macs, self.sparse.keys)
        if self.kv_lora_rank:
            return queries, (self.qk_rope_head_dim or 0) + keys, self.kv_lora_rank
        return queries, self.kv_size + keys, self.v_size

    def indexed(self, entries: float) -> float:
        """Entries that an index scores where queries and keys, or decodes and their contexts, make so many pairs."""
        return entries / self.sparse.ratio if self.sparse is not None and self.sparse.macs else 0.0

    def least_attended(self, context: float) -> float:
        """Least entries that a query attends to in a context of so many tokens or more: a chunk may just begin."""
        return 1.0 if self.chunked and self.windowed_layers else float(self.attended(context))

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
