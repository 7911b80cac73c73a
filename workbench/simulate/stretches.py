"""Stretches: iterations in the middle of a run that the compiled kernel makes one after the other.

It admits, preempts, prices, plays and records as the Python classes do, so that the results are the same bit by bit.
It stops before an iteration that it cannot make: one before which a request arrives, and one that may be the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from workbench.core.latency import Seconds
from workbench.scheduler.base import Queue
from workbench.scheduler.batch import Ids
from workbench.scheduler.block_manager import BlockCounts
from workbench.scheduler.continuous import ContinuousQueue
from workbench.scheduler.paged_queue import PagedQueue, Standing
from workbench.scheduler.resource_aware import ResourceAwareQueue
from workbench.schedules.base import Schedule, Step
from workbench.schedules.plan import LANES
from workbench.serving.iterations import Record, Stretch
from workbench.serving.prepared import Prepared
from workbench.simulate.kernels import fields
from workbench.simulate.laying import Laying
from workbench.stages import Rows

_COUNTS = len(Rows())
_QUEUES = (ResourceAwareQueue, ContinuousQueue)
"""Queues that the kernel knows; a queue derived from them chooses otherwise."""
_MOST = {True: 4096, False: 128}
"""Most iterations of a stretch where tasks are skipped, and where the times of all are kept."""
_FEW = 64
"""Iterations of the first stretch of a simulation that may be stopped."""
_BRIEF = 0.04
"""Seconds of a stretch of a simulation that may be stopped."""


def takes(prepared: Prepared) -> bool:
    """True if the kernel can make the iterations of a scenario and schedule: whole prompts, and parts of equal load."""
    scenario = prepared.scenario
    even = type(prepared.lowering.schedule).split is Schedule.split
    alone = scenario.machine.cores is None and prepared.cost.profile is None
    return even and alone and prepared.cost.plain and not scenario.workload.may_end


class Stretches:
    """Makes stretches of one run; `briefly` at first few iterations, and no more than take about `_BRIEF` seconds."""

    def __init__(self, laying: Laying, prepared: Prepared, *, skip: bool, briefly: bool = False) -> None:
        self._laying = laying
        self.tasks = prepared.lowering.tasks(Step.MIDDLE)
        self._parts = prepared.lowering.schedule.parts
        self._cost = prepared.cost
        self._skip = skip
        self._most = _MOST[skip]
        self._limit = min(_FEW, self._most) if briefly else self._most
        self._whole = np.empty((self._most, 5), dtype=np.int64)
        self._real = np.empty((self._most, 4))
        self._begun = np.empty((4 * len(prepared.scenario.workload), 3), dtype=np.int64)
        rows = 1 if skip else self._most
        self.starts = np.zeros((rows, len(self.tasks)))
        self.ends = np.zeros((rows, len(self.tasks)))
        self.before = np.zeros((rows, len(self.tasks)), dtype=np.int64)

    def run(self, queue: Queue, record: Record, now: float, carried: float) -> tuple[Stretch, float] | None:
        """Make a stretch and record it; it, and the seconds that a transfer is carried on. None if there is none."""
        if not isinstance(queue, ResourceAwareQueue | ContinuousQueue) or type(queue) not in _QUEUES:
            return None
        if type(queue.blocks) is not BlockCounts:  # a block table, which the kernel does not keep
            return None
        arrival = math.inf if record.all_there else record.next_arrival
        if arrival <= now or not self._laying.prices_all(self.tasks):
            return None
        state = queue.standing()
        requests = len(state.columns[0])
        running = _longer(state.running, requests)
        preempted = _longer(state.preempted, requests)
        counts = self._counts(queue, state, len(record.seconds))
        reals = self._reals(queue)
        reals[fields.NOW] = now
        reals[fields.CARRIED] = carried
        reals[fields.NEXT_ARRIVAL] = arrival
        reals[fields.CONTEXT] = record.context
        tokens = (record.tokens.first, record.tokens.latest, self._begun)
        busy = np.array([record.busy[lane] for lane in LANES])
        begun = perf_counter()
        self._laying.advance(
            self.tasks,
            self._parts,
            self._read,
            (state.columns, (running, preempted, state.new.copy()), counts, reals, tokens, record.last),
            (self._whole, self._real, busy, self.starts, self.ends, self.before),
        )
        if perf_counter() - begun < _BRIEF / 2:
            self._limit = min(2 * self._limit, self._most)
        if not counts[fields.DONE]:
            return None
        queue.resume(self._after(state, counts, running, preempted))
        if isinstance(queue, ResourceAwareQueue):
            queue.due = float(reals[fields.DUE])
        stretch = self._stretch(counts, busy, float(reals[fields.CONTEXT]))
        record.extend(stretch)
        return stretch, float(reals[fields.CARRIED])

    def _counts(self, queue: PagedQueue, state: Standing, number: int) -> Ids:
        """Counts that the kernel takes, before the iteration of this number."""
        counts = np.zeros(fields.COUNTS, dtype=np.int64)
        counts[fields.RUNNING] = len(state.running)
        counts[fields.PREEMPTED] = len(state.preempted)
        counts[fields.NEW] = len(state.new)
        counts[fields.DECODED] = state.decoded
        counts[fields.FREE] = state.free
        counts[fields.PREEMPTIONS] = state.preemptions
        counts[fields.RECOMPUTED] = state.recomputed
        counts[fields.FINISHED] = state.finished
        counts[fields.NUMBER] = number
        counts[fields.LIMIT] = self._limit
        counts[fields.LATEST] = -1
        counts[fields.BLOCK] = queue.blocks.block_size
        counts[fields.TOTAL] = queue.blocks.total
        counts[fields.PREFILLS_FIRST] = isinstance(queue, ContinuousQueue)
        requests = len(state.columns[0])
        counts[fields.MOST_RUNNING] = requests if queue.max_running is None else queue.max_running
        return counts

    def _reals(self, queue: ResourceAwareQueue | ContinuousQueue) -> Seconds:
        """Other numbers that the kernel takes, with those of a queue."""
        reals: Seconds = np.zeros(fields.REALS)
        reals[fields.BUDGET] = queue.budget
        if isinstance(queue, ResourceAwareQueue):
            reals[fields.DUE] = queue.due
            reals[fields.PACE] = queue.pace
            reals[fields.SHORTEST] = queue.shortest
        return reals

    def _after(self, state: Standing, counts: Ids, running: Ids, preempted: Ids) -> Standing:
        """The state of a queue after a stretch."""
        waiting = (counts[fields.FRONT] + np.arange(counts[fields.PREEMPTED])) % len(preempted)
        first = int(counts[fields.FIRST_NEW])
        base = int(counts[fields.BASE])
        return Standing(
            columns=state.columns,
            running=running[base : base + int(counts[fields.RUNNING])],
            preempted=preempted[waiting],
            new=state.new[first : first + int(counts[fields.NEW])],
            decoded=int(counts[fields.DECODED]),
            free=int(counts[fields.FREE]),
            preemptions=int(counts[fields.PREEMPTIONS]),
            recomputed=int(counts[fields.RECOMPUTED]),
            finished=int(counts[fields.FINISHED]),
        )

    def _stretch(self, counts: Ids, busy: Seconds, context: float) -> Stretch:
        """The stretch that the kernel has written."""
        done = int(counts[fields.DONE])
        prefill, decode, used, emits, on_time = self._whole[:done].T
        begin, end, taken, expert_bytes = self._real[:done].T
        request, iteration, before = self._begun[: int(counts[fields.BEGUN])].T.copy()
        return Stretch(
            begin=begin,
            end=end,
            taken=taken,
            prefill=prefill,
            decode=decode,
            used=used,
            emits=emits,
            on_time=on_time,
            expert_bytes=expert_bytes,
            begun=(request, iteration, before),
            busy=busy,
            context=context,
        )

    def _read(self, counts: Sequence[Any]) -> Sequence[Any]:
        """Bytes of experts that an iteration reads whose parts have these counts of rows, one part after the other."""
        parts = [(counts[first], counts[first + 1], None) for first in range(0, len(counts), _COUNTS)]
        return (self._cost.experts_read(parts), 0.0, 0.0)


def _longer(requests: Ids, room: int) -> Ids:
    """These requests, with room for so many in all behind them."""
    found = np.zeros(room, dtype=np.int64)
    found[: len(requests)] = requests
    return found
