"""Lanes, one thread each. A plan's task goes to its lane when the last task that it waits for has ended."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice

import torch

from workbench.core.errors import StoppedError
from workbench.engine.devices.driver import Driver, Event, Stream
from workbench.engine.devices.host import HostDriver
from workbench.engine.lanes.affinity import Affinity, end_sleeps_on_time, name_thread, pin
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.process import give_back, take
from workbench.engine.lanes.transfer import Transfer
from workbench.schedules.plan import Carry, Task

_IN_FLIGHT = 2
"""Packets that the link is given ahead, so that it does not wait for the host."""
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
    """Runs its jobs one at a time in issue order; a next job that is not ready blocks the others."""

    def __init__(self, name: str, executor: Executor) -> None:
        super().__init__(name=f"lane-{name}", daemon=True)
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.small: deque[Job] = deque()
        self.bulk: deque[Job] = deque()
        self.affinity = self._pinned = Affinity(1, ())
        self.since = float("nan")
        self.worked = 0.0
        self.stream = executor.driver.stream(name)
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
        if job.action is not None:
            try:
                with self.stream.issuing():
                    job.action()
            finally:
                self.stream.finish()


class _Moving:
    """A transfer under way: its copies are issued packet by packet, `_IN_FLIGHT` ahead of what has landed.

    Its first packet may be issued early, by `begin`, before it has its turn.
    """

    def __init__(self, transfer: Transfer, packet: int, stream: Stream) -> None:
        self.transfer = transfer
        self._stream = stream
        self._flying = deque[Event]()
        self._early = deque[int]()
        self._rest = self._issue(packet)

    def _issue(self, packet: int) -> Iterator[int]:
        """Issue the copies, and yield the bytes of each packet."""
        size = 0
        for copy in self.transfer.copies:
            for moved in copy.pieces(packet, self._stream):
                size += moved
                if size >= packet:
                    yield self._fly(size)
                    size = 0
        if size:
            yield self._fly(size)

    def _fly(self, size: int) -> int:
        self._flying.append(self._stream.record())
        return size

    def begin(self) -> None:
        """Issue the first packet."""
        self._early.extend(islice(self._rest, 1))

    def packets(self) -> Iterator[int]:
        """The bytes of every packet; one that was not issued early is issued then."""
        for size in chain(self._early, self._rest):
            if len(self._flying) > _IN_FLIGHT:
                self._flying.popleft().wait()
            yield size

    def land(self, left: int = 0) -> None:
        """Wait until everything has arrived but so many packets."""
        while len(self._flying) > left:
            self._flying.popleft().wait()


class Mover(Lane):
    """A link direction: copies in packets, at no more than `rate` B/s if throttled; small jobs pass between packets.

    The link to a card goes on from one bulk transfer to the next that is ready: its first packet is issued while the
    last one of the other lands. What was begun and had no turn, since the plan was drained, is let go at the end.
    """

    def __init__(self, name: str, executor: Executor, rate: float, *, throttled: bool, packet_seconds: float) -> None:
        super().__init__(name, executor)
        self._urgent = executor.driver.stream(f"{name} urgent")
        self._goes_on = not (throttled or executor.driver.on_host)
        self._begun: tuple[Job, _Moving] | None = None
        self._rate = rate
        self._throttled = throttled
        # After a late wake-up up to two packets are sent at once to catch up; after idleness none are.
        self._packet = int(min(max(rate * packet_seconds, 1 << 16), 1 << 26))
        self._burst = 2 * self._packet / rate
        self._free_at = 0.0

    def run(self) -> None:
        """See `Lane.run`."""
        end_sleeps_on_time()
        super().run()
        if self._begun is not None:
            self._begun = None
            with suppress(RuntimeError):  # a card that was lost has been told of by then
                self.stream.finish()

    def work(self, job: Job) -> None:
        """Make the copies in packets."""
        if job.action is None:
            return
        whole = False
        try:
            moving = self._begun_or_new(job)
            whole = moving is not None and self._move(job, moving)
        finally:
            if not whole:
                self._stream_of(job).finish()
        if moving is not None and whole and moving.transfer.arrived:
            moving.transfer.arrived()

    def _begun_or_new(self, job: Job) -> _Moving | None:
        if self._begun is None or self._begun[0] is not job:
            return self._start(job)
        _, moving = self._begun
        self._begun = None
        return moving

    def _start(self, job: Job) -> _Moving | None:
        """Work out the transfer of a job; None if it has none."""
        stream = self._stream_of(job)
        with stream.issuing():
            transfer = None if job.action is None else job.action()
        return _Moving(transfer, self._packet, stream) if isinstance(transfer, Transfer) else None

    def _stream_of(self, job: Job) -> Stream:
        return self.stream if job.task.bulk else self._urgent

    def _begin_next(self) -> None:
        """Begin the next bulk transfer, if it is ready, behind the one that is landing."""
        self._look()
        if self.bulk and self.bulk[0] in self._ready and not self._executor.control.stopped:
            moving = self._start(self.bulk[0])
            if moving is not None:
                moving.begin()
                self._begun = self.bulk[0], moving

    def _move(self, job: Job, moving: _Moving) -> bool:
        """Make all copies; False if the plan is being drained."""
        job.bytes = moving.transfer.bytes
        self._free_at = max(self._free_at, time.perf_counter())
        if not all(self._packet_ended(job, size) for size in moving.packets()):
            return False
        if self._goes_on and job.task.bulk:
            moving.land(left=1)
            self._begin_next()
        moving.land()
        return True

    def _packet_ended(self, job: Job, size: int) -> bool:
        """Wait until the link would have moved the packet, and let others pass; False if the plan is being drained."""
        self._pace(size)
        if job.task.bulk:
            self._let_small_pass(job)
        self._executor.control.gate.wait()
        return not self._executor.control.stopped

    def _let_small_pass(self, job: Job) -> None:
        self._look()
        while not self._executor.control.stopped and (small := self._first(self.small)) is not None:
            self._perform(small)
            job.pauses.append((small.start, small.end))

    def _pace(self, size: int) -> None:
        if self._throttled:
            now = time.perf_counter()
            self._free_at = max(self._free_at + size / self._rate, now - self._burst)
            self._executor.control.sleep(self._free_at - now)


class Executor:
    """Four lanes that execute one plan after the other.

    Parameters
    ----------
    h2d, d2h : float
        Link rates [B/s].
    throttled : bool
        Pace the copies to these rates.
    packet_seconds : float
        Length of a packet in link time [s].
    control : Control, optional
        Control of the run; a new one if not given.
    driver : Driver, optional
        The device of the gpu lane; the host if not given. Every task is waited for before the next begins on its lane;
        only a bulk transfer to a card begins while the last one lands.
    """

    def __init__(
        self,
        h2d: float,
        d2h: float,
        *,
        throttled: bool,
        packet_seconds: float,
        control: Control | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.control = control or Control()
        self.driver = driver or HostDriver()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._open = 0
        self._carried: Job | None = None
        self.lanes: dict[str, Lane] = {
            "gpu": Lane("gpu", self),
            "cpu": Lane("cpu", self),
            "d2h": Mover("d2h", self, d2h, throttled=throttled, packet_seconds=packet_seconds),
            "h2d": Mover("h2d", self, h2d, throttled=throttled, packet_seconds=packet_seconds),
        }
        take()
        try:
            for lane in self.lanes.values():
                lane.start()
        except BaseException:  # no thread can start while Python ends
            self.close()
            raise

    def pin(self, affinities: Mapping[str, Affinity]) -> None:
        """Give every lane its threads and cores, from its next task on."""
        for name, affinity in affinities.items():
            self.lanes[name].affinity = affinity

    def run(self, tasks: Sequence[Task], actions: Sequence[Action | None]) -> list[Job]:
        """Execute a plan and wait for its end, but not for the end of a transfer that runs on.

        Tasks that have nothing to do have no action.

        Returns
        -------
        list of Job
            One job for each task; for the rest of a carried transfer, the job that the plan before began.

        Raises
        ------
        StoppedError
            If the run was stopped; the rest of the plan was drained.
        BaseException
            The error of the first task in the plan that failed, after the rest of the plan was drained.
        """
        self._check_carried()
        self.control.renew()
        jobs, fresh = self._jobs(tasks, actions)
        for job in fresh:
            lane = self.lanes[job.task.node.lane]
            if job.action is not None:
                (lane.bulk if job.task.bulk else lane.small).append(job)
        for job in [job for job in fresh if not job.missing]:  # collected first: lanes start at once
            if job.action is None:
                self.finished(job)
            else:
                self.lanes[job.task.node.lane].inbox.put(job)
        self._wait()
        for job in jobs:
            if job.error is not None and not isinstance(job.error, StoppedError):  # that follows another job's error
                raise job.error
        self.check()
        return jobs

    def check(self) -> None:
        """Raise if the run was stopped or the carried transfer failed; called while no plan is at work.

        Raises
        ------
        StoppedError
            If the run was stopped.
        BaseException
            The error of the transfer that runs on, if it failed.
        """
        self._check_carried()
        self.control.check()

    def _check_carried(self) -> None:
        carried = self._carried
        if carried is not None and carried.error is not None:
            raise carried.error

    def _jobs(self, tasks: Sequence[Task], actions: Sequence[Action | None]) -> tuple[list[Job], list[Job]]:
        """A job for each task, and the jobs that no lane has yet: all but the one that was carried over.

        A job without an action keeps its turn: it waits for the job before it on its lane, and the next waits for it.
        """
        jobs: list[Job] = []
        before: dict[str, Job] = {}
        with self._lock:  # the carried transfer may end at any moment
            for task, action in zip(tasks, actions, strict=True):
                if task.carry is Carry.IN and self._carried is not None:
                    jobs.append(self._carried)
                    self._carried.awaited = True
                else:
                    jobs.append(Job(task, action, awaited=task.carry is not Carry.OUT))
                job = jobs[-1]
                awaited = [jobs[index] for index in task.after]
                if not task.bulk:
                    in_turn = before.get(task.node.lane)
                    before[task.node.lane] = job
                    if in_turn is not None and (job.action is None or in_turn.action is None):
                        awaited.append(in_turn)
                for earlier in awaited:
                    if not earlier.done:
                        earlier.followers.append(job)
                        job.missing += 1
            fresh = [job for job in jobs if job is not self._carried]
            self._carried = next((job for job in fresh if not job.awaited), None)
            self._open = sum(job.awaited and not job.done for job in jobs)
            self._idle.clear()
        return jobs, fresh

    def _wait(self) -> None:
        """Wait for the plan's end; an interrupt drains it first, so that every lane is idle afterwards."""
        try:
            self._idle.wait()
        except BaseException:
            self.control.drain()
            self._idle.wait()
            raise

    def busy(self) -> dict[str, float]:
        """Seconds that each lane has worked since the start, tasks under way included."""
        now = time.perf_counter()
        return {
            name: lane.worked + (0.0 if math.isnan(since := lane.since) else now - since)
            for name, lane in self.lanes.items()
        }

    def finished(self, job: Job) -> None:
        """Dispatch every follower of a job that now waits for nothing to its lane; lanes call this.

        Followers without an action are finished with it.
        """
        now = time.perf_counter()
        finished = [job]
        ready: list[Job] = []
        with self._lock:
            for one in finished:  # grows
                if one.action is None:
                    one.start = one.end = now
                one.done = True
                self._open -= one.awaited
                for follower in one.followers:
                    follower.missing -= 1
                    if not follower.missing:
                        (finished if follower.action is None else ready).append(follower)
            last = not self._open and any(one.awaited for one in finished)
        for follower in ready:
            self.lanes[follower.task.node.lane].inbox.put(follower)
        if last:
            self._idle.set()

    def close(self) -> None:
        """End every thread, and a transfer that runs on with them."""
        self.control.stop()
        begun = [lane for lane in self.lanes.values() if lane.is_alive()]
        try:
            for lane in begun:
                lane.inbox.put(None)
            for lane in begun:
                lane.join()
        finally:
            self._carried = None  # it would keep alive the tensors that it copies, gigabytes of them
            give_back()
