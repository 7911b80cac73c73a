"""One round of `bench cpu`: all implementations of a work, and the memory and arithmetic rates at that time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.bench.cpu.work import Work
from workbench.kernels import multiply_add, read_memory

SLOW_BELOW = 0.8
"""Share of the fastest reading; a round that reads slower than this belongs to the memory's slow state."""


@dataclass(frozen=True)
class Round:
    """Measurements of one round: reading [B/s], multiply-adds [FLOP/s], and seconds by implementation and ceiling.

    `multiply` is the rate of multiply-adds of fp32, `multiply_bf16` of bf16; without AVX512_BF16 both are fp32's.

    Memory is read twice in a round. `best` is the faster reading and tells the state of the memory: a single reading
    that was interrupted would look like the slow state. `read` is one reading and gives the roof, because our kernel
    too is timed once.
    """

    work: Work
    threads: int
    read: float
    best: float
    multiply: float
    multiply_bf16: float
    seconds: dict[str, float]

    @property
    def roof(self) -> float:
        """Seconds of reading all bytes in order, or of a share of the multiply-add peak, whichever is more."""
        in_bf16 = self.work.in_bf16 / self.multiply_bf16
        computing = self.work.flops * ((1 - self.work.in_bf16) / self.multiply + in_bf16)
        return max(self.work.bytes / self.read, computing / self.work.peak)

    def times(self, name: str) -> float:
        """Time of another implementation over the time of ours [1]."""
        return self.seconds[name] / self.seconds["ours"]


def play(work: Work, pool: npt.NDArray[Any], threads: int, rng: np.random.Generator) -> Round:
    """Run every implementation once and read memory twice, in random order.

    The order is random so that all of them meet the same state of the memory.
    """
    calls: dict[str, Callable[[], Any]] = {
        "read": partial(read_memory, pool, threads=threads),
        "read again": partial(read_memory, pool, threads=threads),
        "multiply": partial(multiply_add, threads=threads),
        "multiply bf16": partial(multiply_add, threads=threads, bf16=True),
    }
    calls |= {name: partial(compute, threads) for name, compute in (work.implementations | work.ceilings).items()}
    took = {}
    done = {}
    for name in rng.permutation(list(calls)).tolist():
        begin = time.perf_counter()
        done[name] = calls[name]()
        took[name] = time.perf_counter() - begin
    read = pool.nbytes / took.pop("read")
    again = pool.nbytes / took.pop("read again")
    multiply, multiply_bf16 = (done[name] / took.pop(name) for name in ("multiply", "multiply bf16"))
    return Round(work, threads, read, max(read, again), multiply, multiply_bf16, took)


def by_state(rounds: Sequence[Round], fastest: float) -> dict[str, list[Round]]:
    """Group rounds by the state of the memory: slow or fast, by their reading relative to the fastest reading."""
    states: dict[str, list[Round]] = {"slow": [], "fast": []}
    for one in rounds:
        states["slow" if one.best < SLOW_BELOW * fastest else "fast"].append(one)
    return {state: own for state, own in states.items() if own}


def fastest_reading(rounds: Iterable[Round]) -> dict[int, float]:
    """The fastest reading by number of threads [B/s]."""
    found: dict[int, float] = {}
    for one in rounds:
        found[one.threads] = max(one.best, found.get(one.threads, 0.0))
    return found
