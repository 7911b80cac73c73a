"""The moment at which the compiled kernels are imported: not for a short simulation, and never while one waits.

Until they are there, simulations price and play their plans in Python, with the same results.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from types import ModuleType

PATIENCE = 5000
"""Iterations that a process lays out in Python, in about 1.5 s, before a thread imports the kernels. To load them takes
0.7 s, and to compile them, once for a computer, 12 s of CPU time (one core of a 2.1 GHz Xeon)."""


class Loader:
    """Imports `compiled` in a thread. Where Numba is missing, switched off or fails, there are no kernels."""

    def __init__(self) -> None:
        self._left = PATIENCE
        self._thread: threading.Thread | None = None
        self._module: ModuleType | None = None
        os.register_at_fork(before=self._join)  # a fork in the midst of an import would leave its locks taken

    def kernels(self) -> ModuleType | None:
        """The compiled module if it is there; called once for each iteration."""
        if self._thread is None:
            self._left -= 1
            if self._left < 0:
                self._begin()
        return self._module

    def load(self) -> ModuleType | None:
        """The compiled module, after waiting for it; None where there is none."""
        if self._thread is None:
            self._begin()
        self._join()
        return self._module

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._import, name="compiling the simulator")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _import(self) -> None:
        try:
            numba = importlib.import_module("numba")
            if not numba.config.DISABLE_JIT:
                self._module = importlib.import_module("workbench.simulate.compiled")
        except Exception:  # the simulation goes on in Python
            self._module = None


@functools.cache
def loader() -> Loader:
    """The loader of this process."""
    return Loader()
