"""A lane: a thread that does its jobs one at a time, in the order of the plan."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from workbench.engine.devices.driver import Stream
from workbench.engine.lanes.affinity import Affinity, name_thread, pin
from workbench.schedules.plan import Task

if TYPE_CHECKING:
    from workbench.engine.lanes.executor import Executor

Action = Callable[[], object]
"""The work of a task."""


@dataclass(eq=False)
class Job:
    """A task of the running plan, its action and its times. Times are readings of `time.perf_counter`.

    On a link lane the action returns the `Transfer` to make. A job without an action ends when its turn on the lane
    comes, and waits for no packet. `pauses` are the times in which a bulk transfer let small ones pass. A plan does not
    end before its `awaited` jobs are done.
    """

    task: Task
    action: Action | None
    awaited: bool
    missing: int = 0
    done: bool = False
    followers: list[Job] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    cpu: float = 0.0
    bytes: int = 0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Times in which the job was at work, pauses left out."""
        edges = [self.start, *(edge for pause in self.pauses for edge in pause), self.end]
        return list(zip(edges[::2], edges[1::2], strict=True))


class Lane(threading.Thread):
    """Runs its jobs one at a time in issue order; a next job that is not ready blocks the others.

    What a job does on the card is issued to `stream`, by default to the lane's own one.
    """

    def __init__(self, name: str, executor: Executor, stream: Stream | None = None) -> None:
        super().__init__(name=f"lane-{name}", daemon=True)
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.small: deque[Job] = deque()
        self.bulk: deque[Job] = deque()
        self.affinity = self._pinned = Affinity(1, ())
        self.since = float("nan")
        self.worked = 0.0
        self.stream = stream or executor.driver.stream(name)
        self._ready: set[Job] = set()
        self._executor = executor

    def run(self) -> None:
        """Serve the inbox until None arrives."""
        name_thread(self.name.removeprefix("lane-"))
        torch.get_num_threads()  # the first use copies the process-wide value; later, it would undo the next line
        torch.set_num_threads(self._pinned.threads)
        torch.set_grad_enabled(False)
        while (job := self.inbox.get()) is not None:
            self._ready.add(job)
            while (first := self._first(self.small, self.bulk)) is not None:
                self._perform(first)
                self._look()

    def _look(self) -> None:
        """Take in the jobs that have become ready meanwhile."""
        while not self.inbox.empty():
            job = self.inbox.get()
            if job is None:
                self.inbox.put(None)
                return
            self._ready.add(job)

    def _first(self, *lines: deque[Job]) -> Job | None:
        """Take the first job of the first of these lines whose first job is ready."""
        for line in lines:
            if line and line[0] in self._ready:
                self._ready.discard(line[0])
                return line.popleft()
        return None

    def _take_affinity(self) -> None:
        """Take the affinity that the plan gives this lane."""
        if self._pinned != self.affinity:
            pin(self.affinity)
            self._pinned = self.affinity

    def _perform(self, job: Job) -> None:
        self._executor.control.gate.wait()
        self.since = job.start = time.perf_counter()
        cpu = time.thread_time()
        try:
            if not self._executor.control.stopped:  # if it is, the rest of the plan is drained and not run
                self._take_affinity()
                self.work(job)
        except BaseException as error:
            job.error = error
            self._executor.control.drain()
        job.end = time.perf_counter()
        job.cpu = time.thread_time() - cpu
        self.since = float("nan")
        self.worked = self.worked + job.end - job.start
        self._executor.finished(job)

    def work(self, job: Job) -> None:
        """Do the job's action."""
        try:
            with self.stream.issuing():
                self.act(job)
        finally:
            self.stream.finish()

    def act(self, job: Job) -> None:
        """Do the job's action, or issue it to a card."""
        if job.action is not None:
            job.action()
