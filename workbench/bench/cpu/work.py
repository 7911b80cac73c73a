"""Works that `bench cpu` times: their protocol, routed experts, and the pool of memory that all of them read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from workbench.kernels import CodePath, Format, empty_in_huge_pages, fused_moe, fused_moe_work, pack_experts

MODEL = 4096
INNER = 14336
"""Model and expert dim of the experts: Mixtral-8x7B's."""

PEERS = ("plain Numba", "naive Numba", "torch bf16", "vLLM", "C")
"""Baselines of attention. Plain is the portable path of our kernels, naive the loops of the definition."""
COLUMNS = (*PEERS, "torch fp32", "BF16 KV")
"""Columns of the report. Of torch, experts have the one of `PLAIN`; the last one is our own kernel on a cache of 16
bits, as a baseline of the int8 cache."""


def _is_bf16_fast() -> bool:
    """False on CPUs with AVX2 alone, where torch takes 80 times as long for bf16 as for fp32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


PLAIN = torch.bfloat16 if _is_bf16_fast() else torch.float32
"""The type in which torch multiplies weights in bf16 fastest on this CPU."""

Implementation = Callable[[int], None]
"""Computes a work; takes the number of threads."""


class Work(Protocol):
    """A computation: its name, the FLOP and bytes that our kernel declares, and its implementations, ours first.

    `peak` is the share of the multiply-add peak that counts as the roof, `in_bf16` the share of the FLOP for which that
    peak is the one of products of bf16 (AVX512_BF16), where the CPU has them. `ceilings` only read the cache; `missing`
    maps each baseline that cannot run here to the reason.
    """

    name: str
    flops: int
    bytes: int
    peak: float
    in_bf16: float
    implementations: dict[str, Implementation]
    ceilings: dict[str, Implementation]
    missing: dict[str, str]


class Layer:
    """Two experts in torch's layout and packed for our kernel; calls alternate, so that neither stays in a cache."""

    def __init__(self, pool: npt.NDArray[np.uint16], *, model: int = MODEL, inner: int = INNER) -> None:
        both = 2 * 2 * inner * model
        back = 2 * model * inner
        self.model = model
        self.inner = inner
        self.gate_up = pool[:both].reshape(2, 2 * inner, model)
        self.down = pool[both : both + back].reshape(2, model, inner)
        self.packed = pack_experts(self.gate_up, self.down)


class Experts:
    """One routed expert with some tokens, in bf16."""

    peak = 1.0
    in_bf16 = 0.0
    """Activations are fp32."""

    def __init__(self, tokens: int, layer: Layer) -> None:
        self.name = f"expert, {tokens} tokens" if tokens > 1 else "expert, 1 token"
        rng = np.random.default_rng(0)
        self._layer = layer
        self._h = rng.standard_normal((tokens, layer.model), dtype=np.float32)
        self._ids = np.zeros((tokens, 1), np.int64)
        self._weights = np.ones((tokens, 1), np.float32)
        self.out = np.empty_like(self._h)
        self.flops, self.bytes = fused_moe_work(layer.model, layer.inner, tokens, 1, 1, Format.BF16.weight_bytes())
        portable = partial(self._compute, path=CodePath.PORTABLE)
        self.implementations: dict[str, Implementation] = {
            "ours": self._compute,
            "plain Numba": portable,
            "torch bf16" if PLAIN is torch.bfloat16 else "torch fp32": self._eager,
        }
        self.ceilings: dict[str, Implementation] = {}
        self.missing: dict[str, str] = {}
        both = (layer.gate_up, layer.down)
        self._plain = [torch.from_numpy(own).view(torch.bfloat16).to(PLAIN) for own in both]

    def _compute(self, threads: int, path: CodePath | None = None) -> None:
        self._ids ^= 1
        fused_moe(self._h, self._layer.packed, self._ids, self._weights, out=self.out, threads=threads, path=path)

    def _eager(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._ids ^= 1
        expert = int(self._ids[0, 0])
        gate_up, down = (own[expert] for own in self._plain)
        self.out[:] = eager_expert(torch.from_numpy(self._h), gate_up, down).float().numpy()


def eager_expert(h: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert computed by torch in its weights' type: two products by oneDNN with SiLU between them."""
    gate, up = functional.linear(h.to(gate_up.dtype), gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


def random_pool(elements: int) -> npt.NDArray[np.uint16]:
    """Random bf16 numbers of unit variance, in huge pages where the system grants them."""
    pool = empty_in_huge_pages(elements, np.uint16)
    normal = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32)
    some = (normal.view(np.uint32) >> 16).astype(np.uint16)
    for start in range(0, elements, some.size):
        pool[start : start + some.size] = some[: elements - start]
    return pool
