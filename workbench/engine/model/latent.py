"""Latent attention (DeepSeek's MLA): its operations, its cache, and buffers that differ between prompts and decodes.

The cache holds one latent and one rotated key per token. Decodes attend to it directly, with queries that have absorbed
the expansion of keys; outputs are expanded behind attention. Prompts attend to expanded keys and values.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from workbench.engine.loading.tensors import Tensors
from workbench.engine.model.kv_cache import Blocks, Indices, KVCache, slots_of
from workbench.engine.model.ops import Attention, Ops, RowLayout
from workbench.kernels import mla_decode, rms_norm, rope

EPSILON = 1e-6
"""Of the norms of latents, whatever ``config.json`` says: transformers' `DeepseekV3Attention` gives them none."""
SPLIT = ("q", "attn")
"""Buffers whose rows are wider for decodes than for prompts."""


class ByClass:
    """A buffer whose rows of prompts and of decodes have different widths; indexed by rows as a tensor is.

    Parameters
    ----------
    prefill : Tensor (T, W)
        Rows of prompts, which come first.
    decode : Tensor (B, V)
    """

    def __init__(self, prefill: torch.Tensor, decode: torch.Tensor) -> None:
        self.prefill = prefill
        self.decode = decode

    def __len__(self) -> int:
        return len(self.prefill) + len(self.decode)

    def __getitem__(self, rows: slice) -> ByClass | torch.Tensor:
        """Rows of one class as a tensor; else of both."""
        first, last = self._of(rows)
        if rows.start >= len(self.prefill):
            return self.decode[last]
        if rows.stop <= len(self.prefill):
            return self.prefill[first]
        return ByClass(self.prefill[first], self.decode[last])

    def __setitem__(self, rows: slice, value: ByClass | torch.Tensor) -> None:
        first, last = self._of(rows)
        if isinstance(value, ByClass):
            self.prefill[first] = value.prefill
            self.decode[last] = value.decode
        elif rows.start >= len(self.prefill):
            self.decode[last] = value
        else:
            self.prefill[first] = value

    def _of(self, rows: slice) -> tuple[slice, slice]:
        """The rows' parts in both tensors."""
        edge = len(self.prefill)
        first = slice(min(rows.start, edge), min(rows.stop, edge))
        return first, slice(max(rows.start - edge, 0), max(rows.stop - edge, 0))


class LatentOps(Ops):
    """Operations of a model with latent attention.

    Shape letters beside those of `Ops`: N and R dims of a head's query that are not and that are rotated, C dims of the
    latent, V dims of a head's value.
    """

    def qkv(self, layout: RowLayout, read: Tensors, weights: Tensors) -> tuple[torch.Tensor, ...]:
        """x (T, M) -> q, of prompts (T, H (N + R)) and of decodes (B, H (C + R)); the rotated key (T, R); the latent
        (T, C)."""
        model = self._model
        normed = self.norm(read["x"], weights["norm"], weights.get("norm_bias"))
        queries = normed
        if "q_a" in weights:
            queries = self._latent_norm(self.linear(normed, weights["q_a"]), weights["q_a_norm"])
        heads = self.linear(queries, weights["q_b"]).unflatten(1, (model.num_attention_heads, -1))
        plain, turned = heads.split([heads.shape[2] - model.rotated_dims, model.rotated_dims], dim=2)
        positions = layout.on(self._device).positions
        turned = self._turned(positions, turned)
        latent, key = self.linear(normed, weights["kv_a"]).split([weights["up_k"].shape[2], model.rotated_dims], dim=1)
        latent = self._latent_norm(latent.contiguous(), weights["kv_a_norm"])
        key = self._turned(positions, key.unflatten(1, (1, -1))).flatten(1)
        edge = layout.prefill
        prompts = torch.cat((plain[:edge], turned[:edge]), dim=2)
        absorbed = _each_head(plain[edge:], weights["up_k"])
        decodes = torch.cat((absorbed, turned[edge:]), dim=2)
        q = ByClass(prompts.flatten(1), decodes.flatten(1))
        return cast("torch.Tensor", q), key, latent

    def _latent_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, eps=EPSILON, threads=self._threads)

    def _turned(self, positions: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        interleaved = self._model.family.interleaved
        return rope(heads, positions, self.angles, interleaved=interleaved, threads=self._threads)

    def prefill_attention(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """q (T, H (N + R)), k (T, R) and v (T, C) of the prefill rows -> attn (T, H V); `Ops.prefill_attention`."""
        return super().prefill_attention(layout, read | self._expanded(layout, read, weights), {})

    def _expanded(self, layout: RowLayout, read: Tensors, weights: Tensors) -> Tensors:
        """Keys (T, H (N + R)) and values (T, H V) of latents, of this chunk and of those before."""
        found = Tensors()
        for suffix in ("", "_before"):
            if f"k{suffix}" not in read:
                continue
            latent = read[f"v{suffix}"]
            heads = self._model.num_attention_heads
            keys = self.linear(latent, weights["up_k"].flatten(0, 1)).unflatten(1, (heads, -1))
            turned = read[f"k{suffix}"][:, None].expand(-1, heads, -1)
            found[f"k{suffix}"] = torch.cat((keys, turned), dim=2).flatten(1)
            found[f"v{suffix}"] = self.linear(latent, weights["up_v"].flatten(0, 1))
        return found

    def out_proj(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """attn of prompts (T, H V) and of decodes (B, H C), and x (T, M) -> x."""
        attn = cast("ByClass | torch.Tensor", read["attn"])
        up = weights["up_v"].transpose(1, 2)
        if isinstance(attn, ByClass):
            rows = torch.cat((attn.prefill, _expanded(attn.decode, up)))
        else:
            rows = attn if layout.prefill else _expanded(attn, up)
        return self._added(read["x"], self.linear(rows, weights["proj"]))


def _expanded(rows: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Outputs of attention to latents (B, H C) with matrices (H, C, V) -> (B, H V)."""
    return _each_head(rows.unflatten(1, (len(up), -1)), up).flatten(1)


def _each_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Rows x (T, H, A) times one matrix per head (H, A, B) -> (T, H, B)."""
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)


class LatentCache(KVCache):
    """Blocks of latents and rotated keys, layer by layer: (P, b, C + R)."""

    def _shape(self, blocks: int) -> tuple[int, ...]:
        """See `KVCache._shape`."""
        return blocks, self.block_size, self._model.latent_size

    def blocks_of(self, pool: torch.Tensor) -> Blocks:
        """See `KVCache.blocks_of`."""
        return Blocks(pool, None)

    def append_to(self, blocks: Blocks, layout: RowLayout, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the rotated keys (T, R) and latents (T, C) of new rows; see `KVCache.append_to`."""
        pool = blocks.pool
        pool.flatten(0, 1).index_copy_(0, layout.on(pool.device).slots, torch.cat((v, k), dim=1).to(pool.dtype))

    def _decode(
        self, blocks: Blocks, table: Indices, lengths: Indices, q: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """See `KVCache._decode`: queries (B, H (C + R)) -> (B, H C)."""
        width = self._model.kv_lora_rank or 0
        scale = self._model.score_scale
        queries = q.view(len(q), self._model.num_attention_heads, -1)
        how: dict[str, Any] = {}
        if blocks.pool.device.type == "cpu":
            queries = queries.float()
            how["threads"] = torch.get_num_threads()
        else:
            queries = queries.to(blocks.pool.dtype)
        found: torch.Tensor = mla_decode(queries, blocks.pool, table, lengths, value_dim=width, scale=scale, **how)
        return found.flatten(1).to(q.dtype)

    def entries_of(
        self, pool: torch.Tensor, table: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys (T, R) and latents (T, C); see `KVCache.entries_of`."""
        rows = pool.flatten(0, 1)[slots_of(table, tokens, self.block_size).to(pool.device)]
        latent, key = rows.split([self._model.kv_lora_rank or 0, self._model.rotated_dims], dim=1)
        return key, latent
