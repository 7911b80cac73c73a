"""Readings on disk: each is committed as it comes, under its key, and found there by the next sweep."""

from __future__ import annotations

import json
import sqlite3
import warnings
from collections.abc import Iterable
from pathlib import Path

from workbench.analysis.sweeps.reading import Row

_WAIT = 60.0
"""Time for which another sweep may hold the file [s]."""
_AT_ONCE = 500
"""Keys of one query."""


class Store:
    """Readings in one file, which several sweeps may use at once.

    A file that cannot be used gives a warning, and nothing is kept.

    Parameters
    ----------
    path : Path
        The file; it is made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=_WAIT)
            with self._file:
                self._file.execute("CREATE TABLE IF NOT EXISTS readings (key TEXT PRIMARY KEY, row TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def found(self, keys: Iterable[str]) -> dict[str, Row]:
        """The readings that are there."""
        rows = dict[str, Row]()
        wanted = list(keys)
        for first in range(0, len(wanted), _AT_ONCE):
            if self._file is None:
                break
            some = wanted[first : first + _AT_ONCE]
            query = f"SELECT key, row FROM readings WHERE key IN ({','.join('?' * len(some))})"
            try:
                rows |= {key: Row(**json.loads(text)) for key, text in self._file.execute(query, some)}
            except (sqlite3.Error, ValueError, TypeError) as error:
                self._give_up(error)
        return rows

    def add(self, rows: Iterable[tuple[str, Row]]) -> None:
        """Commit readings; one that is there is replaced."""
        if self._file is None:
            return
        texts = [(key, json.dumps(row._asdict())) for key, row in rows]
        try:
            with self._file:
                self._file.executemany("INSERT OR REPLACE INTO readings VALUES (?, ?)", texts)
        except sqlite3.Error as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: Exception) -> None:
        self.close()
        warnings.warn(
            f"{self._path} cannot be used ({error}), and readings of this sweep are not kept; mend or remove it, or "
            "give another file with store=...",
            RuntimeWarning,
            stacklevel=2,
        )
