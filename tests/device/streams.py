"""Streams whose work waits in a queue until an adversary does it: as late, or as early, as the events allow."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.device.races import HOST, Access, Clock, Touch, joined

Work = Callable[[], object]


class LostError(RuntimeError):
    """The device answers no longer, as a card after an illegal address."""


@dataclass
class Adversary:
    """Chooses when queued work is done.

    Attributes
    ----------
    hasty : set of str
        Streams that do at once whatever no wait forbids; the others do nothing that nobody waits for.
    seed : int, optional
        With one, random streams also do some of their work whenever something is issued.
    breaks : int, optional
        Number of the piece of work at which the device is lost.
    """

    hasty: frozenset[str] = frozenset()
    seed: int | None = None
    breaks: int | None = None

    def __post_init__(self) -> None:
        self.random = None if self.seed is None else random.Random(self.seed)


@dataclass(eq=False)
class Moment:
    """The end of the first `place` pieces of a stream's queue, and what is over by then.

    Without a stream it has passed, as an event of CUDA that was never recorded.
    """

    stream: QueuedStream | None = None
    place: int = 0
    clock: Clock = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.stream is None or self.stream.done >= self.place


class QueuedStream:
    """A queue of work, and of moments in other queues to wait for.

    As a context manager it is what its thread issues to.
    """

    def __init__(self, queues: Queues, name: str) -> None:
        self.name = name
        self.queues = queues
        self.waiting: deque[Work | Moment] = deque()
        self.issued = 0
        self.done = 0
        self.clock: Clock = {}

    def __enter__(self) -> QueuedStream:
        self.queues.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.queues.entered.pop()

    def issue(self, label: str, work: Work, touches: Iterable[Touch] = ()) -> None:
        """Queue work that touches memory."""
        with self.queues.turn():
            self.put(label, work, touches)

    def put(self, label: str, work: Work, touches: Iterable[Touch] = ()) -> None:
        """Do as `issue`, in a turn that has begun."""
        self.queues.check()
        self._append(work)
        self.clock[self.name] = self.issued
        self.queues.touch(self.name, self.issued, label, touches, self.clock)
        self.queues.tempt()

    def wait(self, moment: Moment) -> None:
        """Have what is issued from now on wait for a moment."""
        with self.queues.turn():
            self.clock = joined(self.clock, moment.clock)
            self._append(moment)

    def record(self) -> Moment:
        """The end of everything issued so far."""
        with self.queues.turn():
            return Moment(self, self.issued, dict(self.clock))

    def _append(self, item: Work | Moment) -> None:
        self.waiting.append(item)
        self.issued += 1


class Queues:
    """All streams of a device, and the host's threads that issue to them.

    One lock guards them all, and is held while work is done. What a thread has waited for counts as known to all
    threads of the host.

    Parameters
    ----------
    adversary : Adversary
    races : bool
        False if accesses are not checked, so that only wrong results tell of a wait that is missing.
    """

    def __init__(self, adversary: Adversary, *, races: bool = True) -> None:
        self.adversary = adversary
        self.streams: list[QueuedStream] = []
        self.freed: deque[Callable[[], None]] = deque()
        """Ends of memory that was dropped, in any thread and at any moment; the next turn begins with them."""
        self.error: Exception | None = None
        self.worked = 0
        self._races = races
        self._host: Clock = {}
        self._lock = threading.RLock()
        self._local = threading.local()

    @property
    def entered(self) -> list[QueuedStream]:
        """Streams that this thread has entered. It issues to the last of them."""
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        found: list[QueuedStream] = self._local.entered
        return found

    @property
    def current(self) -> QueuedStream:
        """The stream that this thread issues to.

        Raises
        ------
        RuntimeError
            If it has entered none. CUDA would take its default stream, which no event of ours knows.
        """
        if not self.entered:
            raise RuntimeError("work was issued outside of every stream; enter one with `with stream.issuing():`.")
        return self.entered[-1]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other threads from the queues."""
        with self._lock:
            while self.freed:
                self.freed.popleft()()
            yield

    def check(self) -> None:
        """Raise the error that lost the device, if there was one."""
        if self.error is not None:
            raise LostError(f"the device is lost: {self.error}") from self.error

    def touch(self, stream: str, place: int, label: str, touches: Iterable[Touch], clock: Clock) -> None:
        """Check accesses against all earlier ones."""
        if not self._races:
            return
        known = joined(clock, self._host)
        for memory, writes, begin, end in touches:
            memory.touch(Access(stream, place, label, writes, begin, end), known)

    def touch_by_host(self, label: str, touches: Iterable[Touch]) -> None:
        """Check what the host itself reads or writes now. All that is issued later comes after it."""
        with self.turn():
            self.touch(HOST, 0, label, touches, {})

    def finish(self, moment: Moment) -> None:
        """Have the host wait: do what stands before the moment, and no more."""
        with self.turn():
            self.check()
            self._reach(moment)
            self._host = joined(self._host, moment.clock)

    def finish_all(self) -> None:
        """Have the host wait for everything."""
        for stream in list(self.streams):
            self.finish(stream.record())

    def tempt(self) -> None:
        """Let the adversary work after something was issued."""
        hasty = [stream for stream in self.streams if stream.name in self.adversary.hasty]
        while any(self._step(stream) for stream in hasty):
            pass
        if self.adversary.random is not None:
            for _ in range(self.adversary.random.choice((0, 0, 1, 2, 5))):
                self._step(self.adversary.random.choice(self.streams))

    def _step(self, stream: QueuedStream) -> bool:
        """Do the next item of a stream, unless it must wait; True if one was done."""
        if not stream.waiting or not _may_go_on(stream):
            return False
        self._advance(stream)
        return True

    def _reach(self, moment: Moment) -> None:
        path = [moment]
        while path:
            stream = path[-1].stream
            if stream is None or path[-1].passed:
                path.pop()
            elif _may_go_on(stream):
                self._advance(stream)
            else:
                path.append(stream.waiting[0])  # type: ignore[arg-type]

    def _advance(self, stream: QueuedStream) -> None:
        item = stream.waiting.popleft()
        stream.done += 1
        if isinstance(item, Moment):
            return
        self.worked += 1
        try:
            if self.worked == self.adversary.breaks:
                raise LostError(f"it broke at its {self.worked}. piece of work.")
            item()
        except Exception as error:
            self.error = error
            raise


def _may_go_on(stream: QueuedStream) -> bool:
    """True unless the first item of a queue is a moment that has not passed."""
    first = stream.waiting[0]
    return not isinstance(first, Moment) or first.passed
