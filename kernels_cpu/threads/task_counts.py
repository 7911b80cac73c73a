"""Atomic counters by which threads take tasks from queues and learn that all tasks are done."""

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
"""Number of times that `_soon_done` polls, about a millisecond."""


def counters(queues: int = 1) -> NDArray[np.int64]:
    """Counters of taken and of done tasks of each queue, each on its own cache line.

    Threads hold only the address, so the caller must keep the array until the last thread has ended.
    """
    return np.zeros((2 * queues, LINE // 8), np.int64)


@emitted
def fetch_add(typing: Any, address: Any, amount: Any) -> Any:
    """Add to an int64 atomically and return its value before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@emitted
def peek(typing: Any, address: Any) -> Any:
    """Read an int64 that other threads change."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), emit


@compiled()
def next_task(counter: int, queue: int = 0) -> Any:
    """Take the next task number of a queue, which no other thread gets; past the last task the queue is empty."""
    return fetch_add(counter + 2 * LINE * queue, 1)


@compiled()
def task_done(counter: int, queue: int = 0) -> None:
    """Count one more task of a queue as done."""
    fetch_add(counter + 2 * LINE * queue + LINE, 1)


@compiled()
def tasks_done(counter: int, queue: int = 0) -> Any:
    """Number of tasks of a queue that are done."""
    return fetch_add(counter + 2 * LINE * queue + LINE, 0)


@compiled()
def _soon_done(counter: int, tasks: int) -> bool:
    """True if all tasks of the first queue are done within about a millisecond; waiting for threads takes longer."""
    looks = 0
    while looks < _LOOKS and tasks_done(counter) < tasks:
        looks += 1
    return looks < _LOOKS


def pull(serve: Callable[[int], object], tasks: int, threads: int) -> None:
    """Run `serve` in `threads` threads, which take `tasks` tasks from one queue; return when all tasks are done."""
    counter = counters()
    address = counter.ctypes.data
    helped(lambda: (serve(address), counter), threads, lambda: _soon_done(address, tasks))
