"""The built-in operations on tensors, rounded where Hugging Face's are rounded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from workbench.engine.lanes.control import Control
from workbench.models import ModelConfig
from workbench.scheduler.batch import Batch
from workbench.scheduler.block_manager import BlockManager
from workbench.stages import RowClass

Tensors = dict[str, torch.Tensor]

STEP_FLOPS = 5e10
"""Floating-point operations after which an operation looks whether its run was stopped: 0.3 to 1 s on a CPU. A layer of
4096 x 28672 takes 212 rows in a step, of which reading the weights again is some percent."""


class Pieces(NamedTuple):
    """Prefills that are pieces of prompts: where they start, the blocks of what went before, and which emit."""

    start: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    emits: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, batch: Batch, blocks: BlockManager) -> Pieces:
        """Those of a part of a batch."""
        width = -(-int(batch.starts.max(initial=0)) // blocks.block_size)
        return cls(batch.starts, blocks.table[batch.prefills, :width], batch.emits)


@dataclass(frozen=True)
class Part:
    """A part of a batch, as the operations need it: prefill rows first, then one row per decode.

    Attributes
    ----------
    prefill_len : list of int
    positions : Tensor (T,) int64
    slots : ndarray (T,) int64
        KV slot of every row: block * block size + offset.
    table : ndarray (decodes, W) int32
    lengths : ndarray (decodes,) int64
        KV entries that each decode reads, its own included.
    pieces : Pieces or None
        Where prefills are pieces of their prompts.
    skipped : int
        Rows that stand before these in every buffer: prefills that do not pass this layer.
    """

    prefill_len: list[int]
    positions: torch.Tensor
    slots: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    pieces: Pieces | None = None
    skipped: int = 0

    @classmethod
    def of(cls, batch: Batch, blocks: BlockManager) -> Part:
        """The rows of a part of a batch, as the operations need them."""
        size = blocks.block_size
        table = blocks.table
        lengths = batch.prefill_len
        first = np.repeat(np.cumsum(lengths) - lengths - batch.starts, lengths)
        positions = np.concatenate((np.arange(int(lengths.sum())) - first, batch.context))
        owners = np.concatenate((np.repeat(batch.prefills, lengths), batch.decodes))
        slots = table[owners, positions // size].astype(np.int64) * size + positions % size
        held = batch.context + 1
        width = -(-int(held.max(initial=1)) // size)
        pieces = Pieces.of(batch, blocks) if batch.cut is not None else None
        return cls(lengths.tolist(), torch.from_numpy(positions), slots, table[batch.decodes, :width], held, pieces)

    @cached_property
    def decodes_alone(self) -> Part:
        """The same part in a layer that its prefills do not pass."""
        first = self.prefill
        rest = (self.positions[first:], self.slots[first:], self.table, self.lengths)
        return Part([], *rest, skipped=self.skipped + first)

    @classmethod
    def smallest(cls) -> Part:
        """One decode that reads its own entry, in slot 0."""
        zero = np.zeros(1, np.int64)
        return cls([], torch.from_numpy(zero), zero, np.zeros((1, 1), np.int32), np.ones(1, np.int64))

    @property
    def prefill(self) -> int:
        """Prefill rows."""
        return sum(self.prefill_len)

    @property
    def rows(self) -> int:
        """All rows."""
        return len(self.positions)

    @property
    def last_rows(self) -> torch.Tensor:
        """The row in the buffers of each request that emits: the last of a prefill, and every decode."""
        ends = np.cumsum(self.prefill_len, dtype=np.int64) - 1
        ends = ends if self.pieces is None else ends[self.pieces.emits]
        return torch.from_numpy(self.skipped + np.concatenate((ends, np.arange(self.prefill, self.rows))))

    def rows_of(self, row_class: RowClass) -> slice:
        """Rows of a class in the buffers."""
        first = self.skipped + (self.prefill if row_class is RowClass.DECODE else 0)
        return slice(first, self.skipped + (self.prefill if row_class is RowClass.PREFILL else self.rows))

    @property
    def before(self) -> npt.NDArray[np.int64]:
        """KV entries of each prefill that earlier pieces of its prompt wrote."""
        return np.zeros(len(self.prefill_len), np.int64) if self.pieces is None else self.pieces.start


class Ops:
    """Operations of one model.

    Each takes the part, the read buffers (rows of the operation's class) and its weights, and returns what it writes.
    Shape letters: T rows, M model dim, H query heads, K key-value heads, D head dim, E experts, F expert dim.
    """

    def __init__(self, model: ModelConfig, control: Control | None = None) -> None:
        self._model = model
        self._control = control or Control()
        self.touched = 0  # distinct experts, summed over calls
        exponent = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
        self._frequencies = 1.0 / (model.rope_theta**exponent)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of rows (T, M): in fp32, rounded, then scaled."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._model.rms_norm_eps)
        return weight * scaled.to(x.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`functional.linear` of rows (T, M), in steps."""
        step = max(1, int(STEP_FLOPS / (2 * weight.numel())))
        if len(x) <= step:
            return functional.linear(x, weight, bias)
        out = x.new_empty(len(x), len(weight))
        for low in range(0, len(x), step):
            self._control.check()
            out[low : low + step] = functional.linear(x[low : low + step], weight, bias)
        return out

    def qkv(self, part: Part, read: Tensors, weights: Tensors) -> tuple[torch.Tensor, ...]:
        """x (T, M) -> q (T, H D), k and v (T, K D), rotated."""
        model = self._model
        projected = self.linear(self.norm(read["x"], weights["norm"]), weights["proj"], weights.get("bias"))
        q, k, v = projected.split([model.q_size, model.kv_size, model.kv_size], dim=-1)
        if model.family.qk_norm:
            q = self._norm_heads(q, weights["q_norm"])
            k = self._norm_heads(k, weights["k_norm"])
        angles = part.positions[:, None].float() * self._frequencies
        cos, sin = (torch.cat((f, f), dim=-1).to(q.dtype)[:, None, :] for f in (angles.cos(), angles.sin()))
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin), v.contiguous()

    def _norm_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of runs of x (T, H D) as wide as the weight: of every head, or of all heads together."""
        return self.norm(x.view(len(x), -1, len(weight)), weight).view(x.shape)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(x), -1, self._model.head_dim)
        low, high = heads.chunk(2, dim=-1)
        return (heads * cos + torch.cat((-high, low), dim=-1) * sin).reshape(len(x), -1)

    def prefill_attention(self, part: Part, read: Tensors, weights: Tensors) -> torch.Tensor:
        """q (T, H D), k and v (T, K D) of the prefill rows -> attn (T, H D), causal within each prompt.

        A piece of a prompt also attends to what went before: k_before and v_before, those of all pieces in turn.
        """
        out = torch.empty_like(read["q"])
        low = 0
        past = 0
        for length, before in zip(part.prefill_len, part.before.tolist(), strict=True):
            self._control.check()
            q, k, v = (read[name][low : low + length] for name in "qkv")
            if before:
                k, v = (torch.cat((read[f"{n}_before"][past : past + before], new)) for n, new in (("k", k), ("v", v)))
            q, k, v = (rows.view(1, len(rows), -1, self._model.head_dim).transpose(1, 2) for rows in (q, k, v))
            out[low : low + length] = self._causal(q, k, v, before).transpose(1, 2).reshape(length, -1)
            low = low + length
            past = past + before
        return out

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: int) -> torch.Tensor:
        """Attention of a prompt's queries (1, H, L, D), which stand behind so many keys (1, K, before + L, D)."""
        attend = partial(functional.scaled_dot_product_attention, enable_gqa=True)
        length = q.shape[2]
        keys = k.shape[2]
        step = max(1, int(STEP_FLOPS / (4 * keys * q.shape[1] * q.shape[3])))
        if length <= step and not before:
            return attend(q, k, v, is_causal=True)
        pieces = []
        for low in range(0, length, step):
            self._control.check()
            high = min(low + step, length)
            seen = before + high
            mask = torch.ones(high - low, seen, dtype=torch.bool).tril(before + low)
            pieces.append(attend(q[:, :, low:high], k[:, :, :seen], v[:, :, :seen], attn_mask=mask))
        return torch.cat(pieces, dim=2)

    def out_proj(self, part: Part, read: Tensors, weights: Tensors) -> torch.Tensor:
        """attn (T, H D) and x (T, M) -> x."""
        return read["x"] + self.linear(read["attn"], weights["proj"])

    def route(self, part: Part, read: Tensors, weights: Tensors) -> tuple[torch.Tensor, ...]:
        """x (T, M) -> h (T, M), gates (T, 2 k) fp32: expert ids, then their weights."""
        h = self.norm(read["x"], weights["norm"])
        scores = functional.linear(h, weights["gate"]).float().softmax(dim=-1)
        top, ids = scores.topk(self._model.num_experts_per_tok, dim=-1)
        if self._model.norm_topk_prob:
            top /= top.sum(dim=-1, keepdim=True)
        return h, torch.cat((ids.float(), top), dim=-1)

    def experts(self, part: Part, read: Tensors, weights: Tensors) -> torch.Tensor:
        """h (T, M), gates (T, 2 k) -> routed (T, M): each expert computes its rows at once.

        With `wanted` (T, k) bool only those of every token's choices are computed.
        """
        wanted = read.get("wanted")
        h = read["h"]
        chosen = self._model.num_experts_per_tok
        ids = read["gates"][:, :chosen].reshape(-1).long()
        scales = read["gates"][:, chosen:].reshape(-1).to(h.dtype)
        pairs = torch.arange(ids.numel()) if wanted is None else wanted.reshape(-1).nonzero()[:, 0]
        order = pairs[ids[pairs].argsort(stable=True)]
        counts = torch.bincount(ids[pairs], minlength=self._model.num_local_experts).tolist()
        self.touched += sum(count > 0 for count in counts)
        out = torch.zeros_like(h)
        low = 0
        for expert, count in enumerate(counts):
            if count:
                self._control.check()
                mine = order[low : low + count]
                rows = mine // chosen
                answer = self._gated(_filled(h[rows]), weights[f"gate_up.{expert}"], weights[f"down.{expert}"])
                out.index_add_(0, rows, answer[:count] * scales[mine, None])
            low += count
        return out

    def shared_experts(self, part: Part, read: Tensors, weights: Tensors) -> torch.Tensor:
        """h (T, M) -> shared (T, M), times the sigmoid of its gate; with routed (T, M) their sum instead."""
        out = self._gated(read["h"], weights["gate_up"], weights["down"])
        out *= functional.linear(read["h"], weights["gate"]).sigmoid_()
        return out.add_(read["routed"]) if "routed" in read else out

    def combine(self, part: Part, read: Tensors, weights: Tensors) -> torch.Tensor:
        """x and routed (T, M), and shared where it is read -> x."""
        if "shared" in read:
            return (read["routed"] + read["shared"]).add_(read["x"])
        return read["x"] + read["routed"]

    def _gated(self, rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """down (silu(gate x) * (up x)) of rows (T, M)."""
        gate, up = self.linear(rows, gate_up).chunk(2, dim=-1)
        return self.linear(functional.silu(gate).mul_(up), down)


def _filled(rows: torch.Tensor) -> torch.Tensor:
    """Rows filled up with zeros to a multiple of eight, in bf16.

    oneDNN compiles a kernel for every new number of rows, which takes 0.2 to 1.2 ms; routing gives a new one each time.
    With 256 rows and 8 experts of 1024 x 512 the experts took 31 ms so, and 12 ms once the kernels were there (Zen 4).
    """
    missing = -len(rows) % 8
    return functional.pad(rows, (0, 0, 0, missing)) if missing and rows.dtype is torch.bfloat16 else rows
