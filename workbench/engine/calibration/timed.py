"""Executes plans of the schedules as a run does, and notes how long every operation of theirs takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from workbench.core.timeline import Span, overlap, tasks_during
from workbench.engine.devices.driver import Driver, Event
from workbench.engine.devices.host import HostStream
from workbench.engine.engine import Engine
from workbench.engine.lanes.lane import Job
from workbench.engine.lanes.together import Together
from workbench.engine.model.ops import RowLayout
from workbench.hardware.profile import Pace
from workbench.kernels import FewLayers
from workbench.pipeline.layer_graph import NodeKind
from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.scheduler.block_manager import BlockManager
from workbench.schedules.base import Step
from workbench.schedules.plan import COMPUTE, Plan, Task
from workbench.serving.prepared import Prepared
from workbench.serving.task_cost import rows_of
from workbench.stages import Rows, Stage

_CLOCK = HostStream()
"""Has the times of what the CPU computes."""


class Shape(NamedTuple):
    """The rows of a pass through the layers: prompts of one length, or decodes that read so many KV entries each."""

    prompts: int = 0
    length: int = 0
    decodes: int = 0
    held: int = 0

    @property
    def rows(self) -> Rows:
        """The rows that it gives the stages."""
        pairs = self.prompts * self.length * (self.length + 1) / 2
        return Rows(
            self.prompts * self.length, self.decodes, pairs, self.decodes * self.held, self.prompts + self.decodes
        )

    @property
    def tokens(self) -> int:
        """KV entries that it needs room for."""
        return self.prompts * self.length + self.decodes * self.held

    @property
    def requests(self) -> int:
        """Sequences of both kinds."""
        return self.prompts + self.decodes

    def batch(self, layers: int) -> Batch:
        """The first requests of a workload: prompts, then decodes."""
        prompts: Ids = np.arange(self.prompts)
        decodes: Ids = np.arange(self.prompts, self.requests)
        return Batch(
            prompts if self.prompts else NONE,
            np.full(self.prompts, self.length),
            decodes,
            np.full(self.decodes, self.held - 1),
            layers,
        )


class Call(NamedTuple):
    """An operation as it was timed: by the clock, and by its thread's own. `resident` are weights that did not arrive
    just before. On a card there are 0 threads, and both times are the card's."""

    op: str
    lane: str
    threads: int
    resident: bool
    rows: Rows
    wall: float
    cpu: float


class Move(NamedTuple):
    """A transfer, of weights or of activations, on a lane of the link: seconds that it held it, and bytes."""

    lane: str
    weights: bool
    seconds: float
    size: int


@dataclass
class Pass:
    """One plan as it was executed.

    Attributes
    ----------
    calls : list of Call
    spans : list of Span
        Of its tasks.
    moves : list of Move
    requests : int
    around : float
        Seconds before the first task and after the last.
    """

    calls: list[Call]
    spans: list[Span]
    moves: list[Move]
    requests: int = 0
    around: float = 0.0

    def busy(self, lane: str) -> float:
        """Seconds that a lane was at work."""
        return sum(span.end - span.start for span in self.spans if span.lane == lane)

    def tasks(self, *lanes: str) -> int:
        """Tasks of lanes."""
        return sum(span.lane in lanes for span in self.spans)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def spans_of(self, lane: str) -> list[tuple[float, float]]:
        """Starts and ends of a lane's tasks, by their starts."""
        return sorted((span.start, span.end) for span in self.spans if span.lane == lane)

    def both_work(self, lane: str, other: str) -> float:
        """Seconds in which two lanes worked at once."""
        return overlap(self.spans_of(lane), self.spans_of(other))

    def beside_the_other(self, lane: str) -> float:
        """Share of a compute lane's time in which the other one worked too."""
        busy = self.busy(lane)
        return self.both_work(*COMPUTE) / busy if busy else 0.0

    def tasks_beside(self, lane: str) -> float:
        """Number of other lanes' tasks that ran while this one worked."""
        others = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
        for span in self.spans:
            if span.lane != lane:
                others[span.lane, span.name].append((span.start, span.end))
        return tasks_during(others.values(), self.spans_of(lane))

    def waits(self, lanes: tuple[str, ...]) -> list[float]:
        """Seconds between the end of the task that let one on these lanes begin, and its beginning."""
        ends = {f"{span.lane} {span.name}": span.end for span in self.spans}
        return [
            max(0.0, span.start - ends[span.after])
            for span in self.spans
            if span.lane in lanes and span.after in ends and not span.name.startswith("W")
        ]

    @property
    def beyond_operations(self) -> float:
        """Seconds that a compute task takes beyond its operations, the mean of all."""
        operations = sum(call.wall for call in self.calls)
        return (sum(map(self.busy, COMPUTE)) - operations) / self.tasks(*COMPUTE)


class _Noted(NamedTuple):
    """An operation that was timed; `rows` counts what it was given."""

    op: str
    lane: str
    resident: bool
    rows: Callable[[], Rows]


class TimedEngine(Engine):
    """An engine whose plans all have the threads that they are given, and that notes every operation."""

    def __init__(self, prepared: Prepared, driver: Driver | None = None) -> None:
        super().__init__(prepared, driver=driver)
        self.pace = Pace(1, 1, "cpu", 0.0, 0.0)
        self.in_one_call = False  # True to compute layers in one call where that can be done
        self._noted = list[tuple[_Noted, Event, Event, float]]()
        self._moves = list[Move]()
        self._streams = prepared.scenario.layer.streams
        self._lowering = prepared.lowering
        self._layers = prepared.layers
        self._step = Step.FIRST
        self._number = 0

    def make(self, shape: Shape) -> Pass:
        """Execute one plan, and tell how it went. Plans follow one another as the iterations of a run do."""
        scenario = self._prepared.scenario
        batch = shape.batch(self._layers)
        size = scenario.memory.kv_block
        longest = max(shape.length, shape.held)
        blocks = BlockManager(scenario.kv_blocks, size, max(1, shape.requests), longest)
        everyone = np.arange(shape.requests)
        blocks.allocate(everyone, np.full(shape.requests, min(size, longest)))
        for _ in range(-(-longest // size) - 1):
            blocks.append(everyone)  # in turn, so that each sequence's blocks lie apart
        if not self._number:
            self.begin(blocks)
        self._blocks = blocks
        self._noted = []
        self._moves = []
        before = len(self.timeline)
        plan = self._lowering.plan(batch, self._step)
        begin = self.watch.now
        self.execute(plan, self._number, self._step)
        passed = self.watch.now - begin
        spans = self.timeline.spans[before:]
        self._step = Step.MIDDLE
        self._number = self._number + 1
        first = min(max(span.start, begin) for span in spans)
        around = passed - (max(span.end for span in spans) - first)
        return Pass(self._calls(), spans, self._moves, shape.requests, around)

    def calls_of_layers(self) -> list[FewLayers]:
        """The calls that compute whole layers for one decode."""
        smallest = RowLayout.smallest()
        runs = self._runs_of(self._lowering.tasks(Step.MIDDLE))
        return [whole.call for run in runs for whole in self.forward.wholes(run, smallest)]

    def layout(self, shape: Shape) -> RowLayout:
        """The layout of a shape's rows in the last plan, which had that shape."""
        return RowLayout.of(shape.batch(self._layers), self._blocks)

    def _record(self, ended: list[tuple[Job, str]], number: int) -> dict[str, float]:
        for job, _ in ended:
            if job.bytes:
                weights = job.task.node.kind is NodeKind.WEIGHTS
                self._moves.append(
                    Move(job.task.node.lane, weights, sum(end - start for start, end in job.spans), job.bytes)
                )
        return super()._record(ended, number)

    def paced(self, plan: Plan) -> Pace:
        """See `Engine.paced`; what a run finds out is found out here too, for it takes time."""
        super().paced(plan)
        return self.pace

    def _compute(self, task: Task, layout: RowLayout) -> None:
        for stage in task.node.stages:
            work = partial(self.forward.compute, stage, task.layer, task.part or 0, layout)
            resident = stage.op.has_weights and not self._streams(stage)
            rows = partial(_stage_rows, stage, layout)
            self._note(_Noted(stage.op.name, task.node.lane, resident, rows), work)

    def _together(self, plan: Plan, layouts: list[RowLayout]) -> list[Together]:
        return super()._together(plan, layouts) if self.in_one_call else []

    def _embed(self, part: int, batch: Batch) -> None:
        rows = partial(Rows, prefill=batch.rows.tokens)
        self._note(_Noted("embed", "gpu", False, rows), partial(super()._embed, part, batch))

    def _emit(self, part: int, batch: Batch, layout: RowLayout) -> None:
        rows = partial(Rows, prefill=batch.rows.emits)
        self._note(_Noted("head", "gpu", False, rows), partial(super()._emit, part, batch, layout))

    def _note(self, noted: _Noted, work: Callable[[], object]) -> None:
        stream = self.driver.stream("gpu") if noted.lane == "gpu" else _CLOCK
        begin = stream.record()
        cpu = time.thread_time()
        work()
        cpu = time.thread_time() - cpu
        self._noted.append((noted, begin, stream.record(), cpu))

    def _calls(self) -> list[Call]:
        """The operations of the last plan. Their rows are counted here, after it: a run does not count them either."""
        calls = list[Call]()
        on_card = not self.driver.on_host
        for (op, lane, resident, count), begin, end, cpu in self._noted:
            rows = count()
            wall = end.seconds_since(begin)
            if not rows.tokens:
                continue
            if on_card and lane == "gpu":
                calls.append(Call(op, lane, 0, resident, rows, wall, wall))
            else:
                threads = self.pace.cpu if lane == "cpu" else self.pace.gpu
                calls.append(Call(op, lane, threads, resident, rows, wall, cpu))
        return calls


def _stage_rows(stage: Stage, layout: RowLayout) -> Rows:
    return rows_of(stage, _part_rows(layout))


def _part_rows(layout: RowLayout) -> Rows:
    """Counts of the rows of one part, whose prompts are whole."""
    lengths = layout.prefill_len
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    decodes = len(layout.lengths)
    context = float(layout.lengths.sum())
    return Rows(sum(lengths), decodes, pairs, context, len(lengths) + decodes)
