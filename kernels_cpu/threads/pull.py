"""Calls that several threads compute together: they take tasks from queues until none is left.

A helper is a thread that sleeps in compiled code. A call wakes it, and it takes part and sleeps again, without the GIL:
neither what else Python does nor the number of helpers delays the calling thread. Where compiled code cannot sleep,
threads of a pool come instead, through Python.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ..codegen.compiled import compiled
from ..codegen.vector_ir import LINE
from .entries import entries_of, key_of, placed, run, runner_of
from .task_counts import QUEUES, end_queues, exchange, fetch_add, peek
from .team import helping_cpus, pin, workers
from .waiting import SLEEPS, pause, sleep_at, wake_at

_CALL = 0
_INSIDE = LINE
_RUNNER = 2 * LINE
_PLACE = _RUNNER + 8
_HELPERS = _RUNNER + 16
_FAILED = _RUNNER + 24
_COUNTER = 3 * LINE
_BELLS = _COUNTER + 2 * LINE * QUEUES
_NONE = frozenset[int]()
_WOKEN = 4
"""Helpers that the calling thread wakes, and that each of them wakes in turn; one takes the waker some microseconds."""
_LOOKS = 30_000
"""Number of times that a thread of a pool looks whether its call has begun, 1 to 2 ms."""


@compiled()
def _wake(board: int, number: int) -> None:
    """Wake the next helpers behind helper `number`; behind the calling thread, whose number is -1, come the first."""
    first = _WOKEN * (number + 1)
    for other in range(first, min(first + _WOKEN, peek(board + _HELPERS))):
        bell = board + _BELLS + LINE * other
        if exchange(bell, 1) == 0:
            wake_at(bell)


@compiled()
def _take_part(board: int, number: int, call: int) -> None:
    """Take part in a call as helper `number`, unless the call has ended or has fewer helpers."""
    fetch_add(board + _INSIDE, 1)
    if peek(board + _CALL) == call and number < peek(board + _HELPERS):  # now the caller waits for this helper
        if SLEEPS:
            _wake(board, number)
        if run(peek(board + _RUNNER), peek(board + _PLACE)):
            exchange(board + _FAILED, 1)
            end_queues(board + _COUNTER)
    fetch_add(board + _INSIDE, -1)


@compiled()
def _stand_by(board: int, number: int) -> None:
    """Take part in the calls to come as helper `number`; never returns."""
    bell = board + _BELLS + LINE * number
    last = 0
    while True:
        exchange(bell, 0)
        call = peek(board + _CALL)
        if call % 2 == 1 and call != last:
            exchange(bell, 1)
            last = call
            _take_part(board, number, call)
        else:
            sleep_at(bell)


@compiled()
def _come_once(board: int, number: int, call: int) -> None:
    """Take part in one call as helper `number`, if it begins soon and has not ended."""
    looks = 0
    while looks < _LOOKS and peek(board + _CALL) < call:
        pause(looks)
        looks += 1
    _take_part(board, number, call)


_UNKNOWN, _DONE, _ENDED_BY_ERROR = range(3)


@compiled()
def _compute(board: int, helpers: int, known: Any, *arguments: Any) -> int:
    """Compute a call with helpers, if `known` tells where the function for these arguments begins.

    Returns when no helper is inside: what the arguments hold may then change.
    """
    function = 0
    key = key_of(arguments)
    for entry in range(len(known)):
        if known[entry, 0] == key:
            function = known[entry, 1]
    if function == 0:
        return _UNKNOWN
    counter = board + _COUNTER
    for queue in range(2 * QUEUES):
        exchange(counter + LINE * queue, 0)
    runner = runner_of(arguments)
    place = placed(function, counter, arguments)
    exchange(board + _RUNNER, runner)
    exchange(board + _PLACE, place)
    exchange(board + _HELPERS, helpers)
    exchange(board + _FAILED, 0)
    fetch_add(board + _CALL, 1)
    if SLEEPS:
        _wake(board, -1)
    failed = run(runner, place)
    if failed:
        end_queues(counter)
    fetch_add(board + _CALL, 1)
    looks = 0
    while peek(board + _INSIDE) > 0:
        pause(looks)
        looks += 1
    return _ENDED_BY_ERROR if failed or peek(board + _FAILED) else _DONE


class _Team:
    """Helpers on some CPUs, for one call at a time. They stay until the process ends."""

    def __init__(self, cpus: frozenset[int]) -> None:
        self._cpus = cpus
        self._most = 2 * len(cpus)
        self._started = 0
        room = np.zeros((_BELLS + (self._most + 1) * LINE) // 8, np.int64)
        self._board: NDArray[np.int64] = room[-room.ctypes.data % LINE // 8 :]
        self._address: int = self._board.ctypes.data
        _compile()

    def compute(self, serve: Any, arguments: tuple[Any, ...], threads: int) -> None:
        """Compute a call by the calling thread and up to `threads` - 1 helpers."""
        helpers = min(threads - 1, self._most)
        if SLEEPS:
            self._start(helpers)
        else:
            self._ask(helpers)
        entries = entries_of(serve)
        outcome = _compute(self._address, helpers, entries.known, *arguments)
        if outcome == _UNKNOWN:
            entries.learn(arguments)
            outcome = _compute(self._address, helpers, entries.known, *arguments)
        if outcome != _DONE:
            raise MemoryError("a kernel ended with an error, most likely for want of memory: free some, or give less.")

    def _start(self, helpers: int) -> None:
        """Start the helpers that are missing; as threads of the module below `threading`, they are not waited for.

        A system that gives no more threads leaves the call to those that there are.
        """
        with contextlib.suppress(RuntimeError):
            while self._started < helpers:
                _thread.start_new_thread(self._stay, (self._started,))
                self._started += 1

    def _stay(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the process may not use these CPUs any more
            pin(self._cpus)
        _stand_by(self._address, number)

    def _ask(self, helpers: int) -> None:
        """Let threads of a pool come to the next call."""
        pool = workers(self._cpus)
        call = int(self._board[_CALL]) + 1
        for number in range(helpers):
            pool.submit(self._come, number, call)

    def _come(self, number: int, call: int) -> None:
        _come_once(self._address, number, call)


@functools.cache
def _compile() -> None:
    """Compile now what helpers run: the first of them may come in the middle of a computation that is timed."""
    number = types.int64
    if SLEEPS:
        _stand_by.compile((number, number))  # type: ignore[attr-defined]
    else:
        _come_once.compile((number, number, number))  # type: ignore[attr-defined]


@functools.cache
def _free_teams(process: int, cpus: frozenset[int]) -> list[_Team]:
    """The teams on these CPUs that no call uses; a forked process has none of the helpers of its parent."""
    return []


def pull(serve: Any, arguments: tuple[Any, ...], threads: int, cpus: frozenset[int] | None = None) -> None:
    """Run ``serve(counter, *arguments)`` in this thread and in up to `threads` - 1 others; return when all have ended.

    Parameters
    ----------
    serve : compiled function that returns nothing
        Takes tasks from the queues of `counter` until none is left. A thread that comes late, or not at all, must
        delay no other. If it fails in one thread, all queues end for the others.
    arguments : tuple
    threads : int
    cpus : frozenset of int, optional
        CPUs of the others, by default those of `helping_cpus`.
    """
    if threads == 1:
        where = _NONE
    else:
        where = helping_cpus() if cpus is None else cpus
    free = _free_teams(os.getpid(), where)
    try:
        team = free.pop()
    except IndexError:
        team = _Team(where)
    try:
        team.compute(serve, arguments, threads)
    finally:
        free.append(team)
