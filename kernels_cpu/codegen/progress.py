"""Lines on stderr while kernels are compiled, which takes a first call many seconds."""

import sys
from threading import Timer
from time import monotonic
from typing import Any

from numba.core.event import Listener, register

FIRST, NEXT = 1.0, 5.0
"""Seconds of compilation until the first line, and from one line to the next."""
_PACKAGE = __name__.partition(".")[0] + "."


class CompilationProgress(Listener):
    """Reports on stderr which module of this package Numba compiles, and for how long it has.

    Numba calls it under its compiler lock, so that one compilation begins or ends at a time. A function that is
    compiled because another one calls it counts as part of that one.
    """

    def __init__(self) -> None:
        self._compiling = list[str]()  # the outermost module first
        self._begun = 0.0
        self._told = False
        self._timer: Timer | None = None

    def on_start(self, event: Any) -> None:
        """A function begins to be compiled."""
        module = _module_of(event)
        if not module.startswith(_PACKAGE):
            return
        self._compiling.append(module)
        if len(self._compiling) == 1:
            self._begun = monotonic()
            self._told = False
            self._wait(FIRST)

    def on_end(self, event: Any) -> None:
        """A function is compiled, or cannot be."""
        if not _module_of(event).startswith(_PACKAGE):
            return
        module = self._compiling.pop()
        if self._compiling:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._told:
            _say(f"compiling {module} took {monotonic() - self._begun:.0f} s.")

    def _wait(self, seconds: float) -> None:
        self._timer = Timer(seconds, self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        for module in self._compiling[:1]:  # none, if the timer was late
            self._told = True
            _say(f"compiling {module} for this CPU: {monotonic() - self._begun:.0f} s so far ...")
            self._wait(NEXT)


def _module_of(event: Any) -> str:
    return str(event.data["dispatcher"].py_func.__module__)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tell_compilation() -> None:
    """Report the compilations of this package in this process from now on."""
    register("numba:compile", CompilationProgress())  # type: ignore[no-untyped-call]
