"""Threads that run one compiled function side by side, the GIL released.

Plain threads of Python rather than Numba's pools: callers in several threads never abort (workqueue does) and never
wait for one another's pool, and nothing spins when it is done.
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
    """`threads`, which must be a whole number of at least 1, or else every core that this process may use."""
    if threads is not None and whole("threads", threads) < 1:
        raise ValueError(f"threads must be >= 1, not {threads}: leave it out to use every core.")
    return threads or usable_cores()


def usable_cores() -> int:
    """Count of cores that this process may use."""
    return len(usable_cpus())


def usable_cpus() -> frozenset[int]:
    """Cores that this process may use, by number."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


_making = threading.Lock()


@functools.cache
def _pool(process: int, cpus: frozenset[int] | None = None) -> ThreadPoolExecutor:
    """A fork has no threads of its own yet, so each process makes its pool; its threads stay on these CPUs."""
    if cpus is None:
        return ThreadPoolExecutor(max(1, 2 * usable_cores()), "kernels-cpu")
    return ThreadPoolExecutor(len(cpus), "kernels-cpu-node", lambda: _stay(cpus))


def _workers(cpus: frozenset[int] | None = None) -> ThreadPoolExecutor:
    with _making:
        return _pool(os.getpid(), cpus)


def _stay(cpus: frozenset[int]) -> None:
    """Keep this thread on these CPUs, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def on_node(work: Callable[[], object], cpus: frozenset[int], threads: int) -> Future[Any]:
    """Run `work` in `threads` threads that stay on these CPUs; what the first of them returns.

    The others are not waited for: `work` ends nowhere before all of it is done.
    """
    pool = _workers(cpus)
    first, *_ = [pool.submit(work) for _ in range(max(1, min(threads, len(cpus))))]
    return first


def side_by_side(work: Callable[[], object], threads: int) -> None:
    """Run `work` in this thread and in `threads` - 1 others; return when all have ended, or raise what one raised."""
    if threads == 1:
        work()
        return
    pool = _workers()
    others = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        wait(others)
    for other in others:
        other.result()


def helped(work: Callable[[], object], threads: int, done: Callable[[], bool] = lambda: True) -> None:
    """Run `work`, which takes tasks until none is left, in this thread and meanwhile in `threads` - 1 others.

    Of these, when this thread has found no task left, those that have not begun are called off, and those that have are
    waited for unless `done` says that all tasks are: waking a thread takes the system a tenth of a millisecond.
    """
    others = [_workers().submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        begun = [other for other in others if not other.cancel()]
        if begun and not done():
            wait(begun)
