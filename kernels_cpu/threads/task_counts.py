"""Counters by which threads take tasks from queues and know when all of them are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ..codegen.compiled import compiled, emitted
from ..codegen.vector_ir import I64, LINE
from .team import helped

_LOOKS = 100_000
"""How often `_soon_done` looks: for about a millisecond."""


def counters(queues: int = 1) -> NDArray[np.int64]:
    """Per queue how many tasks are taken and how many done, each on a line of the cache of its own.

    Threads know the address alone, so that whoever starts them must keep the array until the last one has ended.
    """
    return np.zeros((2 * queues, LINE // 8), np.int64)


@emitted
def take(typing: Any, address: Any, amount: Any) -> Any:
    """Atomically add to an int64 and return what it was."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@compiled()
def next_task(counter: int, queue: int = 0) -> Any:
    """A task's number that nobody else gets; there is no such task if it is past the last one."""
    return take(counter + 2 * LINE * queue, 1)


@compiled()
def task_done(counter: int, queue: int = 0) -> None:
    """One more task is done."""
    take(counter + 2 * LINE * queue + LINE, 1)


@compiled()
def tasks_done(counter: int, queue: int = 0) -> Any:
    """Count of tasks that are done."""
    return take(counter + 2 * LINE * queue + LINE, 0)


@compiled()
def _soon_done(counter: int, tasks: int) -> bool:
    """True if so many tasks of the first queue are done within a moment: the system would take longer to tell."""
    looks = 0
    while looks < _LOOKS and tasks_done(counter) < tasks:
        looks += 1
    return looks < _LOOKS


def pull(serve: Callable[[int], object], tasks: int, threads: int) -> None:
    """Run `serve` in so many threads with a counter of one queue, whose tasks it takes; return when all are done."""
    counter = counters()
    address = counter.ctypes.data
    helped(lambda: (serve(address), counter), threads, lambda: _soon_done(address, tasks))
