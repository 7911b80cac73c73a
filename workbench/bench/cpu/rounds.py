"""One round of `bench cpu`: everything that computes a work, and what the cores can read and multiply meanwhile."""

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
"""Share of the fastest reading seen, below which a round belongs to the memory's slow state."""


@dataclass(frozen=True)
class Round:
    """What one round of a work saw: reading [B/s] and multiply-adds [FLOP/s], and seconds by contender and ceiling.

    `best` is the better one of two readings, by which the state of the memory is told: one that was held up would pass
    for the slow state. The roof is of one, as our kernel is timed once.
    """

    work: Work
    threads: int
    read: float
    best: float
    multiply: float
    seconds: dict[str, float]

    @property
    def roof(self) -> float:
        """Seconds of reading all bytes in order, or of a share of the multiply-add peak, whichever is more."""
        return max(self.work.bytes / self.read, self.work.flops / (self.work.peak * self.multiply))

    def times(self, name: str) -> float:
        """How many times as long as ours another took."""
        return self.seconds[name] / self.seconds["ours"]


def play(work: Work, pool: npt.NDArray[Any], threads: int, rng: np.random.Generator) -> Round:
    """Everything once, and reading twice, in random order, so that all of it meets the same state of the memory."""
    calls: dict[str, Callable[[], Any]] = {
        "read": partial(read_memory, pool, threads=threads),
        "read again": partial(read_memory, pool, threads=threads),
        "multiply": partial(multiply_add, threads=threads),
    }
    calls |= {name: partial(compute, threads) for name, compute in (work.contenders | work.ceilings).items()}
    took, done = {}, {}
    for name in rng.permutation(list(calls)).tolist():
        begin = time.perf_counter()
        done[name] = calls[name]()
        took[name] = time.perf_counter() - begin
    read, again = (pool.nbytes / took.pop(name) for name in ("read", "read again"))
    best = max(read, again)
    return Round(work, threads, read, best, done["multiply"] / took.pop("multiply"), took)


def by_state(rounds: Sequence[Round], fastest: float) -> dict[str, list[Round]]:
    """The rounds of each state of the memory, which is slow or fast by how it reads beside the fastest reading."""
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
