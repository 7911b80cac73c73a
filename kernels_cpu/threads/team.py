"""Teams of threads that run one compiled function with the GIL released.

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


_making = threading.Lock()


@functools.cache
def _pool(process: int, cpus: frozenset[int], size: int) -> ThreadPoolExecutor:
    """A pool of a process, with threads pinned to these CPUs; a forked process needs pools of its own."""
    return ThreadPoolExecutor(size, "kernels-cpu", lambda: _pin(cpus))


def _workers() -> ThreadPoolExecutor:
    """The pool that helps the calling thread: on the CPUs that the process may use and the thread may not, or on all.

    A thread pinned to one CPU thus gets its helpers on others, whichever thread made the pool.
    """
    own = usable_cpus()
    everywhere = frozenset(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else own
    with _making:
        return _pool(os.getpid(), everywhere - own or everywhere, max(1, 2 * len(everywhere)))


def _workers_of(cpus: frozenset[int]) -> ThreadPoolExecutor:
    """The pool on these CPUs."""
    with _making:
        return _pool(os.getpid(), cpus, len(cpus))


def _pin(cpus: frozenset[int]) -> None:
    """Set this thread's CPU affinity, where the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def on_node(work: Callable[[], object], cpus: frozenset[int], threads: int) -> Future[Any]:
    """Run `work` in `threads` threads with affinity to these CPUs; return the future of the first.

    The others need not be awaited, since `work` returns in no thread before all of it is done.
    """
    pool = _workers_of(cpus)
    running = [pool.submit(work) for _ in range(max(1, min(threads, len(cpus))))]
    return running[0]


def start(work: Callable[[], object]) -> None:
    """Run `work` in another thread, and go on."""
    _workers().submit(work)


def side_by_side(work: Callable[[], object], threads: int) -> None:
    """Run `work` in this thread and in `threads` - 1 others; return when all have ended, or raise an error of one."""
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
    """Run `work`, which takes tasks until none is left, in this thread and in `threads` - 1 others.

    When this thread finds no task left, the others that have not started are cancelled. Those that have are awaited
    unless `done` returns True, that is, all tasks are done: waking a thread takes a tenth of a millisecond.
    """
    others = [_workers().submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        begun = [other for other in others if not other.cancel()]
        if begun and not done():
            wait(begun)
