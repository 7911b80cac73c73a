"""Benchmark of the simulator: a large job in both details, many scenarios, a slider, and a sweep on two processes."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from workbench.analysis import sweeps
from workbench.analysis.sweeps.pools import begin as prepare_process
from workbench.bench import record
from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels import bound
from workbench.reproductions.moe_lens import VSL
from workbench.scenario import Memory, Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import CGOPipe, Overlap, Schedule, Sequential, VSLPipe
from workbench.simulate import Detail, simulate, simulate_all
from workbench.simulate.loading import loader
from workbench.workload import Workload, workloads

REQUESTS = 20_000
MOST = {Detail.ITERATION: 0.05, Detail.TASK: 0.5}
"""Target: most seconds to simulate the job, by detail."""
PER_MINUTE = 1000
"""Target: scenarios per minute on one core."""
PER_POSITION = 0.1
"""Target: most seconds of a slider's position, with the bound and `_COMPARED`."""
FASTER = 1.8
"""Target: least speed of a sweep on two processes over that on one, each with their start."""
SWEPT: dict[str, Any] = {
    "memory.kv_capacity": tuple(1e9 * (20 + step) for step in range(50)),
    "machine.link": tuple(f"{rate}GB" for rate in range(5, 25, 2)),
    "schedule": (VSLPipe(), Sequential(prefetch=True)),
}
"""Fields and values of that sweep, a thousand scenarios."""
PAIRS = 3
"""Times that this sweep is made on one and on two processes, by turns."""
_COMPARED = (Sequential(prefetch=True), CGOPipe(), VSLPipe(), Overlap())
_CAPACITIES = ("20GB", "30GB", "40GB", "50GB", "60GB", "70GB")
_OUTPUTS = (32, 64, 128, 256)


def job(output: int = 128, kv_capacity: str = "70GB") -> Scenario:
    """Mixtral-8x7B on the A40, 20,000 prompts of 98 tokens."""
    return Scenario(
        VSL,
        model=models["mixtral-8x7b"],
        machine=machines["a40"],
        memory=Memory(kv_capacity=kv_capacity, kv_block=16),
        workload=Workload.lengths(98, output, REQUESTS),
        scheduler=ResourceAware(),
    )


def drawn_job() -> Scenario:
    """The job with drawn lengths: as many requests of retrieval-augmented generation."""
    return job().on(workload=workloads["rag"].sample(requests=REQUESTS, seed=0))


def sweep() -> Iterator[tuple[Scenario, Schedule]]:
    """The job over KV capacities, output lengths and schedules."""
    for schedule in (VSLPipe(), Sequential(prefetch=True)):
        for capacity in _CAPACITIES:
            for output in _OUTPUTS:
                yield job(output, capacity), schedule


def bench_simulator(
    *, repeats: int, json: Path | None, say: Callable[[str], None] = record.say
) -> dict[str, dict[str, float]]:
    """Print the seconds of the job in both details, the scenarios that a core simulates in a minute, and a slider's.

    The spans of every task's timeline are made when they are read; the time for that is told beside.

    These figures are CPU time of this process, so that other programs do not count. A first simulation, which also
    imports modules and reads catalogues, is not timed, nor is compiling. Last comes the gain of a sweep over requests
    of drawn lengths from a second process, by the clock and with the start of both.

    Returns
    -------
    dict
        Each figure over its target: at most 1 for seconds and at least 1 for scenarios if the target is met.
    """
    loader().load()
    simulate(job(), VSLPipe())
    ratios = dict[str, dict[str, float]]()
    for detail, most in MOST.items():
        taken = [_seconds(job(), VSLPipe(), detail) for _ in range(repeats)]
        what = f"{REQUESTS} requests, detail {detail.value}"
        say(f"{what}: {median(taken):.3f} s ({min(taken):.3f} to {max(taken):.3f}), {most:g} s asked for")
        if detail is Detail.TASK:
            say(f"their timeline, once it is read: {_reading():.3f} s more")
        ratios[f"{what}, seconds over {most:g}"] = record.ratio([seconds / most for seconds in taken])
    taken = [_seconds(*one) for one in sweep()]
    rate = 60 / (sum(taken) / len(taken))
    say(
        f"{len(taken)} scenarios of {REQUESTS} requests, KV {_CAPACITIES[0]} to {_CAPACITIES[-1]}, outputs of "
        f"{_OUTPUTS[0]} to {_OUTPUTS[-1]} tokens: {rate:.0f} a minute and core ({min(taken):.2f} to {max(taken):.2f} s "
        f"each), {PER_MINUTE} asked for"
    )
    ratios[f"scenarios a minute over {PER_MINUTE}"] = record.ratio([rate / PER_MINUTE])
    positions = [_position(capacity) for capacity in _CAPACITIES]
    say(
        f"a slider of the KV capacity, the bound and {len(_COMPARED)} schedules: {median(positions):.2f} s a position "
        f"({min(positions):.2f} to {max(positions):.2f}), {PER_POSITION:g} s asked for"
    )
    ratios[f"slider, seconds over {PER_POSITION:g}"] = record.ratio([each / PER_POSITION for each in positions])
    here = _swept(0)
    pairs = [_pair(turn) for turn in range(PAIRS)]
    one, two = (median(seconds) for seconds in zip(*pairs, strict=True))
    gains = record.ratio([first / second / FASTER for first, second in pairs])
    say(
        f"a sweep over {_count(SWEPT)} scenarios of {REQUESTS} drawn requests: {here:.1f} s in this process, "
        f"{one:.1f} s on one that is started and {two:.1f} s on two, {FASTER * gains['median']:.2f} times as fast "
        f"({FASTER * gains['min']:.2f} to {FASTER * gains['max']:.2f}), {FASTER:g} asked for"
    )
    ratios[f"two processes, speed over {FASTER:g}"] = gains
    if json is not None:
        record.write(json, machines["a40"], ratios, [{"scenario seconds": taken}])
    return ratios


def _position(capacity: str) -> float:
    """Seconds of one position of a slider."""
    begin = time.process_time()
    scenario = job(kv_capacity=capacity)
    bound(scenario, _COMPARED[0])
    simulate_all([scenario], _COMPARED)
    return time.process_time() - begin


def _pair(turn: int) -> tuple[float, float]:
    """Seconds of the sweep on one process and on two, in the other order at every second turn."""
    order = (1, 2) if turn % 2 == 0 else (2, 1)
    taken = {processes: _swept(processes) for processes in order}
    return taken[1], taken[2]


def _swept(processes: int) -> float:
    """Seconds on the clock for a sweep on so many new processes, their start included; for 0, in this process."""
    begin = time.perf_counter()
    with _executor(processes) as executor, TemporaryDirectory() as folder:
        sweeps.sweep(drawn_job(), over=SWEPT, executor=executor, store=Path(folder) / "readings.sqlite")
    return time.perf_counter() - begin


def _executor(processes: int) -> Executor:
    if processes == 0:
        return ThreadPoolExecutor(1)
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=prepare_process)


def _count(over: dict[str, Any]) -> int:
    return math.prod(map(len, over.values()))


def _reading() -> float:
    """Seconds to make the spans of all tasks of the job."""
    timeline = simulate(job(), VSLPipe(), detail=Detail.TASK).timeline
    begin = time.process_time()
    len(timeline)
    return time.process_time() - begin


def _seconds(scenario: Scenario, schedule: Schedule, detail: Detail = Detail.ITERATION) -> float:
    begin = time.process_time()
    simulate(scenario, schedule, detail=detail)
    return time.process_time() - begin
