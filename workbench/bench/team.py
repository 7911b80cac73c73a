"""Threads for peers that bring none of their own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def together(work: Callable[[], object], threads: int) -> None:
    """Run `work` in this thread and in `threads` - 1 others, and wait for all."""
    others = [_pool(os.getpid()).submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """A fork has no threads of its own yet, so each process makes its pool; it grows to what is asked of it."""
    return ThreadPoolExecutor(max(1, 2 * (os.cpu_count() or 1)), "bench-peers")
