"""Rates that no computation exceeds, of memory and of arithmetic, on a CPU or a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from workbench.bench.cpu.work import PLAIN
from workbench.kernels import multiply_add, read_memory

_POOL = 1 << 28
_SHORT = 0.02
"""Duration of one repetition on a GPU [s]: many calls, because a single call is shorter than its launch."""


class Roofs(NamedTuple):
    """Rates of memory [B/s] and arithmetic [FLOP/s]."""

    read: float
    multiply: float

    @classmethod
    def measured(cls, device: str, threads: int) -> Roofs:
        """Measure both; torch has its own number of threads.

        Memory is read on a CPU, and copied (read and written) on a GPU. Arithmetic is a large product in bf16 (`PLAIN`
        on a CPU), or multiply-adds of fp32 or bf16 on a CPU where those are faster.
        """
        side = 1024 if device == "cpu" else 8192
        one = torch.randn(side, side, device=device).to(PLAIN if device == "cpu" else torch.bfloat16)
        multiply = 2 * side**3 / _least(lambda: one @ one, device, 5)
        if device == "cpu":
            for bf16 in (False, True):
                add = partial(multiply_add, threads=threads, bf16=bf16)
                multiply = max(multiply, add() / _least(add, device, 3))
            pool = np.ones(_POOL, np.int8)
            return cls(_POOL / _least(partial(read_memory, pool, threads=threads), device, 9), multiply)
        source = torch.ones(4 * _POOL, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        return cls(2 * len(source) / _least(lambda: target.copy_(source), device, 9), multiply)

    def or_better(self, other: Roofs) -> Roofs:
        """The higher rate of each: a computer's speed drifts, and its best is the roof."""
        return Roofs(*map(max, zip(self, other, strict=True)))


def _least(call: Callable[[], object], device: str, times: int) -> float:
    """The shortest time of several calls [s]."""
    return min(seconds_of(call, device) for _ in range(times))


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Time of one call [s]; on a GPU the mean over enough calls to outweigh their launch."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    first = _on_gpu(call, 1)
    return _on_gpu(call, max(1, round(_SHORT / first)))


def _on_gpu(call: Callable[[], object], count: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
