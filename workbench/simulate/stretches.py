"""Stretches: iterations in the middle of a run that the compiled kernel makes one after the other.

It admits, preempts, prices, plays and records as the Python classes do, so that the results are the same bit by bit.
It stops before an iteration that it cannot make: one before which a request arrives, and one that may be the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from workbench.scheduler.base import Queue
from workbench.scheduler.batch import Ids
from workbench.scheduler.continuous import ContinuousQueue
from workbench.scheduler.paged_queue import Standing
from workbench.scheduler.resource_aware import ResourceAwareQueue
from workbench.schedules.base import Schedule, Step
from workbench.schedules.plan import LANES
from workbench.serving.iterations import Record, Stretch
from workbench.serving.prepared import Prepared
from workbench.simulate.laying import Laying
from workbench.stages import Rows

_COUNTS = len(Rows())
_MOST = {True: 4096, False: 128}
"""Most iterations of a stretch where tasks are skipped, and where the times of all are kept."""


def takes(prepared: Prepared) -> bool:
    """True if the kernel can make the iterations of a scenario and schedule: whole prompts, and parts of equal load."""
    scenario = prepared.scenario
    even = type(prepared.lowering.schedule).split is Schedule.split
    alone = scenario.machine.cores is None and prepared.cost.profile is None
    return even and alone and prepared.cost.plain and not scenario.workload.may_end


class Stretches:
    """Makes stretches of one run."""

    def __init__(self, compiled: ModuleType, laying: Laying, prepared: Prepared, *, skip: bool) -> None:
        self._compiled = compiled
        self._laying = laying
        self.tasks = prepared.lowering.tasks(Step.MIDDLE)
        self._parts = prepared.lowering.schedule.parts
        self._cost = prepared.cost
        self._skip = skip
        self._most = _MOST[skip]
        rows = 1 if skip else self._most
        self.starts = np.zeros((rows, len(self.tasks)))
        self.ends = np.zeros((rows, len(self.tasks)))
        self.before = np.zeros((rows, len(self.tasks)), dtype=np.int64)

    def run(self, queue: Queue, record: Record, now: float, carried: float) -> tuple[Stretch, float] | None:
        """Make a stretch and record it; it, and the seconds that a transfer is carried on. None if there is none."""
        if not isinstance(queue, ResourceAwareQueue | ContinuousQueue) or not self._laying.prices_all(self.tasks):
            return None
        kernel = self._compiled
        state = queue.standing()
        requests = len(state.columns[0])
        running = _longer(state.running, requests)
        preempted = _longer(state.preempted, requests)
        counts = np.zeros(kernel.COUNTS, dtype=np.int64)
        counts[kernel.RUNNING] = len(state.running)
        counts[kernel.PREEMPTED] = len(state.preempted)
        counts[kernel.NEW] = len(state.new)
        counts[kernel.DECODED] = state.decoded
        counts[kernel.FREE] = state.free
        counts[kernel.PREEMPTIONS] = state.preemptions
        counts[kernel.RECOMPUTED] = state.recomputed
        counts[kernel.FINISHED] = state.finished
        counts[kernel.NUMBER] = len(record.seconds)
        counts[kernel.LIMIT] = self._most
        counts[kernel.BLOCK] = queue.blocks.block_size
        counts[kernel.TOTAL] = queue.blocks.total
        counts[kernel.PREFILLS_FIRST] = isinstance(queue, ContinuousQueue)
        reals = np.zeros(kernel.REALS)
        reals[kernel.NOW] = now
        reals[kernel.CARRIED] = carried
        reals[kernel.BUDGET] = queue.budget
        reals[kernel.NEXT_ARRIVAL] = math.inf if record.all_there else record.next_arrival
        reals[kernel.CONTEXT] = record.context
        if isinstance(queue, ResourceAwareQueue):
            reals[kernel.DUE] = queue.due
            reals[kernel.PACE] = queue.pace
            reals[kernel.SHORTEST] = queue.shortest
        whole = np.empty((self._most, 5), dtype=np.int64)
        real = np.empty((self._most, 4))
        begun = np.empty((4 * requests, 3), dtype=np.int64)
        busy = np.array([record.busy[lane] for lane in LANES])
        self._laying.advance(
            self.tasks,
            self._parts,
            self._read,
            (
                state.columns,
                (running, preempted, np.ascontiguousarray(state.new)),
                counts,
                reals,
                (record.tokens.first, record.tokens.latest, begun),
                record.last,
            ),
            (whole, real, busy, self.starts, self.ends, self.before),
        )
        done = int(counts[kernel.DONE])
        if not done:
            return None
        order = (counts[kernel.FRONT] + np.arange(counts[kernel.PREEMPTED])) % max(1, len(preempted))
        first = int(counts[kernel.FIRST_NEW])
        told = Standing(
            state.columns,
            running[: int(counts[kernel.RUNNING])],
            preempted[order],
            state.new[first : first + int(counts[kernel.NEW])],
            *(int(counts[each]) for each in (kernel.DECODED, kernel.FREE, kernel.PREEMPTIONS)),
            *(int(counts[each]) for each in (kernel.RECOMPUTED, kernel.FINISHED)),
        )
        queue.resume(told)
        if isinstance(queue, ResourceAwareQueue):
            queue.due = float(reals[kernel.DUE])
        prefill, decode, used, emits, on_time = whole[:done].T
        begin, end, taken, expert_bytes = real[:done].T
        runs = begun[: int(counts[kernel.BEGUN])].T
        stretch = Stretch(
            begin,
            end,
            taken,
            prefill,
            decode,
            used,
            emits,
            on_time,
            expert_bytes,
            (runs[0], runs[1], runs[2]),
            busy,
            float(reals[kernel.CONTEXT]),
        )
        record.extend(stretch)
        return stretch, float(reals[kernel.CARRIED])

    def _read(self, counts: Sequence[Any]) -> Sequence[Any]:
        """Bytes of experts that an iteration reads whose parts have these counts of rows, one part after the other."""
        parts = [(counts[first], counts[first + 1], None) for first in range(0, len(counts), _COUNTS)]
        return (self._cost.experts_read(parts), 0.0, 0.0)


def _longer(requests: Ids, room: int) -> Ids:
    """These requests, with room for so many in all behind them."""
    found = np.zeros(room, dtype=np.int64)
    found[: len(requests)] = requests
    return found
