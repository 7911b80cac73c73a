"""Helpers that stay: between the calls of one thread they wait in compiled code, and join the next call at once.

Waking a thread takes a tenth of a millisecond, as long as reading 2 MB. A layer of few rows is several calls of that
size, so its helpers look for the next call for a while before they rest.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ..codegen.compiled import compiled
from ..codegen.vector_ir import LINE
from .task_counts import fetch_add, peek
from .team import start
from .waiting import pause

_WORDS = LINE // 8
_CALL = 0
_INSIDE = LINE
_TASK = 2 * LINE
_WAITING = 3 * LINE
_ALLOWED = _WAITING + 8
FIRST = 4 * _WORDS
"""First word of a board that describes the call; the words before are counters, each on its own cache line."""
BOARD = FIRST + 3 * _WORDS
"""Words of a board."""
_LOOKS = 30_000
"""Number of times that a helper looks for the next call, 1 to 2 ms; up to 0.4 ms are between two calls of a layer when
the code of Python and torch is in no cache."""


@compiled()
def open_call(board: int) -> None:
    """Let helpers join the call that the board describes."""
    fetch_add(board + _TASK, -peek(board + _TASK))
    fetch_add(board + _CALL, 1)


@compiled()
def close_call(board: int) -> None:
    """Let no helper join any more, and return when none is at work: then the board may describe another call."""
    fetch_add(board + _CALL, 1)
    looks = 0
    while peek(board + _INSIDE) > 0:
        pause(looks)
        looks += 1


@compiled()
def next_of_call(board: int) -> Any:
    """Take the next task number of the call, which no other thread gets."""
    return fetch_add(board + _TASK, 1)


@compiled()
def join_call(board: int, last: int) -> Any:
    """Join a call later than `last`, and return its number; -1 if there is none soon."""
    looks = 0
    while looks < _LOOKS:
        call = peek(board + _CALL)
        if call & 1 and call != last:
            before = fetch_add(board + _INSIDE, 1)
            if before < peek(board + _ALLOWED) and peek(board + _CALL) == call:  # now the caller waits for this helper
                return call
            fetch_add(board + _INSIDE, -1)
        pause(looks)
        looks += 1
    fetch_add(board + _WAITING, -1)
    return -1


@compiled()
def leave_call(board: int) -> None:
    """Leave the call that was joined."""
    fetch_add(board + _INSIDE, -1)


@compiled()
def _add_waiting(board: int) -> None:
    fetch_add(board + _WAITING, 1)


StandBy = Callable[[NDArray[np.int64]], object]
"""Compiled work of a helper: it computes the calls of a board that `join_call` gives it until there is none."""


def compiled_work(stand_by: Any) -> StandBy:
    """Compile now what a helper runs: one that finds no call for a while ends, and who starts another must not wait."""
    stand_by.compile((types.int64[::1],))
    _add_waiting.compile((types.int64,))  # type: ignore[attr-defined]
    found: StandBy = stand_by
    return found


class Crew:
    """A thread and its helpers.

    Attributes
    ----------
    board : ndarray (words,) int64
        Counters, and from word `FIRST` on the description of a call, whose meaning is the callers'.
    address : int
        Of the board.
    kept : dict
        Memory that calls of this thread use again.
    """

    def __init__(self) -> None:
        room = np.zeros(BOARD + _WORDS, np.int64)
        begin = -room.ctypes.data % LINE // 8
        self.board: NDArray[np.int64] = room[begin : begin + BOARD]
        self.kept: dict[Any, Any] = {}
        self.address: int = self.board.ctypes.data

    def gather(self, work: Callable[[], StandBy], threads: int) -> None:
        """Start as many helpers as are missing for `threads` threads; no more may join.

        They run what `work` returns. It is not called where none is missing, so that one thread alone compiles nothing.
        """
        self.board[_ALLOWED // 8] = threads - 1
        for _ in range(threads - 1 - int(self.board[_WAITING // 8])):
            stand_by = work()
            _add_waiting(self.address)
            start(functools.partial(stand_by, self.board))


_own = threading.local()


def crew(kind: int) -> Crew:
    """The crew of the calling thread whose helpers are of a kind, a number of the callers' choice."""
    crews: dict[tuple[int, int], Crew] | None = getattr(_own, "crews", None)
    if crews is None:
        crews = _own.crews = {}
    key = os.getpid(), kind  # a forked process has none of the helpers
    if key not in crews:
        crews[key] = Crew()
    return crews[key]
