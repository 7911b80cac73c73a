"""The virtual clock: lays out every task, or takes an iteration's period from four layers.

No iteration is shorter than the host's memory takes for all that the plan's tasks read and write there.
"""

from __future__ import annotations

import enum

from workbench.plan import LANES, Carry, Plan, busy_seconds
from workbench.prepared import Prepared
from workbench.result import Result, Source
from workbench.scenario import Scenario
from workbench.scheduler.block_manager import BlockManager
from workbench.schedules.base import Schedule, Step
from workbench.serving import prepare, serve
from workbench.timeline import Span, Timeline

_FEW, _TYPICAL = 4, 2
"""Layers that are laid out, and which of them stands for all others: the first two and the last differ from them."""


class Detail(enum.Enum):
    """How finely time is laid out."""

    TASK = "task"
    ITERATION = "iteration"


def simulate(scenario: Scenario, schedule: Schedule, *, detail: Detail = Detail.ITERATION) -> Result:
    """Serve the workload in virtual time.

    Parameters
    ----------
    scenario, schedule
        What, for whom, on what, and when.
    detail : Detail
        TASK lays out every task of every layer and fills the timeline with them. ITERATION takes each iteration's
        time from four lowered layers and the period between the third and the second, within 1 % of TASK.

    Returns
    -------
    Result
        With source SIMULATED.

    Raises
    ------
    WorkbenchError
        If scenario and schedule do not go together; before any work.
    """
    prepared = prepare(scenario, schedule)
    clock = TaskClock(prepared) if detail is Detail.TASK else IterationClock(prepared)
    return serve(prepared, clock, Source.SIMULATED)


class TaskClock:
    """Lays out every task of every plan."""

    def __init__(self, prepared: Prepared) -> None:
        self.now, self.timeline = 0.0, Timeline(labels=prepared.lowering.graph.labels)
        self._carried = 0.0  # seconds that are left of the transfer that the last iteration let run on
        self._cost, self._packet = prepared.cost, prepared.lowering.schedule.packet_seconds

    def begin(self, blocks: BlockManager) -> None:
        """See `Clock.begin`."""

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """See `Clock.execute`."""
        rows = [self._cost.rows(part) for part in plan.parts]
        laid = self._cost.lay_out(plan.tasks, rows, self._packet, plan.tasks, self._carried)
        seconds = max(sum(laid.dram), laid.seconds) + self._cost.between(sum(map(len, plan.parts)))
        for task, start, end in zip(plan.tasks, laid.starts, laid.ends, strict=True):
            if end > start:
                until = self.now + min(end, seconds)
                self.timeline.spans.append(Span(task.node.lane, task.name, self.now + start, until, number))
        self.now += seconds
        self._carried = max(0.0, laid.runs_on - seconds)
        busy = busy_seconds(plan.tasks, laid.busy)
        return {**busy, "h2d": busy["h2d"] - self._carried}


class IterationClock:
    """Lays out four layers and repeats the period of the third for the others."""

    def __init__(self, prepared: Prepared) -> None:
        self.now, self.timeline, self._carried = 0.0, Timeline(), 0.0
        self._lowering, self._cost = prepared.lowering, prepared.cost
        self._packet = prepared.lowering.schedule.packet_seconds

    def begin(self, blocks: BlockManager) -> None:
        """See `Clock.begin`."""

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """See `Clock.execute`."""
        few = min(plan.layers, _FEW)
        tasks = self._lowering.tasks(few, step)
        rows = [self._cost.rows(part) for part in plan.parts]
        laid = self._cost.lay_out(tasks, rows, self._packet, plan.tasks, self._carried)
        repeats, least, running_on = plan.layers - few, 0.0, 0.0
        last_end, busy = [0.0] * few, dict.fromkeys(LANES, 0.0)
        for task, end, length, traffic in zip(tasks, laid.ends, laid.busy, laid.dram, strict=True):
            times = repeats + 1 if task.layer == _TYPICAL else 1
            busy[task.node.lane] += length * times
            least += traffic * times
            running_on += length if task.carry is Carry.OUT else 0.0
            if task.part is not None and task.layer >= 0:
                last_end[task.layer] = max(last_end[task.layer], end)
        others = repeats * (last_end[_TYPICAL] - last_end[_TYPICAL - 1]) if repeats else 0.0
        awaited = {**busy, "h2d": busy["h2d"] - running_on}
        seconds = max(least, laid.seconds + others, *awaited.values()) + self._cost.between(sum(map(len, plan.parts)))
        self.timeline.spans.append(Span("step", plan_label(plan), self.now, self.now + seconds, number))
        self.now += seconds
        end = max(laid.runs_on + others, busy["h2d"]) if running_on else 0.0
        self._carried = max(0.0, end - seconds)
        return {**busy, "h2d": busy["h2d"] - self._carried}


def plan_label(plan: Plan) -> str:
    """``188 prefill + 3010 decode``."""
    prefill = sum(int(part.rows.prefill) for part in plan.parts)
    decode = sum(int(part.rows.decode) for part in plan.parts)
    return f"{prefill} prefill + {decode} decode"
