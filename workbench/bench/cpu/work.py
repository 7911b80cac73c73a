"""What `bench cpu` times: the form of it, routed experts, and the pool that all of it reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from workbench.kernels import CodePath, Format, empty_in_huge_pages, fused_moe, fused_moe_work, pack_experts

MODEL, INNER = 4096, 14336
"""Model and expert dim of the experts: Mixtral-8x7B's."""

PEERS = ("plain Numba", "naive Numba", "torch bf16", "torch SDPA", "C")
"""Who may compute a work beside ours. Plain is our kernels' portable path, naive the loops of the definition."""
COLUMNS = (*PEERS, "BF16 KV")
"""Whom the report sets beside ours; the last one is our own kernel on a cache of 16 bits, beside one of int8."""

Contender = Callable[[int], None]
"""Computes the work on so many threads."""


class Work(Protocol):
    """Something to compute: its name, the FLOP and bytes that our kernel declares, and who computes it, ours first.

    `ceilings` only read the cache, and `missing` tells which contender is not there, and why.
    """

    name: str
    flops: int
    bytes: int
    peak: float
    contenders: dict[str, Contender]
    ceilings: dict[str, Contender]
    missing: dict[str, str]


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
        self.flops, self.bytes = fused_moe_work(layer.model, layer.inner, tokens, 1, 1, Format.BF16.weight_bytes())
        portable = partial(self._compute, path=CodePath.PORTABLE)
        self.contenders: dict[str, Contender] = {
            "ours": self._compute,
            "plain Numba": portable,
            "torch bf16": self._eager,
        }
        self.ceilings: dict[str, Contender] = {}
        self.missing: dict[str, str] = {}

    def _compute(self, threads: int, path: CodePath | None = None) -> None:
        self._ids ^= 1
        fused_moe(self._h, self._layer.packed, self._ids, self._weights, out=self.out, threads=threads, path=path)

    def _eager(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._ids ^= 1
        expert = int(self._ids[0, 0])
        gate_up, down = (
            torch.from_numpy(m[expert]).view(torch.bfloat16) for m in (self._layer.gate_up, self._layer.down)
        )
        self.out[:] = eager_expert(torch.from_numpy(self._h), gate_up, down).float().numpy()


def eager_expert(h: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert by torch in bf16: two products with oneDNN, SiLU between."""
    gate, up = functional.linear(h.bfloat16(), gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


def random_pool(elements: int) -> npt.NDArray[np.uint16]:
    """Random bf16 of unit variance, in huge pages where the system grants them."""
    pool = empty_in_huge_pages(elements, np.uint16)
    some = (np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for start in range(0, elements, some.size):
        pool[start : start + some.size] = some[: elements - start]
    return pool
