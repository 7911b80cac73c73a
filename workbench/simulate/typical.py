"""The typical iteration of a scenario: its tasks on their lanes."""

from __future__ import annotations

import math

from workbench.core.timeline import Span, Timeline
from workbench.scenario import Scenario
from workbench.schedules.base import Schedule, Step
from workbench.schedules.plan import lane_names, places_before
from workbench.serving import prepare
from workbench.serving.prepared import Typical


def typical_iteration(scenario: Scenario, schedule: Schedule) -> Timeline:
    """Lay out every task of one iteration in the middle of a run.

    In it the cache is full, or all requests run if it holds them; the requests are of all ages alike, and new ones
    replace those that end. It shows the order of the tasks without a simulation of the whole run.

    Raises
    ------
    WorkbenchError
        If scenario and schedule do not go together, or do not fit the memories.

    Examples
    --------
    >>> plot_timeline(typical_iteration(scenario, VSLPipe()))  # doctest: +SKIP
    """
    prepared = prepare(scenario, schedule)
    plans = prepared.plans
    tasks = prepared.lowering.tasks(Step.MIDDLE)
    rows = [prepared.cost.by_kind(Typical.of(scenario, schedule).rows)] * schedule.parts
    cores = scenario.machine.cores
    pace = None if cores is None else plans.pace(tasks, rows, cores)
    laid = plans.lay_out(tasks, rows, schedule.packet_seconds, pace, 0.0)
    seconds = max(laid.dram, laid.seconds)
    starts, ends = list(laid.starts), list(laid.ends)
    names = lane_names(tasks)
    before = places_before(tasks, starts, ends)
    spans = [
        Span(task.node.lane, task.name, start, min(end, seconds), 0, math.nan, names[after])
        for task, start, end, after in zip(tasks, starts, ends, before, strict=True)
        if end > start
    ]
    return Timeline(spans, prepared.lowering.stack.labels)
