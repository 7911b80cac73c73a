"""Tokens of a run in the order in which they come, followed by any number of readers in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Protocol


class Listener(Protocol):
    """Somebody who is told every token as soon as it is sampled."""

    def add(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Pairs of a request's number and its next token id."""


class TokenLog:
    """Pairs of a request's number and its next token id. Writing waits for no reader; each reader sees all pairs."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []
        self._ended = False
        self._changed = threading.Condition()

    def add(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Write pairs down, and wake those who wait for them."""
        with self._changed:
            self._pairs.extend(pairs)
            self._changed.notify_all()

    def end(self) -> None:
        """Let every reader end behind the last pair."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def follow(self) -> Iterator[tuple[int, int]]:
        """All pairs from the first one on, each as soon as it is there, until `end`."""
        read = 0
        while True:
            with self._changed:  # held for no longer than a look
                while not self._ended and len(self._pairs) == read:
                    self._changed.wait()
            fresh = self._pairs[read:]
            if not fresh:
                return
            yield from fresh
            read += len(fresh)
