"""The wall clock: lanes execute every task of a plan on the real model."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from traceback import clear_frames
from typing import NamedTuple

import numpy as np

from workbench.core.energy import Energy
from workbench.core.errors import EngineError
from workbench.core.result import TokenLogprobs
from workbench.core.timeline import Span, Timeline
from workbench.engine.devices.driver import Driver
from workbench.engine.devices.host import HostDriver
from workbench.engine.inbox import Calls, Inbox
from workbench.engine.lanes.affinity import affinities
from workbench.engine.lanes.control import MOST_SLEPT, Control
from workbench.engine.lanes.executor import Executor
from workbench.engine.lanes.lane import Action, Job
from workbench.engine.lanes.meter import energy_meter
from workbench.engine.lanes.process import give_back, take
from workbench.engine.lanes.stopwatch import Stopwatch
from workbench.engine.lanes.together import Together
from workbench.engine.model.forward import Forward
from workbench.engine.model.ops import RowLayout
from workbench.engine.model.sampler import choose_all, logprobs_of
from workbench.engine.model.whole_layers import Run, layers_at_once, runs_of
from workbench.engine.token_log import Listener, TokenLog
from workbench.hardware import Machine, usable_cores
from workbench.hardware.profile import Cores, Pace
from workbench.pipeline.layer_graph import NodeKind
from workbench.scheduler.base import Queue
from workbench.scheduler.batch import Batch, Ids
from workbench.scheduler.block_manager import BlockCounts, BlockManager
from workbench.schedules.base import Step
from workbench.schedules.plan import LANES, WHOLE, Carry, Plan, Task, let_begin
from workbench.serving.iterations import Record
from workbench.serving.loop import Called
from workbench.serving.prepared import Prepared
from workbench.serving.task_cost import present
from workbench.stages import PartRows
from workbench.workload.stop_strings import stops
from workbench.workload.tokenizer import Tokenizer, load_tokenizer


class UnderWay(NamedTuple):
    """The iteration that a run is at work on.

    Attributes
    ----------
    iteration : int
        Its number, from 1.
    prefill : int
        Prompt tokens of its batch.
    layer, layers : int
        The last layer that has begun, from 1, and their number.
    share : float
        Share of its computing tasks that are done.
    seconds : float
        Its time so far [s].
    """

    iteration: int
    prefill: int
    layer: int
    layers: int
    share: float
    seconds: float


class Engine:
    """A `Clock` that executes plans on the real model.

    It loads the model when it is made, before the clock starts; `control` may end that. `close` ends its threads. Each
    token is written to `log` as soon as it is sampled; what other threads ask of the run is in `inbox`. The gpu lane
    computes on the device of `driver`, by default on the host; `close` closes it.
    """

    def __init__(
        self,
        prepared: Prepared,
        control: Control | None = None,
        log: Listener | None = None,
        inbox: Calls | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.control = control or Control()
        self.driver = driver or HostDriver()
        self._between = self.driver.stream("between tasks")
        self._log = log or TokenLog()
        self._prepared = prepared
        scenario = prepared.scenario
        self._inbox = inbox or Inbox(len(scenario.workload))
        self._rows: list[PartRows] = []  # of the parts of the plan under way
        self._plan: tuple[int, Plan] | None = None  # under way, with its number
        self._blocks = BlockManager(0, 1, 0, 0)  # until the clock begins
        self._renew()
        self._runs: dict[int, tuple[tuple[Task, ...], list[Run]]] = {}  # of the plans' tasks, by their id
        self._layers_at_once = layers_at_once(scenario.model, scenario.precision)
        self.watch = Stopwatch()
        self.cores = self._division(scenario.machine)
        link = scenario.machine.link
        take()  # at once: a run that begins while this one reads its model would take the readers' threads for usual
        try:
            with self._between.issuing():
                self.forward = Forward(prepared, self.control, self.driver)
                self.forward.warm_up()
            self._between.finish()
            self._executor = Executor(
                link.h2d,
                link.d2h,
                throttled=scenario.machine.throttled,
                packet_seconds=prepared.lowering.schedule.packet_seconds,
                control=self.control,
                driver=self.driver,
            )
        except BaseException as error:
            self._close_driver(error)
            raise
        finally:
            give_back()

    def _renew(self) -> None:
        """Know the requests of the workload alone, without a token."""
        self._requests = list(self._prepared.scenario.workload.requests)
        self._tokens = [list(request.prompt) for request in self._requests]
        self._logprobs = [list[TokenLogprobs]() for _ in self._requests]
        self.timeline = Timeline(labels=self._prepared.lowering.stack.labels)

    def _division(self, machine: Machine) -> Cores:
        """Division of the cores among the lanes; a card leaves the gpu lane one, to issue from."""
        if not self.driver.on_host:
            return replace(Cores.beside_card(usable_cores()), gpu=1)
        measured = machine.cores if machine.shares_cores else None
        return measured or Cores.of(usable_cores())

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which only requests with texts to stop at need."""
        return load_tokenizer(self._prepared.scenario.model)

    @property
    def generated(self) -> tuple[tuple[int, ...], ...]:
        """The tokens generated for each request."""
        pairs = zip(self._tokens, self._requests, strict=True)
        return tuple(tuple(tokens[len(request.prompt) :]) for tokens, request in pairs)

    @property
    def logprobs(self) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Log probabilities of these tokens, where the request asks for them."""
        return tuple(map(tuple, self._logprobs)) if any(self._logprobs) else ()

    def latest_logprobs(self, request: int) -> TokenLogprobs | None:
        """Log probabilities of a request's latest token, by its number; None where it does not ask for them."""
        return self._logprobs[request][-1] if self._logprobs[request] else None

    @property
    def used_blocks(self) -> int:
        """KV blocks that requests hold."""
        return self._blocks.total - self._blocks.free

    @property
    def expert_counts(self) -> tuple[tuple[int, ...], ...]:
        """Times that each routed expert was computed, layer by layer; see `Result.expert_counts`."""
        return tuple(map(tuple, self.forward.routed.counts.tolist()))

    def pause(self) -> None:
        """Let no task start and no time pass until `resume`; what runs already, also of several layers, is finished."""
        self.control.hold()
        self.watch.hold()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.watch.go()
        self.control.go()

    def busy(self) -> dict[str, float]:
        """Seconds that each lane has worked so far, tasks under way included."""
        return self._executor.busy()

    def under_way(self) -> UnderWay | None:
        """The iteration under way; None between two."""
        at_work = self._plan  # read once: the engine's thread clears it
        reached = self._executor.reached()
        if at_work is None or reached is None:
            return None
        number, plan = at_work
        prefill = sum(int(batch.rows.prefill) for batch in plan.parts)
        layer, share = reached
        return UnderWay(number + 1, prefill, layer + 1, plan.layers, share, self.watch.now - self._now)

    def close(self) -> None:
        """End every thread, and let the model go: a run that has ended may be kept for what it tells."""
        try:
            self._executor.close()
        finally:
            self.forward.let_go()
            del self.forward
            self._close_driver(sys.exc_info()[1])

    def _close_driver(self, error: BaseException | None) -> None:
        """Close the driver; what an error's frames hold of a card's memory goes, for the error may be kept."""
        while error is not None and not self.driver.on_host:
            clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        with suppress(RuntimeError):  # a card that was lost has been told of by then
            self.driver.close()

    # ------------------------------------------------------------------------------------------------- the clock

    @property
    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def begin(self, blocks: BlockCounts) -> None:
        """See `Clock.begin`; a workload that is served again begins anew, on the model that is loaded."""
        if not isinstance(blocks, BlockManager):
            raise EngineError(f"the engine needs the tables of a BlockManager, not {type(blocks).__name__}.")
        self._blocks = blocks
        self._renew()
        self._now = 0.0
        self._meter = energy_meter(on_card=not self.driver.on_host)
        self.watch.start()

    def advance(self, queue: Queue, record: Record) -> None:
        """See `Clock.advance`: every iteration takes its own time."""

    def wait(self, until: float) -> None:
        """See `Clock.wait`.

        Raises
        ------
        StoppedError
            If the run was stopped meanwhile.
        """
        while (left := until - self.watch.now) > 0 and not self._inbox.waiting:  # again if the run was paused meanwhile
            self._executor.check()
            self.control.sleep(min(left, MOST_SLEPT))
        self._now = self.watch.now

    def called(self) -> Called:
        """See `Clock.called`."""
        called = self._inbox.take()
        for request, _ in called.joined:
            self._requests.append(request)
            self._tokens.append(list(request.prompt))
            self._logprobs.append([])
        self.forward.forget(called.cancelled)
        return called

    def over(self) -> bool:
        """See `Clock.over`."""
        return self._inbox.close_if_none()

    def stopped(self, batch: Batch) -> Ids:
        """See `Clock.stopped`."""
        return np.array([number for number in batch.emitting.tolist() if self._stops(number)], dtype=np.int64)

    def _stops(self, number: int) -> bool:
        """True if the latest token of a request is one that it stops at, or completes a text that it stops at."""
        request = self._requests[number]
        tokens = self._tokens[number]
        return stops(tokens, request.sampling, lambda: self._tokenizer, start=len(request.prompt))

    def expert_bytes(self, plan: Plan) -> float:
        """See `Clock.expert_bytes`."""
        return self.forward.experts_read()

    def energy(self) -> Energy | None:
        """See `Clock.energy`."""
        return None if self._meter is None else self._meter.read()

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """See `Clock.execute`."""
        layouts = [RowLayout.of(batch, self._blocks) for batch in plan.parts]
        self._plan = number, plan
        try:
            return self._executed(plan, layouts, number)
        finally:
            self._plan = None
            for layout in layouts:
                layout.leave()

    def _executed(self, plan: Plan, layouts: list[RowLayout], number: int) -> dict[str, float]:
        with self._between.issuing():
            self.forward.begin(plan.parts, layouts)
        self._between.finish()
        places = affinities(self.paced(plan), self.cores)
        self._executor.pin(places)
        self._rows = [self._prepared.cost.part(batch) for batch in plan.parts]
        together = self._together(plan, layouts)
        jobs = self._executor.run(plan.tasks, self._actions(plan, layouts, together))
        for each in together:
            each.tell(jobs)
        afters = let_begin(plan.tasks, [job.start for job in jobs], [job.end for job in jobs])
        ended = []
        for task, job, after in zip(plan.tasks, jobs, afters, strict=True):
            if task.carry is not Carry.OUT and job.action is not None:
                ended.append((job, after))
        self._check_bytes([job for job, _ in ended], plan)
        with self._between.issuing():
            for part, (layout, batch) in enumerate(zip(layouts, plan.parts, strict=True)):
                self.forward.keep(part, layout, batch)
            self.forward.routed.settle()
        self._between.finish()
        self._now = self.watch.now
        for job, _ in ended:
            lane = job.task.node.lane
            if places[lane].threads > 1 or (lane == "gpu" and not self.driver.on_host):
                job.cpu = math.nan  # others, or the card, compute while this thread waits
        return self._record(ended, number)

    def paced(self, plan: Plan) -> Pace:
        """Division of the cores among the lanes while a plan is executed."""
        if not self.driver.on_host or self._prepared.scenario.machine.has_card:  # it knows no times of shared cores
            return Pace(self.cores.gpu, self.cores.cpu, "" if self.cores.spare else "gpu", 0.0, 0.0)
        rows = [self._prepared.cost.part(batch) for batch in plan.parts]
        return self._prepared.plans.pace(plan.tasks, rows, self.cores)

    def _record(self, ended: list[tuple[Job, str]], number: int) -> dict[str, float]:
        busy = dict.fromkeys(LANES, 0.0)
        at = self.watch.at
        for job, after in ended:
            lane = job.task.node.lane
            for start, end in job.spans:
                span = Span(lane, job.task.name, at(start), at(end), number, job.cpu, after)
                busy[lane] += span.end - span.start
                self.timeline.spans.append(span)
        return busy

    def _together(self, plan: Plan, layouts: list[RowLayout]) -> list[Together]:
        """The layers of a plan that are computed at once."""
        found = list[Together]()
        for run in self._runs_of(plan.tasks):
            part = plan.tasks[run.first].part or 0
            for piece, layout in self._alike(run, plan.parts[part], layouts[part]):
                for whole in self.forward.wholes(piece, layout):
                    compute = partial(self.forward.compute_layers, whole, part, layout)
                    found.append(Together(whole.first, whole.past, compute))
        return found

    def _runs_of(self, tasks: tuple[Task, ...]) -> list[Run]:
        """The runs of layers of a plan's tasks, which are those of other plans, too."""
        known = self._runs.get(id(tasks))
        if known is None:  # the tasks are kept, so that no others get their id
            known = self._runs[id(tasks)] = tasks, runs_of(tasks, self._layers_at_once)
        return known[1]

    def _alike(self, run: Run, batch: Batch, layout: RowLayout) -> Iterator[tuple[Run, RowLayout]]:
        """The pieces of a run in which the rows are the same: in some layers those of prefills are missing."""
        if batch.cut is None:
            yield run, layout
            return
        first = run.first
        for same, tasks in groupby(run.own, lambda task: batch.at(task.layer) is batch):
            past = first + len(list(tasks))
            yield Run(run.tasks, first, past), layout if same else layout.decodes_alone
            first = past

    def _actions(self, plan: Plan, layouts: list[RowLayout], together: list[Together]) -> list[Action | None]:
        """The action of each task; the first of layers that are computed at once has that of all."""
        actions = list[Action | None]()
        for each in together:
            actions += [self._action(task, plan.parts, layouts) for task in plan.tasks[len(actions) : each.first]]
            actions += [each, *(None for _ in range(each.first + 1, each.past))]
        return actions + [self._action(task, plan.parts, layouts) for task in plan.tasks[len(actions) :]]

    def _action(self, task: Task, parts: tuple[Batch, ...], layouts: list[RowLayout]) -> Action | None:
        """The action of a task, None if it has nothing to do."""
        forward = self.forward
        layer = task.layer
        if task.part is None:
            there = present(task, self._rows)
            moves = self._prepared.cost.weight_transfer(task._replace(page=WHOLE), self._rows)  # pages share a slot
            return (lambda: forward.transfer_weights(task.weights_of, there, task.page)) if moves else None
        part = task.part
        batch = parts[part]
        here = batch.at(task.place(batch.layers))
        layout = layouts[part] if here is batch else layouts[part].decodes_alone
        if not layout.rows or forward.moves_nothing(task.node, layout):
            return None
        return {
            NodeKind.EMBED: lambda: self._embed(part, here),
            NodeKind.HEAD: lambda: self._emit(part, here, layout),
            NodeKind.SEGMENT: lambda: self._compute(task, layout),
            NodeKind.DEFERRED: lambda: self._compute_late(task, layout),
            NodeKind.MOVE: lambda: forward.move(task.node, part, layout),
            NodeKind.KV_IN: lambda: forward.fetch_kv(layer, part, layout),
            NodeKind.KV_OUT: lambda: forward.store_kv(layer, part, layout),
            NodeKind.EXPERTS_IN: lambda: forward.fetch_experts(task.node, layer, part, layout),
        }[task.node.kind]

    def _embed(self, part: int, batch: Batch) -> None:
        ids: list[int] = []
        columns = (batch.prefills, batch.starts, batch.prefill_len)
        for request, start, length in zip(*(column.tolist() for column in columns), strict=True):
            ids += self._tokens[request][start : start + length]
        ids += [self._tokens[request][-1] for request in batch.decodes.tolist()]
        self.forward.embed(part, ids)

    def _compute(self, task: Task, layout: RowLayout) -> None:
        for stage in task.node.stages:
            self.forward.compute(stage, task.layer, task.part or 0, layout)

    def _compute_late(self, task: Task, layout: RowLayout) -> None:
        for stage in task.node.stages:
            self.forward.compute_late(stage, task.layer, task.part or 0, layout)

    def _emit(self, part: int, batch: Batch, layout: RowLayout) -> None:
        emitting = batch.emitting.tolist()
        requests = [self._requests[number] for number in emitting]
        tokens = [self._tokens[number] for number in emitting]
        logits = self.forward.logits(part, layout)
        self.driver.stream("gpu").record().wait()  # asleep: reading the tokens would keep a core busy meanwhile
        chosen = choose_all(logits, requests, tokens, self.control.check)
        for row, (number, request, token) in enumerate(zip(emitting, requests, chosen, strict=True)):
            self._tokens[number].append(token)
            if request.sampling.logprobs is not None:
                self._logprobs[number].append(logprobs_of(logits[row], token, request.sampling.logprobs))
        self._log.add(zip(emitting, chosen, strict=True))

    # ------------------------------------------------------------------------------------- bytes that were moved

    def _check_bytes(self, jobs: list[Job], plan: Plan) -> None:
        cost = self._prepared.cost
        for job in jobs:
            task = job.task
            if task.node.kind is NodeKind.WEIGHTS:
                expected = cost.weight_transfer(task, self._rows)
            elif task.node.kind in (NodeKind.MOVE, NodeKind.KV_IN, NodeKind.KV_OUT) and task.part is not None:
                here = plan.parts[task.part].at(task.place(plan.layers))
                expected = cost.transfer(task.node, here.rows)
            else:
                continue
            if job.bytes != round(expected):
                raise EngineError(
                    f"task {task.name} moved {job.bytes} bytes where the plan says {expected:.0f}; this is a bug."
                )
