"""Tells a repetition that other programs disturbed from one that counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import psutil

Repetition = TypeVar("Repetition")

OTHERS = 0.05
"""Share of the cores that other programs may take."""
MOVED = 0.05
"""How far the probe may move between before and after, relative."""
LEAST = 3
"""Repetitions that are made at least, and undisturbed ones from which on the disturbed are dropped."""


@dataclass
class Noise:
    """What disturbed a repetition: the cores' share that others took, and how far the probe moved from `probe` s."""

    others: float = 0.0
    moved: float = 0.0
    probe: float = 0.0

    @property
    def quiet(self) -> bool:
        """True if the repetition counts."""
        return self.others <= OTHERS and abs(self.moved) <= MOVED

    def __str__(self) -> str:
        return f"others took {self.others:.0%} of the cores, the probe moved by {self.moved:+.0%}"


class Probe:
    """A fixed piece of work: copying 64 MB in DRAM, which has a slow and a fast state."""

    def __init__(self) -> None:
        self._source, self._target = np.ones(1 << 26, np.int8), np.ones(1 << 26, np.int8)

    def seconds(self) -> float:
        """The fastest of 60 copies, half a second in all [s]: of a dozen, it moves by 5 % half as often again."""
        return min(self._copy() for _ in range(60))

    def _copy(self) -> float:
        begin = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - begin


@contextmanager
def listening(probe: Probe | None = None) -> Iterator[Noise]:
    """Measure the noise while the body runs; without a probe only what others took, as where the body has ceilings."""
    noise, own = Noise(), psutil.Process()
    before = probe.seconds() if probe else 0.0
    others, mine, begin = _busy(), sum(own.cpu_times()[:2]), time.perf_counter()
    yield noise
    passed = (time.perf_counter() - begin) * (psutil.cpu_count() or 1)
    spent = sum(own.cpu_times()[:2]) - mine
    noise.others = min(max(0.0, _busy() - others - spent) / passed, 1.0)  # both clocks tick coarsely
    noise.probe, noise.moved = before, probe.seconds() / before - 1 if probe else 0.0


def kept(quiet: list[Repetition], disturbed: list[Repetition]) -> list[Repetition]:
    """The quiet ones if they are enough, else all: on a busy computer a benchmark has to end, too."""
    return quiet if len(quiet) >= LEAST else quiet + disturbed


def _busy() -> float:
    """Core-seconds that any program has used since the computer started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0) + getattr(times, "softirq", 0))
