"""One iteration of many alike: what a schedule makes of a batch once the serving loop has settled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from workbench.errors import CapacityError, ScenarioError
from workbench.pipeline import Pipeline
from workbench.prepared import facts
from workbench.result import Result, Source
from workbench.scenario import Scenario
from workbench.scheduler.batch import Batch, Ids
from workbench.schedules.base import Schedule, Step
from workbench.serving import prepare
from workbench.simulate.clock import Detail, IterationClock, TaskClock
from workbench.timeline import Timeline
from workbench.workload import Workload


def steady(scenario: Scenario, schedule: Schedule, *, detail: Detail = Detail.TASK) -> Result:
    """Play one iteration that holds every request of the workload, each at another stage of its life.

    Request i of n, which will have g_i output tokens, has floor((i + 1/2) g_i / n) of them: with none it prefills, else
    it decodes. That is the batch of an endless stream of such requests, with n in flight.

    Parameters
    ----------
    scenario : Scenario
        Its scheduler is not asked.
    schedule : Schedule
    detail : Detail
        TASK lays out every task and gives a timeline of them; ITERATION is faster, and within 1 %.

    Returns
    -------
    Result
        With source SIMULATED: seconds, tokens, lanes and timeline of this iteration. It follows one that is alike, so
        that weights are where the schedule leaves them.

    Raises
    ------
    WorkbenchError
        If scenario and schedule do not go together, or the KV cache cannot hold all requests at these stages.
    """
    prepared = prepare(scenario, schedule)
    batch = _at_all_stages(scenario.workload, scenario.model.num_hidden_layers)
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
    """The scenario with so many requests, its own ones in turn, and a KV cache that just holds all of them.

    Raises
    ------
    ScenarioError
        If there is no request.
    """
    if requests < 1:
        raise ScenarioError(f"{requests} requests cannot be in flight; give at least one.")
    workload, memory = scenario.workload, scenario.memory
    prompt, output = (np.resize(lengths, requests) for lengths in (workload.prompt_len, workload.output_len))
    blocks = int(_blocks(prompt + output - 1, memory.kv_block).sum())
    size = float(blocks * memory.kv_block * scenario.model.kv_bytes_per_token(scenario.precision.kv))
    return scenario.on(
        workload=Workload(workload.name, prompt, output, synthetic=workload.synthetic, source=workload.source),
        memory=replace(memory, kv_capacity=size),
    )


def steady_rates(
    scenario: Scenario, systems: Mapping[Schedule, Pipeline], requests: Iterable[int]
) -> dict[str, dict[int, float]]:
    """Output tokens per second of schedules, each with its pipeline, over the number of requests in flight.

    Where so many do not fit a memory there is no rate.
    """
    counts, rates = list(requests), dict[str, dict[int, float]]()
    for schedule, pipeline in systems.items():
        curve = rates.setdefault(schedule.name, {})
        for count in counts:
            try:
                here = in_flight(scenario.on(pipeline=pipeline), count)
                curve[count] = steady(here, schedule, detail=Detail.ITERATION).gen_tok_s
            except CapacityError:
                continue
    return rates


def _at_all_stages(workload: Workload, layers: int) -> Batch:
    made = (2 * np.arange(len(workload)) + 1) * workload.output_len // (2 * len(workload))
    starting, running = np.flatnonzero(made == 0), np.flatnonzero(made)
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
