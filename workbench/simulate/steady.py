"""Simulation of one settled iteration: a batch like those of an endless stream of requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from workbench.core.errors import CapacityError, ScenarioError
from workbench.core.result import Result, Source
from workbench.core.timeline import Timeline
from workbench.pipeline import Pipeline
from workbench.scenario import Scenario
from workbench.scheduler.batch import Batch, Ids
from workbench.schedules.base import Schedule, Step
from workbench.serving import prepare
from workbench.serving.prepared import facts
from workbench.simulate.clock import Detail, IterationClock, TaskClock
from workbench.workload import Workload


def steady(scenario: Scenario, schedule: Schedule, *, detail: Detail = Detail.TASK, phase: float = 0.5) -> Result:
    """Simulate one iteration that holds every request of the workload, each at another point of its life.

    Request i of n, which will have g_i output tokens, has floor((i + phase) g_i / n) of them: with none it prefills,
    else it decodes. That is the batch of an endless stream of such requests, with n in flight.

    Parameters
    ----------
    scenario : Scenario
        The scenario; its scheduler has no effect.
    schedule : Schedule
    detail : Detail
        TASK lays out every task and gives a timeline of them; ITERATION is faster, and within 1 % of it.
    phase : float
        Age of the first request between 0, where it prefills, and 1, where the second request was at phase 0.

    Returns
    -------
    Result
        A result with source SIMULATED: seconds, tokens, lanes and timeline of this iteration. The iteration follows an
        equal one, so that weights are where the schedule leaves them.

    Raises
    ------
    WorkbenchError
        If scenario and schedule do not go together, or the KV cache cannot hold all requests.
    """
    prepared = prepare(scenario, schedule)
    workload = scenario.workload.as_served
    batch = _at_all_ages(workload, phase, scenario.model.num_hidden_layers)
    _check_cache(scenario, batch)
    plan = prepared.lowering.plan(batch, Step.MIDDLE)
    clock = TaskClock(prepared) if detail is Detail.TASK else IterationClock(prepared)
    clock.execute(plan, 0, Step.MIDDLE)
    begin = clock.now
    busy = clock.execute(plan, 1, Step.MIDDLE)
    of_this = clock.timeline.window(1, 2)
    moved = [span._replace(start=span.start - begin, end=span.end - begin, iteration=0) for span in of_this]
    return Result(
        source=Source.SIMULATED,
        schedule=prepared.lowering.schedule.name,
        model=scenario.model.name,
        machine=scenario.machine.name,
        seconds=clock.now - begin,
        generated=len(batch),
        processed=int(batch.rows.tokens),
        iterations=1,
        busy=busy,
        timeline=Timeline(moved, of_this.labels),
        facts={**facts(scenario, prepared), "iteration": f"one, settled: {batch.describe()}"},
    )


def in_flight(scenario: Scenario, requests: int) -> Scenario:
    """The scenario with that many requests, its own ones repeated in turn, and a KV cache that just holds all of them.

    Raises
    ------
    ScenarioError
        If there is no request.
    """
    if requests < 1:
        raise ScenarioError(f"{requests} requests cannot be in flight; give at least one.")
    workload = scenario.workload.as_served
    memory = scenario.memory
    prompt = np.resize(workload.prompt_len, requests)
    output = np.resize(workload.output_len, requests)
    blocks = int(_blocks(prompt + output - 1, memory.kv_block).sum())
    size = float(blocks * memory.kv_block * scenario.model.kv_bytes_per_token(scenario.precision.kv))
    return scenario.on(
        workload=Workload(workload.name, prompt, output, synthetic=workload.synthetic, source=workload.source),
        memory=replace(memory, kv_capacity=size),
    )


def steady_rates(
    scenario: Scenario, systems: Mapping[Schedule, Pipeline], requests: Iterable[int]
) -> dict[str, dict[int, float]]:
    """Output tokens per second of schedules, each with its pipeline, by the number of requests in flight.

    Rates are means over the life of the requests. There is no rate for a number of requests that does not fit a memory.
    """
    counts = list(requests)
    rates = dict[str, dict[int, float]]()
    for schedule, pipeline in systems.items():
        curve = rates.setdefault(schedule.name, {})
        for count in counts:
            try:
                here = in_flight(scenario.on(pipeline=pipeline), count)
                curve[count] = _mean_rate(here, schedule)
            except CapacityError:
                continue
    return rates


def _mean_rate(scenario: Scenario, schedule: Schedule) -> float:
    """Output tokens per second, mean over all phases; with fewer requests than output tokens, some have no prefill."""
    requests = len(scenario.workload)
    prefilling = min(1.0, requests / float(scenario.workload.generated_len.mean()))
    seconds = sum(
        share * steady(scenario, schedule, detail=Detail.ITERATION, phase=phase).seconds
        for share, phase in ((prefilling, 0.0), (1 - prefilling, (1 + prefilling) / 2))
        if share
    )
    return requests / seconds


def _at_all_ages(workload: Workload, phase: float, layers: int) -> Batch:
    passed = (np.arange(len(workload)) + phase) / len(workload)
    made = np.floor(passed * workload.output_len + 1e-9).astype(np.int64)  # whole numbers stay whole
    starting = np.flatnonzero(made == 0)
    running = np.flatnonzero(made)
    context = (workload.prompt_len + made - 1)[running]
    return Batch(starting, workload.prompt_len[starting], running, context, layers)


def _check_cache(scenario: Scenario, batch: Batch) -> None:
    held = np.concatenate((batch.prefill_len, batch.context + 1))
    blocks = int(_blocks(held, scenario.memory.kv_block).sum())
    if blocks > scenario.kv_blocks:
        raise CapacityError(
            f"{len(batch)} requests in flight need {blocks} blocks of KV, the cache has {scenario.kv_blocks}. Give "
            "more kv_capacity or fewer requests."
        )


def _blocks(tokens: Ids, block: int) -> Ids:
    return -(-tokens // block)
