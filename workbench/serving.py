"""The one serving loop. The virtual clock of `simulate` and the wall clock of `run` both turn it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workbench.capacity import ledger
from workbench.errors import CapacityError, ScenarioError, StoppedError
from workbench.plan import LANES, Plan
from workbench.prepared import Prepared, facts, price
from workbench.result import Iterations, Result, Source
from workbench.scenario import Scenario
from workbench.scheduler.batch import Batch
from workbench.scheduler.block_manager import BlockManager
from workbench.schedules.base import Schedule, Step
from workbench.timeline import Timeline


class Clock(Protocol):
    """What makes time pass: it executes plans, virtually or for real."""

    timeline: Timeline

    @property
    def now(self) -> float:
        """Seconds since `begin`."""

    def begin(self, blocks: BlockManager) -> None:
        """Called once before the first plan, with the KV blocks that plans refer to."""

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """Run one iteration and move `now` to its end; busy seconds per lane."""


@dataclass(frozen=True)
class Progress:
    """How far a workload has been served.

    Attributes
    ----------
    seconds : float
        Time since the start [s].
    iterations : int
    prefill, decode : int
        Tokens of each class pushed through the model.
    emitted, total : int
        Output tokens generated, and to generate in all.
    used_blocks, blocks : int
        KV blocks in use during the last iteration, and in all.
    preemptions : int
    busy : mapping of lane to float
        Busy time per lane [s].
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


def prepare(scenario: Scenario, schedule: Schedule) -> Prepared:
    """Lower and price, and check everything that can be known before any work: the same for every reader.

    Raises
    ------
    ScheduleError
        If the schedule needs another shape of pipeline.
    CapacityError
        If it does not fit the GPU's or the host's memory, by the ledger of `Scenario.fits`.
    """
    prepared = price(scenario, schedule)
    found = ledger(prepared)
    if not found:
        raise CapacityError(found.verdict)
    return prepared


@dataclass
class _Record:
    """Grows with the iterations of one served workload."""

    first: npt.NDArray[np.float64]
    last: npt.NDArray[np.float64]
    seconds: list[float] = field(default_factory=list)
    prefill: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    emitted: int = 0

    def add(self, batch: Batch, begin: float, end: float, used: int, busy: dict[str, float]) -> None:
        rows = batch.rows
        self.seconds.append(end - begin)
        self.prefill.append(int(rows.prefill))
        self.decode.append(int(rows.decode))
        self.used.append(used)
        self.emitted += int(rows.emits)
        for lane in busy:
            self.busy[lane] += busy[lane]
        fresh = batch.prefills[np.isnan(self.first[batch.prefills])]
        self.first[fresh] = end

    def progress(self, now: float, total: int, blocks: int, preemptions: int) -> Progress:
        return Progress(
            seconds=now,
            iterations=len(self.seconds),
            prefill=sum(self.prefill),
            decode=sum(self.decode),
            emitted=self.emitted,
            total=total,
            used_blocks=self.used[-1],
            blocks=blocks,
            preemptions=preemptions,
            busy=dict(self.busy),
        )


def serve(
    prepared: Prepared, clock: Clock, source: Source, watch: Callable[[Progress], object] | None = None
) -> Result:
    """Serve the scenario's workload to its end, one plan per iteration; `watch` is told after each.

    A clock that raises `StoppedError` ends it early: the result then is that of the iterations made, and says so.
    """
    scenario = prepared.scenario
    workload = scenario.workload
    longest = int((workload.prompt_len + workload.output_len).max())
    blocks = BlockManager(scenario.kv_blocks, scenario.memory.kv_block, len(workload), longest)
    queue = scenario.scheduler.open(workload, blocks, prepared.token_budget, prepared.layers)
    unset = np.full(len(workload), np.nan)
    record = _Record(unset, unset.copy())
    clock.begin(blocks)
    step, stopped = Step.FIRST, False
    try:
        while (batch := queue.next()) is not None:
            if queue.ends_with(batch):
                step |= Step.LAST
            begin, used = clock.now, blocks.total - blocks.free
            busy = clock.execute(prepared.lowering.plan(batch, step), len(record.seconds), step)
            record.last[queue.complete(batch)] = clock.now
            record.add(batch, begin, clock.now, used, busy)
            step = Step.MIDDLE
            if watch is not None:
                watch(record.progress(clock.now, int(workload.output_len.sum()), blocks.total, queue.preemptions))
    except StoppedError:
        if not record.seconds:
            raise
        stopped = True
    finally:
        queue.close()
        blocks.check()
    if not stopped:
        _check_served(scenario, record, blocks)
    return Result(
        source=source,
        schedule=prepared.lowering.schedule.name,
        model=scenario.model.name,
        machine=scenario.machine.name,
        seconds=clock.now,
        generated=record.emitted,
        processed=sum(record.prefill) + sum(record.decode),
        iterations=len(record.seconds),
        preemptions=queue.preemptions,
        recomputed=queue.recomputed,
        busy=record.busy,
        ttft=float(np.nanmean(record.first)),
        tbt=_mean_gap(record, workload.output_len),
        steps=Iterations(tuple(record.seconds), tuple(record.prefill), tuple(record.decode), tuple(record.used)),
        timeline=clock.timeline,
        facts=facts(scenario, prepared),
        stopped=stopped,
    )


def _check_served(scenario: Scenario, record: _Record, blocks: BlockManager) -> None:
    """A scheduler that stops early or keeps blocks must not pass for one that served everything."""
    open_requests = int(np.isnan(record.last).sum())
    if open_requests or record.emitted != scenario.workload.output_len.sum():
        raise ScenarioError(
            f"{scenario.scheduler} stopped with {open_requests} requests unfinished and {record.emitted} tokens "
            "emitted; its next() must hand out every request until it has emitted output_len tokens."
        )
    if blocks.used:
        raise CapacityError(
            f"{scenario.scheduler} kept {blocks.used} KV blocks after its last batch; its close() must not."
        )


def _mean_gap(record: _Record, output_len: npt.NDArray[np.int64]) -> float:
    several = (output_len > 1) & ~np.isnan(record.last)
    gaps = (record.last[several] - record.first[several]) / (output_len[several] - 1)
    return float(gaps.mean()) if several.any() else float("nan")
