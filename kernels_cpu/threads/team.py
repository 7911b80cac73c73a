"""Pools of threads that run functions of Python, which release the GIL where they are compiled.

They are Python threads instead of Numba's pools: calls from several threads at once do not abort, as they do with
workqueue, and do not wait for one another's pool, and no thread spins after the work.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ..arguments import whole


def team_size(threads: int | None) -> int:
    """`threads`, checked to be an integer of at least 1; by default the number of cores that this process may use."""
    if threads is not None and whole("threads", threads) < 1:
        raise ValueError(f"threads must be >= 1, not {threads}: leave it out to use every core.")
    return threads or usable_cores()


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(usable_cpus())


def usable_cpus() -> frozenset[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def process_cpus() -> frozenset[int]:
    """Numbers of the cores that the process may use, in whichever thread that is asked."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(os.getpid()))
    return usable_cpus()


_making = threading.Lock()


@functools.cache
def _pool(process: int, cpus: frozenset[int]) -> ThreadPoolExecutor:
    """A pool of a process, with threads pinned to these CPUs; a forked process needs pools of its own."""
    return ThreadPoolExecutor(2 * (os.cpu_count() or 1), "kernels-cpu", lambda: pin(cpus))


def workers(cpus: frozenset[int]) -> ThreadPoolExecutor:
    """The pool on these CPUs."""
    with _making:
        return _pool(os.getpid(), cpus)


def helping_cpus() -> frozenset[int]:
    """The CPUs of threads that help the calling one: its own, or where it has but one, the others of the process."""
    own = usable_cpus()
    return own if len(own) > 1 else process_cpus() - own or own


def pin(cpus: frozenset[int]) -> None:
    """Set this thread's CPU affinity, where the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def on_node(work: Callable[[], object], cpus: frozenset[int]) -> Future[Any]:
    """Run `work` in another thread, with affinity to these CPUs, and return its future."""
    return workers(cpus).submit(work)


def start(work: Callable[[], object]) -> None:
    """Run `work` in another thread, and go on."""
    workers(helping_cpus()).submit(work)


def side_by_side(work: Callable[[], object], threads: int) -> None:
    """Run `work` in this thread and in `threads` - 1 others; return when all have ended, or raise an error of one."""
    if threads == 1:
        work()
        return
    pool = workers(helping_cpus())
    others = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        wait(others)
    for other in others:
        other.result()
