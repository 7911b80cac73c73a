"""Reading of all points: in this process while that is quick, else on processes, of which some may be killed.

Who reads a point elsewhere may die; the point is then read again. Of several that were being read when a process died,
none is known to be guilty: each is read alone, until it is read or has been tried `TRIES` times.
"""

from __future__ import annotations

import pickle
import time
import uuid
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from typing import Any, NamedTuple

from workbench.analysis.sweeps.grid import Place
from workbench.analysis.sweeps.pools import Brought, Embedded, Pool
from workbench.analysis.sweeps.reading import Base, Row, Rows, Sent, read_chunk
from workbench.core.errors import SweepError
from workbench.core.records import reason
from workbench.hardware.machine import usable_cores

TRIES = 3
"""Times that a point is begun before it is set aside."""
PROBE = 1.0
"""Time for which points are read in this process, to see how long they take [s]."""
WORTH = 10.0
"""Time that the rest must take in one process so that others are started, which takes about 2 s each [s]."""
_CHUNK = 0.25
"""Time that a chunk should take [s]."""
_MOST = 200
"""Most points of a chunk."""


class Task(NamedTuple):
    """One point that is to be read."""

    place: Place
    values: Mapping[str, Any]


Collect = Callable[[Sequence[tuple[Place, Row]]], None]
"""Takes readings as they come."""


def read_all(base: Base, tasks: Sequence[Task], executor: Executor | None, collect: Collect) -> None:
    """Read points here, on the user's executor, or on processes of this computer.

    Without an executor they are read in this process for the first second. If the rest would take more than ten seconds
    more, it goes to one process for each core. A live reader, and what other processes cannot be sent, stay here.

    Raises
    ------
    SweepError
        If the user's executor is broken.
    """
    waiting = deque(tasks)
    if executor is not None and not base.live:
        _Feeder(base, waiting, Brought(executor), collect).run()
        return
    pace = _read_here(base, waiting, collect, seconds=PROBE)
    cores = usable_cores()
    if waiting and not base.live and cores > 1 and pace * len(waiting) > WORTH:
        if why := _stays(base, waiting):
            warnings.warn(f"{why}, so all points are read in this process.", RuntimeWarning, stacklevel=3)
        else:
            _read_on_processes(base, waiting, collect, pace)
    _read_here(base, waiting, collect)


def _read_here(base: Base, waiting: deque[Task], collect: Collect, seconds: float = float("inf")) -> float:
    """Read points in this process for so long; returns the mean time of a point [s]."""
    begin = time.perf_counter()
    count = 0
    while waiting and time.perf_counter() - begin < seconds:
        task = waiting[0]
        rows = read_chunk(base, [task.values]).rows
        waiting.popleft()
        count += 1
        collect([(task.place, row) for row in rows])
    return (time.perf_counter() - begin) / max(1, count)


def _read_on_processes(base: Base, waiting: deque[Task], collect: Collect, pace: float) -> None:
    try:
        pool = Embedded(min(usable_cores(), len(waiting)))
    except SweepError as error:
        warnings.warn(f"{error} All points are read in this process.", RuntimeWarning, stacklevel=4)
        return
    _Feeder(base, waiting, pool, collect, pace).run()
    pool.close()


def _stays(base: Base, waiting: Sequence[Task]) -> str:
    """The reason why other processes cannot be sent these points; empty if they can."""
    try:
        sent = pickle.dumps((base, [task.values for task in waiting]))
    except Exception as error:  # whatever pickle meets in the user's own things
        return f"the sweep cannot be sent to other processes ({reason(error)})"
    if b"__main__" in sent:
        return "the sweep has something that a notebook or a script defines itself"
    return ""


class _Feeder:
    """Hands chunks of points over to a pool, a few at a time, and takes their rows."""

    def __init__(self, base: Base, waiting: deque[Task], pool: Pool, collect: Collect, pace: float = _CHUNK) -> None:
        self._sent = Sent(uuid.uuid4().hex, base)
        self._waiting = waiting
        self._pool = pool
        self._collect = collect
        self._pace = pace
        self._suspects = deque[Task]()
        self._tries = Counter[Place]()
        self._handed = dict[Future[Rows], list[Task]]()

    def run(self) -> None:
        """Read until nothing is left; if it is interrupted, what was read is kept."""
        try:
            while self._waiting or self._suspects or self._handed:
                self._hand_over()
                if self._handed:
                    self._take(wait(self._handed, return_when=FIRST_COMPLETED).done)
        except BaseException:
            self._pool.stop()
            self._keep_finished()
            raise

    def _hand_over(self) -> None:
        while chunk := self._next():
            try:
                future = self._pool.submit(read_chunk, self._sent, [task.values for task in chunk])
            except BrokenExecutor:
                self._waiting.extendleft(reversed(chunk))
                self._renew([])
                return
            self._handed[future] = chunk

    def _next(self) -> list[Task]:
        """The next chunk: a suspect when nothing else is being read, else as many points as take `_CHUNK` seconds."""
        if self._suspects:
            return [] if self._handed else [self._suspects.popleft()]
        if len(self._handed) >= self._pool.window:
            return []
        size = max(1, min(_MOST, round(_CHUNK / max(self._pace, 1e-9)), -(-len(self._waiting) // self._pool.window)))
        return [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]

    def _take(self, done: set[Future[Rows]]) -> None:
        killed = list[Task]()
        for future in done:
            chunk = self._handed.pop(future)
            error = _error_of(future)
            if error is None:
                rows, seconds = future.result()
                self._pace = (self._pace + seconds / len(chunk)) / 2
                self._collect([(task.place, row) for task, row in zip(chunk, rows, strict=True)])
            elif isinstance(error, BrokenExecutor):
                killed += chunk
            else:
                self._suspect(chunk, reason(error))
        if killed:
            self._renew(killed)

    def _renew(self, killed: list[Task]) -> None:
        """Start again: a killed process took the whole pool with it, and all that was being read."""
        for future, chunk in list(self._handed.items()):
            if not (future.done() and _error_of(future) is None):
                del self._handed[future]
                killed += chunk
        self._suspect(killed, "the process that read it was killed each time")
        self._pool.renew()

    def _suspect(self, chunk: Sequence[Task], why: str) -> None:
        """Read points again, each alone, or set them aside."""
        for task in chunk:
            self._tries[task.place] += 1
            if self._tries[task.place] < TRIES:
                self._suspects.append(task)
            else:
                self._collect([(task.place, Row({}, f"set aside after {TRIES} tries: {why}.", lasting=False))])

    def _keep_finished(self) -> None:
        for future, chunk in self._handed.items():
            if future.done() and _error_of(future) is None:
                self._collect([(task.place, row) for task, row in zip(chunk, future.result().rows, strict=True)])


def _error_of(future: Future[Rows]) -> BaseException | None:
    """The error of a future that is done."""
    try:
        return future.exception()
    except CancelledError as error:
        return error
