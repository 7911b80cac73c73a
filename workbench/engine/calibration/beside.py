"""Slowdown of an operation while weights stream beside it, and core time of the thread that copies them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch

from workbench.core.errors import EngineError
from workbench.core.quiet import kept, listening
from workbench.engine.calibration.op_times import typical
from workbench.engine.devices.driver import Driver
from workbench.engine.lanes.affinity import Affinity
from workbench.engine.lanes.executor import Executor
from workbench.engine.lanes.lane import Job
from workbench.engine.lanes.transfer import Copy, Transfer, copy_over
from workbench.engine.loading.stored import host_memory
from workbench.pipeline.layer_graph import EMBED, WEIGHTS
from workbench.schedules.plan import Task

BESIDE = 2e9
"""Rate of the stream [B/s]."""
STRETCH = 3
"""So many times as long as the calls beside it take alone, a stream lasts."""
ROUNDS = 6
"""Undisturbed rounds; three times as many are made at most."""
_STREAMED = 1 << 28  # bytes that the stream copies again and again
_LONG = 0.05  # seconds that the calls of a round shall take


class Beside(NamedTuple):
    """Seconds of an operation alone and beside a stream; core-seconds per byte of the stream."""

    alone: float
    beside: float
    mover: float


class _Round(NamedTuple):
    """The same of single calls, and the longest of those alone, by the clock."""

    alone: list[float]
    beside: list[float]
    mover: float
    longest: float


def beside(
    name: str,
    action: Callable[[], object],
    affinities: Mapping[str, Affinity],
    seconds: Callable[[Job], float],
    *,
    driver: Driver,
    rate: float = BESIDE,
) -> Beside:
    """Time an action of the gpu lane alone and beside a stream, interleaved.

    Parameters
    ----------
    name : str
        What to call the action in an error.
    action : callable
    affinities : mapping of str to Affinity
        Of the four lanes.
    seconds : callable
        What of a job's time counts.
    driver : Driver
        The device to which the stream goes.
    rate : float
        The stream's rate [B/s]; to a card it goes as fast as it can.

    Raises
    ------
    EngineError
        If no call ended before the stream did.
    """
    source = driver.pin(host_memory((_STREAMED,), torch.uint8).fill_(1))
    target = driver.empty((_STREAMED,), torch.uint8)
    if driver.on_host:
        target.zero_()  # maps its pages
    stream = copy_over(driver, target, source)
    quiet = list[_Round]()
    disturbed = list[_Round]()
    longest = _LONG
    executor = Executor(rate, rate, throttled=driver.on_host, packet_seconds=5e-3, driver=driver)
    executor.pin(affinities)
    try:
        while len(quiet) < ROUNDS and len(quiet) + len(disturbed) < 3 * ROUNDS:
            with listening() as noise:
                seen = _round(executor, action, max(2, int(_LONG / longest)), stream, rate, seconds)
            (quiet if noise.quiet else disturbed).append(seen)
            longest = seen.longest
    finally:
        executor.close()
    counted = kept(quiet, disturbed)
    alone = [s for seen in counted for s in seen.alone]
    together = [s for seen in counted for s in seen.beside]
    if not together:
        raise EngineError(f"no call of {name} ended beside a stream; other programs hold the cores, close them.")
    return Beside(typical(alone), typical(together), median(seen.mover for seen in counted))


def _round(
    executor: Executor,
    action: Callable[[], object],
    calls: int,
    stream: Copy,
    rate: float,
    seconds: Callable[[Job], float],
) -> _Round:
    tasks = [Task(EMBED, 0, 0, after=(i - 1,) if i else ()) for i in range(calls)]
    alone = executor.run(tasks, [action] * calls)
    longest = max(job.end - job.start for job in alone)
    copies = [stream] * math.ceil(STRETCH * calls * longest * rate / stream.nbytes)
    tasks = [Task(EMBED, 0, 0, after=(i - 1,) if i > 1 else ()) for i in range(1, calls + 1)]
    tasks = [Task(WEIGHTS, 0, None, bulk=True), *tasks]
    moved, *jobs = executor.run(tasks, [lambda: Transfer(copies), *[action] * calls])
    during = [seconds(job) for job in jobs if job.end <= moved.end]
    return _Round([seconds(job) for job in alone], during, moved.cpu / moved.bytes, longest)
