"""A dictionary of the newest entries."""

from __future__ import annotations

from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dictionary of at most so many entries, for several threads; the oldest entry goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries = dict[K, V]()
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        """The value of a key, or None."""
        return self._entries.get(key)

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            if len(self._entries) > self._most:
                del self._entries[next(iter(self._entries))]

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()
