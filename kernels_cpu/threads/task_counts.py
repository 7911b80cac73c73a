"""Atomic counters by which threads take tasks from queues and learn that all tasks are done."""

from __future__ import annotations

from typing import Any

from numba import types

from ..codegen.compiled import compiled, emitted
from ..codegen.vector_ir import I64, LINE

QUEUES = 5
"""Most queues of a call. Each counts the tasks that are taken and those that are done, on cache lines of their own."""

_ENDED = 1 << 40
"""A count beyond that of any queue's tasks, which may be multiplied by the size of a task."""


@emitted
def fetch_add(typing: Any, address: Any, amount: Any) -> Any:
    """Add to an int64 atomically and return its value before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@emitted
def exchange(typing: Any, address: Any, value: Any) -> Any:
    """Store an int64 atomically and return the value before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("xchg", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@emitted
def peek(typing: Any, address: Any) -> Any:
    """Read an int64 that other threads change."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), emit


@compiled()
def end_queues(counter: int) -> None:
    """Leave no task in any queue and let all of them count as done: the call has failed, and nobody waits for it."""
    for count in range(2 * QUEUES - 1, -1, -1):  # the last queue first: whoever sees one as done finds the next empty
        exchange(counter + LINE * count, _ENDED)


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
    return peek(counter + 2 * LINE * queue + LINE)
