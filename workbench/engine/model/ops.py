"""The built-in operations on tensors. They round where Hugging Face's implementations round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from workbench.engine.lanes.control import Control
from workbench.kernels import fused_moe
from workbench.models import ModelConfig
from workbench.scheduler.batch import Batch
from workbench.scheduler.block_manager import BlockManager
from workbench.stages import RowClass

Tensors = dict[str, torch.Tensor]

STEP_FLOPS = 5e10
"""Floating-point operations between two checks for a stop request: 0.3 to 1 s on a CPU. With a matrix of 4096 x 28672
a step has 212 rows; reading the weights again in every step costs a few percent of it."""


class Chunks(NamedTuple):
    """Chunks of prompts, one per prefill.

    Attributes
    ----------
    start : ndarray (prefills,) int64
        Position in its prompt of each chunk's first token.
    table : ndarray (prefills, W) int32
        KV blocks that hold the tokens before each chunk.
    emits : ndarray (prefills,) bool
        True where the chunk samples a token.
    """

    start: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    emits: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, batch: Batch, blocks: BlockManager) -> Chunks:
        """Chunks of one part of a batch."""
        width = -(-int(batch.starts.max(initial=0)) // blocks.block_size)
        return cls(batch.starts, blocks.table[batch.prefills, :width], batch.emits)


@dataclass(frozen=True)
class RowLayout:
    """Layout of the rows of one part of a batch: prefill rows first, then one row per decode.

    Attributes
    ----------
    prefill_len : list of int
        Rows of each prefill.
    positions : Tensor (T,) int64
        Position of every row's token in its sequence.
    slots : ndarray (T,) int64
        KV slot of every row: block * block size + offset.
    table : ndarray (decodes, W) int32
        KV blocks of each decode.
    lengths : ndarray (decodes,) int64
        KV entries that each decode reads, its own included.
    chunks : Chunks or None
        Set where the prefills are chunks of their prompts.
    skipped : int
        Rows of prefills that do not pass this layer; they stand before these rows in every buffer.
    """

    prefill_len: list[int]
    positions: torch.Tensor
    slots: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    chunks: Chunks | None = None
    skipped: int = 0

    @classmethod
    def of(cls, batch: Batch, blocks: BlockManager) -> RowLayout:
        """Lay out the rows of one part of a batch."""
        size = blocks.block_size
        table = blocks.table
        lengths = batch.prefill_len
        first = np.repeat(np.cumsum(lengths) - lengths - batch.starts, lengths)
        positions = np.concatenate((np.arange(int(lengths.sum())) - first, batch.context))
        owners = np.concatenate((np.repeat(batch.prefills, lengths), batch.decodes))
        slots = table[owners, positions // size].astype(np.int64) * size + positions % size
        held = batch.context + 1
        width = -(-int(held.max(initial=1)) // size)
        chunks = Chunks.of(batch, blocks) if batch.cut is not None else None
        return cls(lengths.tolist(), torch.from_numpy(positions), slots, table[batch.decodes, :width], held, chunks)

    @cached_property
    def decodes_alone(self) -> RowLayout:
        """The layout of the same part in a layer that its prefills do not pass."""
        first = self.prefill
        rest = (self.positions[first:], self.slots[first:], self.table, self.lengths)
        return RowLayout([], *rest, skipped=self.skipped + first)

    @classmethod
    def smallest(cls) -> RowLayout:
        """The layout of one decode that reads its own entry, in slot 0."""
        zero = np.zeros(1, np.int64)
        return cls([], torch.from_numpy(zero), zero, np.zeros((1, 1), np.int32), np.ones(1, np.int64))

    @property
    def prefill(self) -> int:
        """Number of prefill rows."""
        return sum(self.prefill_len)

    @property
    def rows(self) -> int:
        """Number of rows, prefill and decode."""
        return len(self.positions)

    @property
    def last_rows(self) -> torch.Tensor:
        """Row in the buffers of each request that emits: the last row of a prefill, and every decode row."""
        ends = np.cumsum(self.prefill_len, dtype=np.int64) - 1
        ends = ends if self.chunks is None else ends[self.chunks.emits]
        return torch.from_numpy(self.skipped + np.concatenate((ends, np.arange(self.prefill, self.rows))))

    def rows_of(self, row_class: RowClass) -> slice:
        """Rows of a class in the buffers."""
        first = self.skipped + (self.prefill if row_class is RowClass.DECODE else 0)
        return slice(first, self.skipped + (self.prefill if row_class is RowClass.PREFILL else self.rows))

    @property
    def before(self) -> npt.NDArray[np.int64]:
        """KV entries of each prefill that earlier chunks of its prompt wrote."""
        return np.zeros(len(self.prefill_len), np.int64) if self.chunks is None else self.chunks.start


class Ops:
    """Operations of one model.

    Each operation takes the layout of the rows, the buffers that it reads (rows of its class) and its weights, and
    returns the buffers that it writes.
    Shape letters: T rows, M model dim, H query heads, K key-value heads, D head dim, E experts, F expert dim.
    """

    def __init__(self, model: ModelConfig, control: Control | None = None) -> None:
        self._model = model
        self._control = control or Control()
        exponent = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
        self._frequencies = 1.0 / (model.rope_theta**exponent)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels of experts with weights of this type."""
        pair = torch.zeros(1, 128, 64, dtype=dtype), torch.zeros(1, 64, 64, dtype=dtype)
        one = torch.zeros(1, 1)
        fused_moe(torch.zeros(1, 64, dtype=dtype), pair, one.int(), one)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of rows (T, M): normalised in fp32, rounded to the rows' type, then scaled."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._model.rms_norm_eps)
        return weight * scaled.to(x.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`functional.linear` of rows (T, M), in steps between which the run can be stopped."""
        step = max(1, int(STEP_FLOPS / (2 * weight.numel())))
        if len(x) <= step:
            return functional.linear(x, weight, bias)
        out = x.new_empty(len(x), len(weight))
        for low in range(0, len(x), step):
            self._control.check()
            out[low : low + step] = functional.linear(x[low : low + step], weight, bias)
        return out

    def qkv(self, layout: RowLayout, read: Tensors, weights: Tensors) -> tuple[torch.Tensor, ...]:
        """x (T, M) -> q (T, H D), k and v (T, K D), rotated."""
        model = self._model
        projected = self.linear(self.norm(read["x"], weights["norm"]), weights["proj"], weights.get("bias"))
        q, k, v = projected.split([model.q_size, model.kv_size, model.kv_size], dim=-1)
        if model.family.qk_norm:
            q = self._norm_heads(q, weights["q_norm"])
            k = self._norm_heads(k, weights["k_norm"])
        angles = layout.positions[:, None].float() * self._frequencies
        cos = _per_head(angles.cos(), q.dtype)
        sin = _per_head(angles.sin(), q.dtype)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin), v.contiguous()

    def _norm_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over groups of columns of x (T, H D), each as wide as the weight: one head, or all heads together."""
        return self.norm(x.view(len(x), -1, len(weight)), weight).view(x.shape)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(x), -1, self._model.head_dim)
        low, high = heads.chunk(2, dim=-1)
        return (heads * cos + torch.cat((-high, low), dim=-1) * sin).reshape(len(x), -1)

    def prefill_attention(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """q (T, H D), k and v (T, K D) of the prefill rows -> attn (T, H D), causal within each prompt.

        A chunk also attends to the tokens of its prompt before it: `k_before` and `v_before` hold their keys and
        values, chunk after chunk.
        """
        head_dim = self._model.head_dim
        out = torch.empty_like(read["q"])
        low = 0
        past = 0
        for length, before in zip(layout.prefill_len, layout.before.tolist(), strict=True):
            self._control.check()
            q = read["q"][low : low + length]
            k = read["k"][low : low + length]
            v = read["v"][low : low + length]
            if before:
                k = torch.cat((read["k_before"][past : past + before], k))
                v = torch.cat((read["v_before"][past : past + before], v))
            attended = self._causal(_heads(q, head_dim), _heads(k, head_dim), _heads(v, head_dim), before)
            out[low : low + length] = attended.transpose(1, 2).reshape(length, -1)
            low = low + length
            past = past + before
        return out

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: int) -> torch.Tensor:
        """Attention of queries (1, H, L, D) over keys (1, K, before + L, D), of which query i sees before + i + 1."""
        attend = partial(functional.scaled_dot_product_attention, enable_gqa=True)
        length = q.shape[2]
        keys = k.shape[2]
        step = max(1, int(STEP_FLOPS / (4 * keys * q.shape[1] * q.shape[3])))
        if length <= step and not before:
            return attend(q, k, v, is_causal=True)
        outputs = []
        for low in range(0, length, step):
            self._control.check()
            high = min(low + step, length)
            seen = before + high
            mask = torch.ones(high - low, seen, dtype=torch.bool).tril(before + low)
            outputs.append(attend(q[:, :, low:high], k[:, :, :seen], v[:, :, :seen], attn_mask=mask))
        return torch.cat(outputs, dim=2)

    def out_proj(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """attn (T, H D) and x (T, M) -> x."""
        return read["x"] + self.linear(read["attn"], weights["proj"])

    def route(self, layout: RowLayout, read: Tensors, weights: Tensors) -> tuple[torch.Tensor, ...]:
        """x (T, M) -> h (T, M) and gates (T, 2 k) fp32, the k expert ids of each row and then their k weights."""
        h = self.norm(read["x"], weights["norm"])
        scores = functional.linear(h, weights["gate"]).float().softmax(dim=-1)
        top, ids = scores.topk(self._model.num_experts_per_tok, dim=-1)
        if self._model.norm_topk_prob:
            top /= top.sum(dim=-1, keepdim=True)
        return h, torch.cat((ids.float(), top), dim=-1)

    def experts(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """h (T, M), gates (T, 2 j) -> routed (T, M), the weighted sum over the j experts of each row."""
        h = read["h"]
        ids, scales = (half.contiguous() for half in read["gates"].chunk(2, dim=-1))
        chosen = ids.int()
        pair = weights["gate_up"], weights["down"]
        step = max(1, int(STEP_FLOPS / (2 * chosen.shape[1] * sum(matrices[0].numel() for matrices in pair))))
        outputs = []
        for low in range(0, len(h), step):
            self._control.check()
            some = slice(low, low + step)
            outputs.append(fused_moe(h[some], pair, chosen[some], scales[some]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def shared_experts(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """h (T, M) -> shared (T, M), scaled by the sigmoid of its gate; where `routed` is read, their sum."""
        out = self._gated(read["h"], weights["gate_up"], weights["down"])
        out *= functional.linear(read["h"], weights["gate"]).sigmoid_()
        return out.add_(read["routed"]) if "routed" in read else out

    def combine(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """x (T, M) + routed (T, M), + shared (T, M) where it is read -> x."""
        if "shared" in read:
            return (read["routed"] + read["shared"]).add_(read["x"])
        return read["x"] + read["routed"]

    def _gated(self, rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """down (silu(gate x) * (up x)) of rows (T, M)."""
        gate, up = self.linear(rows, gate_up).chunk(2, dim=-1)
        return self.linear(functional.silu(gate).mul_(up), down)


def _per_head(angles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cosines or sines (T, D / 2), repeated for both halves of a head: (T, 1, D)."""
    return torch.cat((angles, angles), dim=-1).to(dtype)[:, None, :]


def _heads(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows (L, H D) as heads (1, H, L, D)."""
    return rows.view(1, len(rows), -1, head_dim).transpose(1, 2)
