"""Overlap of attention with a matrix product of torch in another thread: share of the shorter one that is hidden."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from workbench.bench import record
from workbench.bench.cpu.work import PLAIN, Implementation, Work
from workbench.hardware import usable_cores

_SECONDS = 0.2
_ROUNDS = 9
"""Seconds that each of the two jobs lasts, and number of repetitions."""

Job = Callable[[], None]


@dataclass(frozen=True)
class Beside:
    """Seconds of two jobs run alone, and of both started together."""

    one: float
    other: float
    both: float

    @property
    def hidden(self) -> float:
        """Share of the shorter job that cost no time: 1 if both ran as if alone, 0 if as one after the other."""
        return (self.one + self.other - self.both) / min(self.one, self.other)


def say_overlap(work: Work, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Report and return the overlap of our kernel and torch, each on half of the cores."""
    half = usable_cores() // 2
    if not half:
        say("left out: attention beside a matrix product, because there is one core")
        return {}
    jobs = [_lasting(partial(job, half)) for job in (work.implementations["ours"], _product())]
    rounds = [beside(*jobs) for _ in range(_ROUNDS)]
    found = {
        "both / sum of the two": record.ratio([one.both / (one.one + one.other) for one in rounds]),
        "both / the longer one": record.ratio([one.both / max(one.one, one.other) for one in rounds]),
        "hidden of the shorter one": record.ratio([one.hidden for one in rounds]),
    }
    told = ", ".join(f"{name} {value['median']:.2f}" for name, value in found.items())
    kind = str(PLAIN).removeprefix("torch.")
    say(f"{work.name} beside a {kind} product of torch, {half} threads each: {told}")
    return {f"attention beside a matrix product: {name}": value for name, value in found.items()}


def beside(one: Job, other: Job) -> Beside:
    """Time two jobs one by one and together."""
    first = _seconds(one)
    second = _seconds(other)
    begin = time.perf_counter()
    thread = threading.Thread(target=other)
    thread.start()
    one()
    thread.join()
    return Beside(first, second, time.perf_counter() - begin)


def _seconds(job: Job) -> float:
    """Seconds of a job in a new thread, as when both run: torch's number of threads belongs to the calling thread."""
    begin = time.perf_counter()
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    return time.perf_counter() - begin


def _product() -> Implementation:
    left = torch.randn(256, 4096).to(PLAIN)
    right = torch.randn(4096, 4096).to(PLAIN)

    def multiply(threads: int) -> None:
        torch.set_num_threads(threads)
        torch.mm(left, right)

    return multiply


def _lasting(job: Job) -> Job:
    """A job that repeats the given one until it lasts about `_SECONDS`."""
    _seconds(job)
    times = max(1, round(_SECONDS / _seconds(job)))

    def repeated() -> None:
        for _ in range(times):
            job()

    return repeated
