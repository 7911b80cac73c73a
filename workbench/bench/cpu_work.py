"""What `bench cpu` times: decode attention and routed experts, by our kernels and by what a user would take instead."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workbench.kernels import (
    CodePath,
    Format,
    expert_mlp,
    expert_mlp_work,
    flash_decode,
    flash_decode_work,
    pack_experts,
)

HEADS, DIM, BLOCK = 8, 128, 64
"""KV heads, head dim and tokens per block of every attention."""
MODEL, INNER = 4096, 14336
"""Model and expert dim of the experts: Mixtral-8x7B's."""

Contender = Callable[[int], None]
"""Computes the work on so many threads."""


class Work(Protocol):
    """Something to compute: its name, FLOP, the bytes it cannot but read, and who computes it, ours first."""

    name: str
    flops: int
    bytes: int
    peak: float
    contenders: dict[str, Contender]


@dataclass(frozen=True)
class Case:
    """A batch of decodes: a name, the lengths of its sequences and the query heads that share a KV head."""

    name: str
    lengths: npt.NDArray[np.int64]
    group: int


def attention_cases() -> list[Case]:
    """64 sequences of 128 to 2048 tokens, and one of 65,536."""
    uneven = np.random.default_rng(7).integers(128, 2049, 64)
    long = np.array([65536])
    batches = [Case(f"64 sequences, G={group}", uneven, group) for group in (1, 4, 8)]
    return [*batches, *(Case(f"1 x 64k, G={group}", long, group) for group in (1, 4))]


class Attention:
    """Decode attention of a case; all cases share one pool of cache blocks."""

    peak = 0.85
    """Share of the multiply-add peak that the bar asks for where arithmetic binds."""

    def __init__(self, case: Case, pool: npt.NDArray[np.uint16]) -> None:
        self.name, self.case, rng = case.name, case, np.random.default_rng(0)
        count = -(-case.lengths // BLOCK)
        self._kv = pool[: int(count.sum()) * HEADS * 2 * BLOCK * DIM].reshape(-1, HEADS, 2, BLOCK, DIM)
        places = rng.permutation(len(self._kv)).astype(np.int32)
        self._table = np.zeros((len(count), int(count.max())), np.int32)
        for row, (end, size) in enumerate(zip(np.cumsum(count), count, strict=True)):
            self._table[row, :size] = places[end - size : end]
        self._q = rng.standard_normal((len(count), HEADS * case.group, DIM), dtype=np.float32)
        self.out = np.empty_like(self._q)
        context, heads = int(case.lengths.sum()), HEADS * case.group
        self.flops, _ = flash_decode_work(heads, HEADS, DIM, context, len(count), 2)
        self.bytes = 2 * HEADS * DIM * 2 * context
        self._rows = [self._gathered(row) for row in range(len(count))]
        portable = partial(self._decode, path=CodePath.PORTABLE)
        self.contenders: dict[str, Contender] = {"ours": self._decode, "portable": portable, "torch": self._eager}

    def _gathered(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (K, S, D) of one sequence, side by side in memory, which eager torch needs; untimed."""
        length = int(self.case.lengths[row])
        blocks = self._kv[self._table[row, : -(-length // BLOCK)]]
        both = torch.from_numpy(blocks.transpose(2, 1, 0, 3, 4).reshape(2, HEADS, -1, DIM)).view(torch.bfloat16)
        return both[0, :, :length].contiguous(), both[1, :, :length].contiguous()

    def _decode(self, threads: int, path: CodePath | None = None) -> None:
        flash_decode(self._q, self._kv, self._table, self.case.lengths, out=self.out, threads=threads, path=path)

    def _eager(self, threads: int) -> None:
        """torch in bf16: scores, softmax and weighted sum, sequence by sequence."""
        torch.set_num_threads(threads)
        for row, (k, v) in enumerate(self._rows):
            q = torch.from_numpy(self._q[row]).bfloat16().view(HEADS, self.case.group, DIM)
            values = torch.softmax(q @ k.transpose(1, 2) * DIM**-0.5, dim=-1) @ v
            self.out[row] = values.float().reshape(-1, DIM).numpy()


class Layer:
    """Two experts as torch takes them and packed for ours; they take turns, so that none stays in a cache."""

    def __init__(self, pool: npt.NDArray[np.uint16], *, model: int = MODEL, inner: int = INNER) -> None:
        both, back = 2 * 2 * inner * model, 2 * model * inner
        self.model, self.inner = model, inner
        self.gate_up = pool[:both].reshape(2, 2 * inner, model)
        self.down = pool[both : both + back].reshape(2, model, inner)
        self.packed = pack_experts(self.gate_up, self.down)


class Experts:
    """One routed expert with some tokens, in bf16."""

    peak = 0.65
    """As of attention; an expert's rows are used once per token and leave less to arithmetic."""

    def __init__(self, tokens: int, layer: Layer) -> None:
        self.name, rng = f"expert, {tokens} tokens" if tokens > 1 else "expert, 1 token", np.random.default_rng(0)
        self._layer = layer
        self._h = rng.standard_normal((tokens, layer.model), dtype=np.float32)
        self._ids, self._weights = np.zeros((tokens, 1), np.int64), np.ones((tokens, 1), np.float32)
        self.out = np.empty_like(self._h)
        self.flops, _ = expert_mlp_work(layer.model, layer.inner, tokens, 1, 1, Format.BF16)
        self.bytes = 3 * layer.model * layer.inner * 2
        portable = partial(self._compute, path=CodePath.PORTABLE)
        self.contenders: dict[str, Contender] = {"ours": self._compute, "portable": portable, "torch": self._eager}

    def _compute(self, threads: int, path: CodePath | None = None) -> None:
        self._ids ^= 1
        expert_mlp(self._h, self._layer.packed, self._ids, self._weights, out=self.out, threads=threads, path=path)

    def _eager(self, threads: int) -> None:
        """torch in bf16: two products with oneDNN, SiLU between."""
        torch.set_num_threads(threads)
        self._ids ^= 1
        expert = int(self._ids[0, 0])
        gate_up, down = (
            torch.from_numpy(m[expert]).view(torch.bfloat16) for m in (self._layer.gate_up, self._layer.down)
        )
        h = torch.from_numpy(self._h).bfloat16()
        gate, up = torch.nn.functional.linear(h, gate_up).chunk(2, dim=-1)
        answer = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)
        self.out[:] = answer.float().numpy()


def every_work() -> tuple[npt.NDArray[np.uint16], list[Work]]:
    """The pool of random weights and caches, and everything that is computed from it."""
    blocks = max(int((-(-case.lengths // BLOCK)).sum()) for case in attention_cases())
    pool = random_pool(max(blocks * HEADS * 2 * BLOCK * DIM, 6 * MODEL * INNER))
    attentions: list[Work] = [Attention(case, pool) for case in attention_cases()]
    layer = Layer(pool)
    return pool, [*attentions, *(Experts(tokens, layer) for tokens in (1, 4))]


def random_pool(elements: int) -> npt.NDArray[np.uint16]:
    """Random bf16 of unit variance, in huge pages where the system grants them."""
    memory = mmap.mmap(-1, 2 * elements + (1 << 21))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    pool = np.frombuffer(memory, np.uint16)
    pool = pool[-pool.ctypes.data % (1 << 21) // 2 :][:elements]
    some = (np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for start in range(0, elements, some.size):
        pool[start : start + some.size] = some[: elements - start]
    return pool
