"""Executes plans on four lanes. A task goes to its lane when the last task that it waits for has ended.

On a card's gpu lane it goes there when those tasks of the lane have been issued, and those of other lanes have ended.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence

from workbench.core.errors import StoppedError
from workbench.engine.devices.driver import Driver
from workbench.engine.devices.host import HostDriver, HostStream
from workbench.engine.lanes.affinity import Affinity
from workbench.engine.lanes.ahead import AheadLane
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.lane import Action, Job, Lane
from workbench.engine.lanes.mover import Mover
from workbench.engine.lanes.process import give_back, take
from workbench.schedules.plan import COMPUTE, Carry, Task


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
        The device of the gpu lane; the host if not given. A card's gpu lane issues its next task while the card is at
        work on one, and a bulk transfer to a card begins while the last one lands.
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
        self._running: list[Job] = []
        self.lanes: dict[str, Lane] = {
            "gpu": Lane("gpu", self) if self.driver.on_host else AheadLane("gpu", self),
            "cpu": Lane("cpu", self, HostStream()),
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
        jobs, ready = self._jobs(tasks, actions)
        self._running = jobs
        for job in ready:
            if job.action is None:
                self.finished(job)
            else:
                self.lanes[job.task.node.lane].inbox.put(job)
        try:
            self._wait()
        finally:
            self._running = []
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
        """A job for each task, in line on its lane, and those jobs that wait for nothing.

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
            for job in fresh:
                lane = self.lanes[job.task.node.lane]
                if job.action is not None:
                    (lane.bulk if job.task.bulk else lane.small).append(job)
            ready = [job for job in fresh if not job.missing]
        return jobs, ready

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

    def reached(self) -> tuple[int, float] | None:
        """The last layer that the plan under way has begun to compute, and the share of its computing that is done.

        None while no plan is under way.
        """
        running = self._running
        if not running:
            return None
        computing = [job for job in running if job.action is not None and job.task.node.lane in COMPUTE]
        layers = [job.task.layer for job in computing if job.start]
        done = sum(job.done for job in computing)
        return max([0, *layers]), done / max(1, len(computing))

    def issued(self, job: Job) -> None:
        """Dispatch every follower of a job on the same lane that now waits for nothing; a lane that issues calls this.

        A follower without an action waits for the job's end: it is over at once, and other lanes may wait for it.
        """
        ready: list[Job] = []
        lane = job.task.node.lane
        with self._lock:
            here = [other for other in job.followers if other.task.node.lane == lane and other.action is not None]
            job.followers = [other for other in job.followers if other not in here]
            for follower in here:
                follower.missing -= 1
                if not follower.missing:
                    ready.append(follower)
        for follower in ready:
            self.lanes[lane].inbox.put(follower)

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
