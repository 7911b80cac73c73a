"""The gpu lane of a card: the next job is issued while the card is at work on the one before."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from workbench.core.errors import StoppedError
from workbench.engine.devices.driver import Event
from workbench.engine.lanes.lane import Job, Lane

if TYPE_CHECKING:
    from workbench.engine.lanes.executor import Executor

AHEAD = 2
"""Jobs that may be issued and not yet over: one at work and the next. With 1 each is waited for."""


class _Issued(NamedTuple):
    """A job whose work the card has been given between two events, and what must be held until it is over.

    A job that is drained has no events.
    """

    job: Job
    begin: Event | None
    end: Event | None
    held: list[object]


class AheadLane(Lane):
    """A lane that goes on to its next job once the work of one is issued; another thread waits for the end of each.

    A job is ready when those jobs of its lane that it waits for are issued, for a stream keeps their order, and those
    of other lanes are over. Jobs of other lanes wait until it is over.
    """

    def __init__(self, name: str, executor: Executor) -> None:
        super().__init__(name, executor)
        self._room = threading.Semaphore(AHEAD)
        self._issued: queue.SimpleQueue[_Issued | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait_for_each, name=f"{self.name}-ends", daemon=True)
        self._last_end = 0.0
        self._issuing = False

    def start(self) -> None:
        """See `Thread.start`; the thread that waits begins first, so that a lane never runs without it."""
        self._waiter.start()
        try:
            super().start()
        except BaseException:
            self._issued.put(None)
            raise

    def run(self) -> None:
        """See `Lane.run`."""
        try:
            super().run()
        finally:
            self._issued.put(None)
            self._waiter.join()

    def _perform(self, job: Job) -> None:
        self._room.acquire()
        self._executor.control.gate.wait()
        self._issuing = True
        job.start = time.perf_counter()
        self.since = job.start if math.isnan(self.since) else self.since
        cpu = time.thread_time()
        begin = end = None
        try:
            if not self._executor.control.stopped:
                self._take_affinity()
                with self.stream.issuing():
                    begin = self.stream.record()
                    self.act(job)
        except BaseException as error:
            self._fail(job, error)
        try:
            end = self.stream.record() if begin is not None else None
        except BaseException as error:
            self._fail(job, error)
        job.cpu = time.thread_time() - cpu
        self._executor.issued(job)
        self._issued.put(_Issued(job, begin, end, self.stream.release()))
        self._issuing = False

    def _wait_for_each(self) -> None:
        while (issued := self._issued.get()) is not None:
            self._wait_for(issued)
            del issued  # it would keep the job's tensors until the next one comes

    def _wait_for(self, issued: _Issued) -> None:
        job, begin, end, held = issued
        job.start = max(job.start, self._last_end)
        try:
            if begin is not None and end is not None:
                end.wait()
                job.start = max(job.start, time.perf_counter() - end.seconds_since(begin))
        except BaseException as error:
            self._fail(job, error)
        held.clear()
        job.end = self._last_end = time.perf_counter()
        self.since = job.end if self._issuing or not self._issued.empty() else float("nan")
        self.worked = self.worked + job.end - job.start
        self._room.release()
        self._executor.finished(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        if job.error is None or isinstance(job.error, StoppedError):
            job.error = error
        self._executor.control.drain()
