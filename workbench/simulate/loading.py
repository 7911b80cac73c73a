"""The moment at which the compiled kernels are loaded: not for a short simulation, and never while one waits.

Until they are there, simulations price and play their plans in Python, with the same results. A process that finds no
machine code on disk lets another process compile it, at a low priority: compiling in a thread would hold the
interpreter for seconds.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

PATIENCE = 5000
"""Iterations that a process lays out in Python, in about 1.5 s, before it loads the kernels. To load them takes 0.3 s
(Zen 2), and to compile them, once for a computer, 12 s of CPU time (one core of a 2.1 GHz Xeon)."""


class Kernels(NamedTuple):
    """The kernels that Python calls, see `workbench.simulate.kernels`."""

    lay_out: Callable[..., Any]
    advance: Callable[..., Any]


class Loader:
    """Loads the kernels in a thread. Where Numba is missing, switched off or fails, there are none."""

    def __init__(self) -> None:
        self._left = PATIENCE
        self._thread: threading.Thread | None = None
        self._kernels: Kernels | None = None
        self._status: int | None = None  # of the process that compiled them, once it has ended
        os.register_at_fork(before=self._join)  # a fork in the midst of an import would leave its locks taken
        os.register_at_fork(after_in_child=self._forget)

    def kernels(self) -> Kernels | None:
        """The kernels if they are there; called once for each iteration."""
        if self._thread is None:
            self._left -= 1
            if self._left < 0:
                self._begin(self._first)
        elif self._status is not None:
            self._begin(self._again)
        return self._kernels

    @property
    def there(self) -> bool:
        """True if the kernels are loaded."""
        return self._kernels is not None

    def hasten(self) -> None:
        """Load the kernels with the next iteration: much is going to be simulated."""
        self._left = 0

    def load_if_kept(self) -> None:
        """Load the kernels and wait for them if they are on disk; else let a process compile them."""
        if self._thread is None:
            self._begin(self._first)
            self._join()

    def load(self) -> Kernels | None:
        """The kernels, compiled here if they are not on disk; None where there are none."""
        self._join()
        if self._kernels is None:
            self._begin(self._use)
            self._join()
        return self._kernels

    def _begin(self, step: Callable[[ModuleType], None]) -> None:
        """Import the kernels in a thread, and take this step with their module."""
        self._thread = threading.Thread(target=self._import, args=(step,), name="loading the simulator")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _forget(self) -> None:
        """Begin anew in a forked process, which has neither the threads nor the child of the one before."""
        if self._kernels is None:
            self._thread = None
            self._status = None
            self._left = PATIENCE

    def _import(self, step: Callable[[ModuleType], None]) -> None:
        try:
            numba = importlib.import_module("numba")
            if not numba.config.DISABLE_JIT:
                step(importlib.import_module("workbench.simulate.kernels.entries"))
        except Exception:  # the simulation goes on in Python
            self._kernels = None

    def _first(self, entries: ModuleType) -> None:
        """Load the kernels if they are on disk or cannot be kept there; else let a process compile them."""
        if entries.COMPILED.kept or entries.COMPILED.folder is None:
            self._use(entries)
            return
        filling = importlib.import_module("workbench.simulate.kernels.filling")
        waiting = threading.Thread(
            target=self._wait, args=(filling.begin(),), name="waiting for the simulator", daemon=True
        )
        waiting.start()

    def _again(self, entries: ModuleType) -> None:
        """Load the kernels after a process has compiled them; if it failed, Python goes on."""
        done = self._status == 0
        self._status = None
        if done or entries.COMPILED.kept:
            self._use(entries)

    def _use(self, entries: ModuleType) -> None:
        """Load the kernels, compiled here if they are not on disk."""
        entries.COMPILED.load()
        self._kernels = Kernels(entries.lay_out, entries.advance)

    def _wait(self, process: int) -> None:
        """Wait for the process that compiles, so that nothing of it stays behind."""
        try:
            self._status = os.waitpid(process, 0)[1]
        except ChildProcessError:  # somebody else has waited for it
            self._status = 1


@functools.cache
def loader() -> Loader:
    """The loader of this process."""
    return Loader()
