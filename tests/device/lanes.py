"""Tasks on lanes, and what it means on each pair of lanes that one task waits for another.

Every lane but `cpu` is a stream of the device, to which its tasks are issued in their order. A task is issued when all
that it waits for has been issued, or has ended on the host:

* a stream after another stream waits for the event, and the host goes on;
* the host after a stream waits for the event;
* a stream after the host is not issued before the host has done its task;
* on one lane the order is enough.

One thread takes every lane's turn, in an order that a test chooses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.engine.devices.driver import Driver, Event

CPU = "cpu"
STREAMS = "gpu", "d2h", "h2d", "weights"
Wait = tuple[int, int]
"""A task and one that it waits for, by their places in the plan."""
Turn = Callable[[Sequence[str]], str]
"""Which of the lanes that can go on does."""
NOTHING: frozenset[Wait] = frozenset()


def first(lanes: Sequence[str]) -> str:
    """The turn of the first lane that can go on."""
    return lanes[0]


def last(lanes: Sequence[str]) -> str:
    """The turn of the last lane that can go on."""
    return lanes[-1]


@dataclass(eq=False)
class Task:
    """What a lane does, and the earlier tasks of the plan that must be over before.

    Once it has been issued, or done by the host, `over` is True; on a stream, `end` is then its end.
    """

    lane: str
    action: Callable[[], None]
    after: tuple[int, ...] = ()
    end: Event | None = None
    over: bool = False


class Lanes:
    """Executes plans on a device."""

    def __init__(self, driver: Driver) -> None:
        self.streams = {name: driver.stream(name) for name in STREAMS}
        self._on_host = driver.on_host

    def run(self, tasks: Sequence[Task], turn: Turn = first, forgotten: frozenset[Wait] = NOTHING) -> None:
        """Execute a plan and wait for the end of its last task; the waits in `forgotten` are left out."""
        lines: dict[str, deque[int]] = {lane: deque() for lane in (*STREAMS, CPU)}
        for place, task in enumerate(tasks):
            lines[task.lane].append(place)
        while waiting := [lane for lane, line in lines.items() if line]:
            ready = [lane for lane in waiting if _can_go_on(tasks, lines[lane][0], forgotten)]
            place = lines[turn(ready)].popleft()
            self._perform(
                tasks[place], [tasks[other] for other in tasks[place].after if (place, other) not in forgotten]
            )
        end = len(tasks) - 1
        if (end + 1, end) not in forgotten:
            _ended(tasks[end]).wait()

    def _perform(self, task: Task, after: Sequence[Task]) -> None:
        if task.lane == CPU:
            for other in after:
                _ended(other).wait()
            task.action()
        else:
            for other in after:
                if other.lane not in (CPU, task.lane):
                    self._wait(task.lane, _ended(other))
            with self.streams[task.lane].issuing():
                task.action()
            task.end = self.streams[task.lane].record()
        task.over = True

    def _wait(self, lane: str, event: Event) -> None:
        """Have a stream wait for an event. The engine has no use for it, so its drivers do not offer it."""
        if not self._on_host:
            self.streams[lane]._stream.wait_event(event._event)  # type: ignore[attr-defined]


def _can_go_on(tasks: Sequence[Task], place: int, forgotten: frozenset[Wait]) -> bool:
    """True if streams have been given what a task waits for, and the host has done it."""
    waits = (other for other in tasks[place].after if tasks[other].lane != CPU or (place, other) not in forgotten)
    return all(tasks[other].over for other in waits)


def _ended(task: Task) -> Event:
    if task.end is None:
        raise RuntimeError("a task is waited for that was not issued.")
    return task.end
