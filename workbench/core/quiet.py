"""Noise of other programs: the measure by which a repetition that it disturbed is dropped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Repetition = TypeVar("Repetition")

# 30 runs on two virtual cores: those from which the host took less than 2 % of the time for other guests lay within
# 3.5 % of one another; where it took 10 %, a run was a quarter longer. The rate of a memory copy before and after a run
# is no such measure: the runs that it would have kept spread as far as those that it would have dropped.
OTHERS = 0.02
"""Share of the cores that other programs, or other guests of the same host, may take."""
LEAST = 3
"""Least number of repetitions; also the number of undisturbed ones from which on the disturbed ones are dropped."""
_TICKS = 0.02  # seconds by which two clocks that tick every 10 ms may differ


@dataclass
class Noise:
    """Disturbance of a repetition: the share of the cores that others took."""

    others: float = 0.0

    @property
    def quiet(self) -> bool:
        """True if the repetition counts."""
        return self.others <= OTHERS

    def __str__(self) -> str:
        return f"others took {self.others:.0%} of the cores"


class NoiseMeter:
    """Measures the noise since it was made; see `listening`."""

    def __init__(self, also: Callable[[], float] = lambda: 0.0) -> None:
        self._also = also
        self._busy = _busy()
        self._mine = time.process_time() + also()
        self._begin = time.perf_counter()

    def hear(self) -> Noise:
        """The noise until now."""
        passed = (time.perf_counter() - self._begin) * (os.cpu_count() or 1)
        spent = time.process_time() + self._also() - self._mine
        return Noise(min(max(0.0, _busy() - self._busy - spent - _TICKS) / passed, 1.0))


@contextmanager
def listening(also: Callable[[], float] = lambda: 0.0) -> Iterator[Noise]:
    """Measure the noise while the body runs.

    Parameters
    ----------
    also : callable -> float
        Core-seconds that another process, which the body waits for, has used so far.
    """
    noise = Noise()
    meter = NoiseMeter(also)
    yield noise
    noise.others = meter.hear().others


def kept(quiet: list[Repetition], disturbed: list[Repetition]) -> list[Repetition]:
    """The quiet repetitions if they are enough, else all: a benchmark must end on a busy computer too."""
    return quiet if len(quiet) >= LEAST else quiet + disturbed


def _busy() -> float:
    """Core-seconds since the computer started that programs have used, or that its host gave to other guests."""
    import psutil  # only measurements need it: the rest of the workbench and the GPU suite do without it

    times = psutil.cpu_times()
    rest = sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq", "steal"))
    return float(times.user + times.system + rest)
