"""Where the data that ships with the project lies, and read-only mappings over its TOML catalogues."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from workbench.errors import CatalogueError

T = TypeVar("T")


def data_path(name: str) -> Path:
    """Path of a shipped data file: inside the installed package, or in the source tree's ``data/``."""
    package = Path(__file__).parent
    installed = package / "data" / name
    return installed if installed.exists() else package.parent / "data" / name


def cache_path(name: str) -> Path:
    """Path for what this computer measured or made once: under XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-workbench" / name


class Catalogue(Mapping[str, T], Generic[T]):
    """Named entries of one TOML file, built on first use.

    Every table of the file is an entry; its values carry their sources in a ``source`` sub-table.
    """

    def __init__(self, file: str, build: Callable[[str, dict[str, Any]], T]) -> None:
        self._file, self._build = file, build

    @cached_property
    def _tables(self) -> dict[str, dict[str, Any]]:
        return tomllib.loads(data_path(f"catalogue/{self._file}").read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> T:
        if name not in self._tables:
            raise CatalogueError(f"{self._file} has no entry {name!r}; it has {', '.join(sorted(self._tables))}.")
        return self._build(name, self._tables[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"Catalogue({', '.join(self)})"
