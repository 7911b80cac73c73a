"""The lanes of the link: copies in packets, which are paced and let small transfers pass."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING

from workbench.engine.devices.driver import Event, Stream
from workbench.engine.lanes.affinity import end_sleeps_on_time
from workbench.engine.lanes.lane import Job, Lane
from workbench.engine.lanes.transfer import Transfer

if TYPE_CHECKING:
    from workbench.engine.lanes.executor import Executor

_IN_FLIGHT = 2
"""Packets that the link is given ahead, so that it does not wait for the host."""


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
