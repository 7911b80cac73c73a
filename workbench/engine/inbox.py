"""Requests that join a run while it serves, and those that are cancelled, from any thread."""

from __future__ import annotations

import threading
from typing import Protocol

from workbench.core.errors import EngineError
from workbench.serving.iterations import Joined
from workbench.serving.loop import Called
from workbench.workload import Request


class Calls(Protocol):
    """Changes that other threads ask of a run, as the run's own thread takes them."""

    @property
    def waiting(self) -> bool:
        """True if there is something to take."""

    def take(self) -> Called:
        """All that was asked since the last time."""

    def close_if_none(self) -> bool:
        """Let no further request join, unless one has that was not taken; true if none has."""


class Inbox:
    """Requests that join a run, and those that are cancelled, until the run's own thread takes them.

    Parameters
    ----------
    requests : int
        Requests that the run begins with; the next one has this number.
    """

    def __init__(self, requests: int) -> None:
        self._lock = threading.Lock()
        self._joined = list[Joined]()
        self._cancelled = list[int]()
        self._closed = False
        self.requests = requests

    def join(self, request: Request, seconds: float) -> int:
        """Let a request be served that comes so many seconds after the start; its number.

        Raises
        ------
        EngineError
            If the run has ended.
        """
        with self._lock:
            if self._closed:
                raise EngineError("the run has ended and takes no further request; start another.")
            self._joined.append(Joined(request, seconds))
            self.requests += 1
            return self.requests - 1

    def cancel(self, request: int) -> None:
        """Let nobody wait for a request any more."""
        with self._lock:
            self._cancelled.append(request)

    @property
    def waiting(self) -> bool:
        """True if there is something to take."""
        return bool(self._joined or self._cancelled)

    def take(self) -> Called:
        """All that was asked since the last time."""
        with self._lock:
            called = Called(tuple(self._joined), tuple(self._cancelled))
            self._joined.clear()
            self._cancelled.clear()
        return called

    def close_if_none(self) -> bool:
        """Let no further request join, unless one has that was not taken; true if none has."""
        with self._lock:
            self._closed = self._closed or not self._joined
            return not self._joined

    def close(self) -> None:
        """Let no further request join."""
        with self._lock:
            self._closed = True
