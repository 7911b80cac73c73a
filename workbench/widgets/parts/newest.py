"""A worker thread that processes only the newest value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_QUIET = 10.0
"""Time without work after which a worker is at rest [s]."""


class Newest(Generic[T]):
    """A worker that calls `work(value, overtaken)` in a daemon thread with the newest value; older ones are dropped.

    `overtaken()` is true once a newer value waits or the work was cancelled: the work in progress may then return.
    `rest()` is called in the thread once there was no work for some seconds, and when the thread ends.
    """

    def __init__(
        self, work: Callable[[T, Callable[[], bool]], None], name: str, rest: Callable[[], None] = lambda: None
    ) -> None:
        self._work = work
        self._name = name
        self._rest = rest
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._busy = self._cancelled = self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, value: T) -> None:
        """Replace the waiting value by this one and return at once."""
        with self._changed:
            self._waiting = [value]
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()

    def cancel(self) -> None:
        """Drop the waiting value and cancel the work in progress."""
        with self._changed:
            self._waiting = []
            self._cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel the work in progress and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until no work is left; return False if that takes longer than `timeout` [s]."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy) or self._closed, timeout)

    def pause(self, seconds: float) -> None:
        """Wait in the work, for some time or until it is overtaken."""
        with self._changed:
            self._changed.wait_for(self._overtaken, seconds)

    def _overtaken(self) -> bool:
        return bool(self._waiting) or self._cancelled or self._closed

    def _loop(self) -> None:
        try:
            while (value := self._take()) is not None:
                self._do(value[0])
                if not self._comes_within(_QUIET):
                    self._rest()
        finally:
            self._rest()

    def _do(self, value: T) -> None:
        try:
            self._work(value, self._overtaken)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _comes_within(self, seconds: float) -> bool:
        """Wait for the next value; False if none comes within some time."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._waiting or self._closed, seconds))

    def _take(self) -> list[T] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            taken = self._waiting
            self._waiting = []
            self._busy = True
            self._cancelled = False
            return taken
