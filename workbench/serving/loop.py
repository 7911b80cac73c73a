"""The one serving loop. The virtual clock of `simulate` and the wall clock of `run` both drive it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from workbench.core.energy import Energy, published_model
from workbench.core.errors import CapacityError, ScenarioError, StoppedError
from workbench.core.latency import Seconds, percentiles
from workbench.core.result import Result, Source
from workbench.core.timeline import Timeline
from workbench.scenario import Scenario
from workbench.scheduler.base import Queue
from workbench.scheduler.batch import Batch, Ids
from workbench.scheduler.block_manager import BlockCounts, BlockManager
from workbench.schedules.base import Step
from workbench.schedules.plan import Plan
from workbench.serving.iterations import Joined, Record
from workbench.serving.prepared import Prepared, facts


class Called(NamedTuple):
    """Changes that somebody asked of a run while it served.

    `joined` are further requests; `cancelled` those that nobody waits for any more: they may be finished, or not have
    arrived.
    """

    joined: tuple[Joined, ...] = ()
    cancelled: tuple[int, ...] = ()


NOT_CALLED = Called()


class Clock(Protocol):
    """A clock that executes plans, in virtual or in real time."""

    timeline: Timeline

    @property
    def now(self) -> float:
        """Seconds since `begin`."""

    def begin(self, blocks: BlockCounts) -> None:
        """Start the clock, once before the first plan, with the KV blocks that plans refer to."""

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """Run one iteration and move `now` to its end; return the busy time per lane [s]."""

    def advance(self, queue: Queue, record: Record) -> None:
        """Execute and record, if the clock can do so faster, some iterations in the middle of a run."""

    def wait(self, until: float) -> None:
        """Let time pass without work until then, or until the clock is called."""

    def called(self) -> Called:
        """Changes that somebody asked for since the last time."""

    def over(self) -> bool:
        """True if no further request joins; false if one has joined that was not told yet."""

    def stopped(self, batch: Batch) -> Ids:
        """Requests whose token of the batch just executed is one that they stop at."""

    def expert_bytes(self, plan: Plan) -> float:
        """Bytes of routed experts that the plan just executed has read, expected or counted [B]."""

    def energy(self) -> Energy | None:
        """Energy that a meter has counted since `begin`; None if there is no meter."""


_RECENT = 100
"""Iterations whose times stand for the time between tokens of a live run."""


@dataclass(frozen=True)
class Progress:
    """Progress of a workload.

    Attributes
    ----------
    seconds : float
        Time since the start [s].
    iterations : int
    prefill, decode : int
        Tokens of each class pushed through the model.
    emitted, total : int
        Output tokens generated, and to generate in all if no further request ends before its output length.
    used_blocks, blocks : int
        KV blocks in use during the last iteration, and in all.
    preemptions : int
    busy : mapping of lane to float
        Busy time per lane [s].
    waited, gaps : sequence of float
        Times to the first token, of all requests that have one, and between tokens, in the last 100 iterations that
        decoded [s].
    """

    seconds: float = 0.0
    iterations: int = 0
    prefill: int = 0
    decode: int = 0
    emitted: int = 0
    total: int = 0
    used_blocks: int = 0
    blocks: int = 0
    preemptions: int = 0
    busy: Mapping[str, float] = field(default_factory=dict)
    waited: Sequence[float] | Seconds = ()
    gaps: Sequence[float] = ()

    @property
    def ttft(self) -> tuple[float, float]:
        """Median and 90th percentile of the time to the first token; NaN before there is one [s]."""
        return percentiles(self.waited)

    @property
    def tbt(self) -> tuple[float, float]:
        """Median and 90th percentile of the time between tokens; NaN before there is one [s]."""
        return percentiles(self.gaps)


def serve(
    prepared: Prepared,
    clock: Clock,
    source: Source,
    watch: Callable[[Progress], object] | None = None,
    *,
    account: type[BlockCounts] = BlockManager,
) -> Result:
    """Serve the scenario's workload to its end, one plan per iteration, and call `watch` after each.

    `account` keeps account of the KV blocks: plans that are executed need block tables, others only counts.

    A clock that raises `StoppedError` ends the run early: the result is then that of the iterations made, and says so.
    """
    scenario = prepared.scenario
    workload = scenario.workload
    longest = int((workload.prompt_len + workload.output_len).max())
    blocks = account(scenario.kv_blocks, scenario.memory.kv_block, len(workload), longest)
    queue = scenario.scheduler.open(workload.as_asked, blocks, prepared.token_budget, prepared.layers)
    record = Record(workload, counted=workload.may_end or source is Source.MEASURED)
    clock.begin(blocks)
    step = Step.FIRST
    stopped = False
    try:
        while True:
            if step is Step.MIDDLE and watch is None:
                clock.advance(queue, record)
            batch = _next(queue, clock, record)
            if batch is None:
                break
            if record.all_there and queue.ends_with(batch):
                step |= Step.LAST
            begin = clock.now
            used = blocks.total - blocks.free
            plan = prepared.lowering.plan(batch, step)
            busy = clock.execute(plan, len(record.seconds), step)
            record.add(batch, begin, clock.now, used, busy, clock.expert_bytes(plan))
            ended = record.end(batch, clock.stopped(batch))
            record.finish(queue.complete(batch, ended), clock.now)
            step = Step.FIRST if Step.LAST in step else Step.MIDDLE  # a request may join after the last
            if watch is not None:
                watch(_progress(record, clock.now, blocks.total, queue.preemptions))
    except StoppedError:
        if not record.seconds:
            raise
        stopped = True
    finally:
        queue.close()
        blocks.check()
    if not record.seconds:
        raise StoppedError("every request was cancelled before the first iteration.")
    if not stopped:
        _check_served(scenario, record, blocks)
    return Result(
        source=source,
        schedule=prepared.lowering.schedule.name,
        model=scenario.model.name,
        machine=scenario.machine.name,
        seconds=clock.now,
        generated=record.emitted,
        processed=record.prefilled + record.decoded,
        iterations=len(record.seconds),
        preemptions=queue.preemptions,
        recomputed=queue.recomputed,
        busy=record.busy,
        ttft=record.mean_ttft,
        tbt=record.mean_gap,
        steps=record.steps,
        latencies=record.latencies,
        energy=clock.energy() or _modelled(prepared, record, clock.now),
        timeline=clock.timeline,
        facts=facts(scenario, prepared, record.generated_len[: len(workload)]) | _changed(record),
        stopped=stopped,
    )


def _progress(record: Record, now: float, blocks: int, preemptions: int) -> Progress:
    recent = zip(record.seconds[-_RECENT:], record.decode[-_RECENT:], strict=True)
    return Progress(
        seconds=now,
        iterations=len(record.seconds),
        prefill=record.prefilled,
        decode=record.decoded,
        emitted=record.emitted,
        total=int(record.generated_len.sum()),
        used_blocks=record.used[-1],
        blocks=blocks,
        preemptions=preemptions,
        busy=dict(record.busy),
        waited=record.waited,
        gaps=[taken for taken, decoded in recent if decoded],
    )


def _next(queue: Queue, clock: Clock, record: Record) -> Batch | None:
    """The next batch, after waiting for a request if none is there; None when all have been served."""
    while True:
        called = clock.called()
        if called.joined:
            lengths = np.array([(len(each.request.prompt), each.request.output_len) for each in called.joined])
            queue.add(record.join(called.joined), *lengths.T)
        if called.cancelled:
            queue.cancel(record.cancel(np.array(called.cancelled)))
        if not record.all_there:
            come = record.arrived(clock.now)
            queue.add(come, record.workload.prompt_len[come], record.workload.output_len[come])
        batch = queue.next()
        if batch is not None:
            return batch
        if not record.all_there:
            clock.wait(record.next_arrival)
        elif clock.over():
            return None


def _changed(record: Record) -> dict[str, str]:
    """Notes on requests that joined or were cancelled while others were served; empty if there are none."""
    joined = len(record.last) - len(record.workload)
    counts = {"joined": joined, "cancelled": int(np.count_nonzero(record.cancelled))}
    return {what: f"{count} requests" for what, count in counts.items() if count}


def _modelled(prepared: Prepared, record: Record, seconds: float) -> Energy:
    """Energy of a run by the published model, if all weights but the experts are read once per iteration."""
    scenario = prepared.scenario
    iterations = len(record.seconds)
    kv = record.context * scenario.model.kv_bytes_per_token(scenario.precision.kv)
    read = sum(record.expert_bytes) + kv + iterations * scenario.model.always_bytes
    model, source = published_model()
    flops = 2.0 * scenario.model.active_params * (record.prefilled + record.decoded)
    return Energy(float(model.joules(seconds, read, flops)), source)


def _check_served(scenario: Scenario, record: Record, blocks: BlockCounts) -> None:
    """Refuse a run whose scheduler stopped early or kept blocks: it did not serve everything."""
    open_requests = int(np.count_nonzero(np.isnan(record.last) & ~record.cancelled))
    if open_requests or record.emitted != record.generated_len.sum():
        raise ScenarioError(
            f"{scenario.scheduler} stopped with {open_requests} requests unfinished and {record.emitted} tokens "
            "emitted; its next() must hand out every request until it has emitted output_len tokens, or complete() is "
            "told that it ended."
        )
    if blocks.used:
        raise CapacityError(
            f"{scenario.scheduler} kept {blocks.used} KV blocks after its last batch; its close() must not."
        )
