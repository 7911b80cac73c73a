"""The virtual clock: lays out every task, or skips the tasks of layers that only repeat the layer before.

No iteration is shorter than the time that the host's memory needs for all bytes that the plan's tasks read and write
there.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np

from workbench.core.errors import ScenarioError, StoppedError
from workbench.core.latency import Seconds
from workbench.core.result import Result, Source
from workbench.core.timeline import Span, Timeline
from workbench.hardware.profile import Profile
from workbench.scenario import Scenario
from workbench.scheduler.base import Queue
from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.scheduler.block_manager import BlockCounts
from workbench.schedules.base import Schedule, Step
from workbench.schedules.plan import Plan, Task, lane_names, places_before
from workbench.serving import prepare, serve
from workbench.serving.iterations import Record, Stretch
from workbench.serving.loop import NOT_CALLED, Called
from workbench.serving.plan_cost import LaidOut
from workbench.serving.prepared import Prepared
from workbench.simulate.late_bar import LateBar
from workbench.simulate.laying import Laying
from workbench.simulate.loading import loader
from workbench.simulate.stretches import Stretches, takes
from workbench.stages import PartRows

UNSEEN = 0.033
"""Relative half width of a run's 90 % interval beside that of computing: 1.645 standard deviations of 2 %. Six runs in
which the link alone decided were off by 1.6 % (root mean square; two cores of a Xeon with AMX,
`data/measured/sim-odd-xeon-amx.json`)."""


class Detail(enum.Enum):
    """Resolution of a simulation."""

    TASK = "task"
    ITERATION = "iteration"


def simulate(
    scenario: Scenario,
    schedule: Schedule,
    *,
    detail: Detail = Detail.ITERATION,
    until: Callable[[], bool] | None = None,
) -> Result:
    """Serve the workload in virtual time.

    Parameters
    ----------
    scenario : Scenario
    schedule : Schedule
    detail : Detail
        TASK lays out every task of every layer and fills the timeline with them. ITERATION lays out layers until one
        begins as the one before it began, and skips to the last; its times are within 1 % of those of TASK.
    until : callable () -> bool, optional
        Asked every few hundredths of a second; once it is true, the simulation ends early. The result is then that of
        the iterations made, of which there is at least one, and is marked as stopped.

    Returns
    -------
    Result
        A result with source SIMULATED.

    Raises
    ------
    WorkbenchError
        If scenario and schedule do not go together; it is raised before any work.
    """
    if not isinstance(detail, Detail):
        raise ScenarioError(f"detail must be Detail.TASK or Detail.ITERATION, not {detail!r}.")
    prepared = prepare(scenario, schedule)
    clock = TaskClock(prepared, until) if detail is Detail.TASK else IterationClock(prepared, until)
    try:
        result = serve(prepared, clock, Source.SIMULATED, account=BlockCounts)
    finally:
        clock.bar.close()
    return replace(result, interval=_interval(result, prepared.cost.profile))


def _interval(result: Result, profile: Profile | None) -> tuple[float, float] | None:
    """Throughput within which 90 % of the runs lie.

        T -/+ sqrt((s C)^2 + (u T)^2)

    C are the seconds of the compute lanes, as if these never overlapped, s how much faster or slower than usual they
    were while the computer was calibrated, and u is `UNSEEN`.
    """
    if profile is None:
        return None
    computing = min(result.seconds, result.busy["gpu"] + result.busy["cpu"])
    unseen = UNSEEN * result.seconds
    faster, slower = (math.hypot((factor - 1) * computing, unseen) for factor in profile.spread)
    return result.generated / (result.seconds + slower), result.generated / (result.seconds - faster)


class _Clock:
    """The base of both resolutions: a virtual clock that advances only when it is told to."""

    skips: ClassVar[bool]
    """True if layers that repeat the one before are not laid out."""

    def __init__(self, prepared: Prepared, timeline: Timeline, until: Callable[[], bool] | None) -> None:
        self.now = 0.0
        self._until = until
        self.timeline = timeline
        self.bar = LateBar(int(prepared.scenario.workload.generated_len.sum()))
        self._carried = 0.0  # remaining seconds of the transfer that the last iteration let run on
        self._cores = prepared.scenario.machine.cores
        self._cost = prepared.cost
        self._plans = prepared.plans
        self._packet = prepared.lowering.schedule.packet_seconds
        self._prepared = prepared
        self._laying: Laying | None = None
        self._stretches: Stretches | None = None

    def begin(self, blocks: BlockCounts) -> None:
        """See `Clock.begin`."""

    def wait(self, until: float) -> None:
        """See `Clock.wait`."""
        self._carried = max(0.0, self._carried - max(0.0, until - self.now))
        self.now = max(self.now, until)

    def advance(self, queue: Queue, record: Record) -> None:
        """See `Clock.advance`."""
        if self._until is not None and self._until():
            raise StoppedError("the simulation was stopped.")
        if self._stretches is None:
            return
        first = len(record.seconds)
        made = self._stretches.run(queue, record, self.now, self._carried)
        if made is None:
            return
        stretch, self._carried = made
        self.now = float(stretch.end[-1])
        self.bar.add(float(stretch.emits.sum()))
        self._draw_stretch(stretch, self._stretches, first)

    def called(self) -> Called:
        """See `Clock.called`: nobody asks anything of a simulation."""
        return NOT_CALLED

    def over(self) -> bool:
        """See `Clock.over`."""
        return True

    def stopped(self, batch: Batch) -> Ids:
        """See `Clock.stopped`: there are no tokens to stop at."""
        return NONE

    def expert_bytes(self, plan: Plan) -> float:
        """See `Clock.expert_bytes`."""
        return self._cost.expert_bytes(plan.parts)

    def energy(self) -> None:
        """See `Clock.energy`."""

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """See `Clock.execute`."""
        rows = [self._cost.part(part) for part in plan.parts]
        laid = self._lay_out(plan.tasks, rows)
        seconds = max(laid.dram, laid.seconds) + self._plans.between(plan)
        self._draw(plan, number, laid, seconds)
        self.now += seconds
        for part in plan.parts:
            self.bar.add(part.rows.emits)
        self._carried = max(0.0, laid.runs_on - seconds)
        return {**laid.busy, "h2d": laid.busy["h2d"] - self._carried}

    def _lay_out(self, tasks: Sequence[Task], rows: Sequence[PartRows]) -> LaidOut:
        """Play the tasks of a plan: compiled, or in Python where lanes share cores and until the kernels are there."""
        if self._cores is not None:
            pace = self._plans.pace(tasks, rows, self._cores)
            return self._plans.lay_out(tasks, rows, self._packet, pace, self._carried, skip=self.skips)
        if self._laying is None and (kernels := loader().kernels()) is not None:
            bandwidth = self._prepared.scenario.machine.cpu.bandwidth
            self._laying = Laying(kernels, self._plans, self._packet, bandwidth, skip=self.skips)
            if takes(self._prepared):
                briefly = self._until is not None
                self._stretches = Stretches(self._laying, self._prepared, skip=self.skips, briefly=briefly)
        if self._laying is None:
            return self._plans.lay_out(tasks, rows, self._packet, None, self._carried, skip=self.skips)
        return self._laying.lay_out(tasks, rows, self._carried)

    def _draw(self, plan: Plan, number: int, laid: LaidOut, seconds: float) -> None:
        """Add the tasks of a plan to the timeline; it takes `seconds` from now on."""
        raise NotImplementedError

    def _draw_stretch(self, stretch: Stretch, made: Stretches, first: int) -> None:
        """Add the tasks of a stretch to the timeline, whose iterations are numbered from `first` on."""
        raise NotImplementedError


class TaskClock(_Clock):
    """Lays out every task of every plan."""

    skips = False

    def __init__(self, prepared: Prepared, until: Callable[[], bool] | None = None) -> None:
        super().__init__(prepared, Timeline(labels=prepared.lowering.stack.labels), until)
        self._words = dict[int, _Words]()

    def _draw(self, plan: Plan, number: int, laid: LaidOut, seconds: float) -> None:
        starts = np.array(laid.starts)
        ends = np.array(laid.ends)
        before = laid.before
        if before is None:
            before = places_before(plan.tasks, starts.tolist(), ends.tolist())
        drawn = _Drawn(
            self._words_of(plan.tasks),
            np.array([self.now]),
            np.array([seconds]),
            starts[np.newaxis],
            ends[np.newaxis],
            np.array(before)[np.newaxis],
        )
        self.timeline.extend_later(partial(drawn.spans, number))

    def _draw_stretch(self, stretch: Stretch, made: Stretches, first: int) -> None:
        done = len(stretch.begin)
        drawn = _Drawn(
            self._words_of(made.tasks),
            stretch.begin.copy(),
            stretch.taken.copy(),
            made.starts[:done].copy(),
            made.ends[:done].copy(),
            made.before[:done].copy(),
        )
        self.timeline.extend_later(partial(drawn.spans, first))

    def _words_of(self, tasks: Sequence[Task]) -> _Words:
        if id(tasks) not in self._words:
            self._words[id(tasks)] = _Words(tasks)
        return self._words[id(tasks)]


class _Words:
    """Words of a plan's tasks, in arrays of str."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks  # kept so that their id stays theirs
        self.lanes = np.array([task.node.lane for task in tasks], dtype=object)
        self.names = np.array([task.name for task in tasks], dtype=object)
        self.befores = np.array(lane_names(tasks), dtype=object)


class _Drawn(NamedTuple):
    """Iterations of the same tasks, laid out.

    Attributes
    ----------
    words : _Words
    begins, seconds : ndarray (iterations,)
        Begin of each iteration on the clock, and the seconds that it takes.
    starts, ends : ndarray (iterations, tasks)
        Times of the tasks from the begin of their iteration [s].
    before : ndarray (iterations, tasks) int64
        Place in `_Words.befores` of the task whose end let each begin.
    """

    words: _Words
    begins: Seconds
    seconds: Seconds
    starts: Seconds
    ends: Seconds
    before: Ids

    def spans(self, first: int) -> Iterator[Span]:
        """The spans of these iterations, which are numbered from `first` on."""
        for place, (begin, seconds) in enumerate(zip(self.begins.tolist(), self.seconds.tolist(), strict=True)):
            starts = self.starts[place]
            ends = self.ends[place]
            drawn = np.flatnonzero(ends > starts)
            columns = (
                self.words.lanes[drawn].tolist(),
                self.words.names[drawn].tolist(),
                (begin + starts[drawn]).tolist(),
                (begin + np.minimum(ends[drawn], seconds)).tolist(),
                repeat(first + place),
                repeat(math.nan),
                self.words.befores[self.before[place][drawn]].tolist(),
            )
            yield from _spans(columns)


class IterationClock(_Clock):
    """Lays out tasks until a layer begins as the one before it began, and skips the layers that only repeat it."""

    skips = True

    def __init__(self, prepared: Prepared, until: Callable[[], bool] | None = None) -> None:
        super().__init__(prepared, Timeline(), until)

    def _draw(self, plan: Plan, number: int, laid: LaidOut, seconds: float) -> None:
        span = Span("step", plan_label(plan), self.now, self.now + seconds, number)
        self.timeline.extend_later(lambda: [span])

    def _draw_stretch(self, stretch: Stretch, made: Stretches, first: int) -> None:
        rows = (stretch.prefill.tolist(), stretch.decode.tolist())
        times = (stretch.begin.tolist(), stretch.end.tolist())

        def spans() -> Iterator[Span]:
            return _spans((repeat("step"), map(_label, *rows), *times, count(first), repeat(math.nan), repeat("")))

        self.timeline.extend_later(spans)


def _spans(columns: Iterable[Iterable[Any]]) -> Iterator[Span]:
    """As many spans as the shortest column has entries: `Span._make` without its call, for there are many thousands."""
    return map(tuple.__new__, repeat(Span), zip(*columns, strict=False))


def plan_label(plan: Plan) -> str:
    """Name of a plan by its tokens: ``188 prefill + 3010 decode``."""
    prefill = sum(int(part.rows.prefill) for part in plan.parts)
    decode = sum(int(part.rows.decode) for part in plan.parts)
    return _label(prefill, decode)


def _label(prefill: int, decode: int) -> str:
    return f"{prefill} prefill + {decode} decode"
