"""The virtual clock: lays out every task, or takes an iteration's period from four layers.

No iteration is shorter than the host's memory takes for all that the plan's tasks read and write there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from operator import mul
from typing import NamedTuple

from workbench.cost import PartRows, Rows
from workbench.errors import ScenarioError
from workbench.plan import LANES, Plan, Task, busy_seconds, let_begin
from workbench.prepared import Prepared
from workbench.profile import Pace, Profile
from workbench.result import Result, Source
from workbench.scenario import Scenario
from workbench.scheduler.block_manager import BlockCounts
from workbench.schedules.base import Lowering, Schedule, Step
from workbench.serving import prepare, serve
from workbench.simulate.late_bar import LateBar
from workbench.timeline import Span, Timeline

_FEW, _TYPICAL = 4, 2
"""Layers of a run that are laid out, and which stands for all others: the first two and the last differ from them."""


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
        time from four lowered layers of each kind (with prefills, or without) and the period between the third and the
        second, within 1 % of TASK.

    Returns
    -------
    Result
        With source SIMULATED.

    Raises
    ------
    WorkbenchError
        If scenario and schedule do not go together; before any work.
    """
    if not isinstance(detail, Detail):
        raise ScenarioError(f"detail must be Detail.TASK or Detail.ITERATION, not {detail!r}.")
    prepared = prepare(scenario, schedule)
    clock = TaskClock(prepared) if detail is Detail.TASK else IterationClock(prepared)
    try:
        result = serve(prepared, clock, Source.SIMULATED, account=BlockCounts)
    finally:
        clock.bar.close()
    return replace(result, interval=_interval(result, prepared.cost.profile))


def _interval(result: Result, profile: Profile | None) -> tuple[float, float] | None:
    """Throughput where the compute lanes, if they never overlap, are as fast or slow as calibrating saw them.

    What the link takes is left as it is: its rate is the hardware's, or the one that it is throttled to.
    """
    if profile is None:
        return None
    computing = min(result.seconds, result.busy["gpu"] + result.busy["cpu"])
    fast, slow = (result.seconds + (factor - 1) * computing for factor in profile.spread)
    return result.generated / slow, result.generated / fast


class _Clock:
    """What both details share: virtual time passes when it is told to."""

    def __init__(self, prepared: Prepared, timeline: Timeline) -> None:
        self.now, self.timeline = 0.0, timeline
        self.bar = LateBar(int(prepared.scenario.workload.output_len.sum()))
        self._carried = 0.0  # seconds that are left of the transfer that the last iteration let run on
        self._cores = prepared.scenario.machine.cores
        self._cost, self._plans, self._packet = prepared.cost, prepared.plans, prepared.lowering.schedule.packet_seconds

    def begin(self, blocks: BlockCounts) -> None:
        """See `Clock.begin`."""

    def wait(self, until: float) -> None:
        """See `Clock.wait`."""
        self._carried = max(0.0, self._carried - max(0.0, until - self.now))
        self.now = max(self.now, until)

    def expert_bytes(self, plan: Plan) -> float:
        """See `Clock.expert_bytes`."""
        return self._cost.expert_bytes(plan.parts)

    def _pace(self, plan: Plan, rows: Sequence[PartRows]) -> Pace | None:
        """How the lanes run during a plan where they share cores."""
        return None if self._cores is None else self._plans.pace(plan.tasks, rows, self._cores)

    def _pass(self, seconds: float, plan: Plan) -> None:
        """A plan took so long."""
        self.now += seconds
        for part in plan.parts:
            self.bar.add(part.rows.emits)

    def energy(self) -> None:
        """See `Clock.energy`."""


class TaskClock(_Clock):
    """Lays out every task of every plan."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared, Timeline(labels=prepared.lowering.graph.labels))

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """See `Clock.execute`."""
        rows = [self._cost.part(part) for part in plan.parts]
        laid = self._plans.lay_out(plan.tasks, rows, self._packet, self._pace(plan, rows), self._carried)
        seconds = max(sum(laid.dram), laid.seconds) + self._plans.between(plan)
        afters = let_begin(plan.tasks, laid.starts, laid.ends)
        for task, start, end, after in zip(plan.tasks, laid.starts, laid.ends, afters, strict=True):
            if end > start:
                until = self.now + min(end, seconds)
                span = Span(task.node.lane, task.name, self.now + start, until, number, after=after)
                self.timeline.spans.append(span)
        self._pass(seconds, plan)
        self._carried = max(0.0, laid.runs_on - seconds)
        busy = busy_seconds(plan.tasks, laid.busy)
        return {**busy, "h2d": busy["h2d"] - self._carried}


class _Stack(NamedTuple):
    """Four layers of each kind that are laid out for all, and of every task there what the clock asks for.

    Attributes
    ----------
    tasks : tuple of Task
    passed : range
        Layers of the stack that prefills pass.
    layers : int
        Layers of the stack.
    repeats : list of int
        Layers that each task stands for.
    lanes : dict of lane to places
        Tasks of each lane.
    typical : list of (int, places, places)
        For each layer that stands for others: how many, and the tasks that end no later than it and the one before it.
    """

    tasks: tuple[Task, ...]
    passed: range
    layers: int
    repeats: list[int]
    lanes: dict[str, list[int]]
    typical: list[tuple[int, list[int], list[int]]]

    @classmethod
    def of(cls, lowering: Lowering, passed: range, step: Step) -> _Stack:
        """That of an iteration whose prefills pass some of the layers."""
        short, times = few_layers(lowering.layers, passed)
        tasks = lowering.tasks(len(times), step)
        repeats = [times[task.layer] if task.layer >= 0 else 1 for task in tasks]
        lanes = {lane: [i for i, task in enumerate(tasks) if task.node.lane == lane] for lane in LANES}
        within = [[i for i, t in enumerate(tasks) if t.layer == n and t.part is not None] for n in range(len(times))]
        typical = [(n - 1, within[i], within[i - 1]) for i, n in enumerate(times) if n > 1]
        return cls(tasks, short, len(times), repeats, lanes, typical)

    def others(self, ends: list[float]) -> float:
        """Seconds of the layers that are not laid out: each takes as long as a typical one adds to the one before."""
        return sum(count * (_latest(ends, layer) - _latest(ends, before)) for count, layer, before in self.typical)


class IterationClock(_Clock):
    """Lays out four layers of each kind, with prefills and without, and repeats the third's period for the others."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared, Timeline())
        self._lowering, self._stacks = prepared.lowering, dict[tuple[int, range], _Stack]()

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """See `Clock.execute`."""
        stack = self._stack(plan, step)
        rows = [self._cost.part(part) for part in plan.parts]
        few = [_in_stack(each, stack) for each in rows]
        laid = self._plans.lay_out(stack.tasks, few, self._packet, self._pace(plan, rows), self._carried)
        repeated, others = list(map(mul, laid.busy, stack.repeats)), stack.others(laid.ends)
        busy = {lane: sum(map(repeated.__getitem__, places), 0.0) for lane, places in stack.lanes.items()}
        least = sum(map(mul, laid.dram, stack.repeats))
        awaited = {**busy, "h2d": busy["h2d"] - laid.running_on}
        seconds = max(least, laid.seconds + others, *awaited.values()) + self._plans.between(plan)
        self.timeline.spans.append(Span("step", plan_label(plan), self.now, self.now + seconds, number))
        self._pass(seconds, plan)
        end = max(laid.runs_on + others, busy["h2d"]) if laid.running_on else 0.0
        self._carried = max(0.0, end - seconds)
        return {**busy, "h2d": busy["h2d"] - self._carried}

    def _stack(self, plan: Plan, step: Step) -> _Stack:
        passed = next((part.prefill_layers for part in plan.parts if part.cut is not None), range(plan.layers))
        key = (step.value, passed)
        if key not in self._stacks:
            self._stacks[key] = _Stack.of(self._lowering, passed, step)
        return self._stacks[key]


def few_layers(layers: int, passed: range) -> tuple[range, tuple[int, ...]]:
    """Layers that are laid out for all: which of them prefills pass, and for how many each stands.

    Layers that prefills pass and others follow one another in up to three runs, each of which is shortened.
    """
    runs = (passed.start, len(passed), layers - passed.stop)
    times: list[int] = []
    for run in runs:
        few = [1] * min(run, _FEW)
        if run > _FEW:
            few[_TYPICAL] += run - _FEW
        times += few
    first = min(runs[0], _FEW)
    return range(first, first + min(runs[1], _FEW)), tuple(times)


def _in_stack(rows: PartRows, stack: _Stack) -> PartRows:
    return rows if isinstance(rows, Rows) else rows._replace(layers=stack.passed, stack=stack.layers)


def _latest(ends: list[float], places: list[int]) -> float:
    return max(map(ends.__getitem__, places), default=0.0)


def plan_label(plan: Plan) -> str:
    """``188 prefill + 3010 decode``."""
    prefill = sum(int(part.rows.prefill) for part in plan.parts)
    decode = sum(int(part.rows.decode) for part in plan.parts)
    return f"{prefill} prefill + {decode} decode"
