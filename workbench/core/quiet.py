"""Noise of other programs: tells a repetition that it disturbed from one that counts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Repetition = TypeVar("Repetition")

# Of 30 runs on two virtual cores, those of which the host gave less than 2 % of their time to other guests lay within
# 3.5 % of one another; where it was 10 %, a run took a quarter longer. How fast memory was copied before and after told
# nothing: what it would have kept spread as far as what it would have dropped.
OTHERS = 0.02
"""Share of the cores that other programs, or other guests of the same host, may take."""
LEAST = 3
"""Repetitions that are made at least, and undisturbed ones from which on the disturbed are dropped."""
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


@contextmanager
def listening() -> Iterator[Noise]:
    """Measure the noise while the body runs."""
    noise = Noise()
    others = _busy()
    mine = time.process_time()
    begin = time.perf_counter()
    yield noise
    passed = (time.perf_counter() - begin) * (os.cpu_count() or 1)
    spent = time.process_time() - mine
    noise.others = min(max(0.0, _busy() - others - spent - _TICKS) / passed, 1.0)


def kept(quiet: list[Repetition], disturbed: list[Repetition]) -> list[Repetition]:
    """The quiet ones if they are enough, else all: on a busy computer a benchmark has to end, too."""
    return quiet if len(quiet) >= LEAST else quiet + disturbed


def _busy() -> float:
    """Core-seconds that any program has used since the computer started, or that its host gave to other guests."""
    import psutil  # measurements alone need it: the rest of the workbench and the GPU suite do without

    times = psutil.cpu_times()
    rest = sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq", "steal"))
    return float(times.user + times.system + rest)
