"""Paths of the data that ships with the project, and read-only mappings over its TOML catalogues."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from workbench.core.errors import CatalogueError

T = TypeVar("T")


def data_path(name: str) -> Path:
    """Path of a shipped data file: inside the installed package, or in the source tree's ``data/``."""
    package = Path(__file__).parents[1]
    installed = package / "data" / name
    return installed if installed.exists() else package.parent / "data" / name


def cache_path(name: str) -> Path:
    """Path of a file that this computer measured or made once: under XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-workbench" / name


def source_of(sources: Mapping[str, str], value: str) -> str:
    """Source of a value such as ``"gpu.flops.bf16"``: its own, or that of the nearest group it lies in, or ``all``.

    Raises
    ------
    CatalogueError
        If none of them is stated.
    """
    names = value.split(".")
    groups = [".".join(names[:count]) for count in range(len(names), 0, -1)]
    for key in (*groups, "all"):
        if key in sources:
            return sources[key]
    raise CatalogueError(f"the value {value} has no source; add one to the source table of its entry.")


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is most like the given one; case, spaces and dashes do not count."""
    names = {_letters(each): each for each in known}
    close = _closest(name, names)
    return f" (did you mean {names[close]!r}?)" if close else ""


def _letters(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _holds(name: str, parts: Iterable[str]) -> bool:
    return all(part in name for part in parts)


def _closest(name: str, names: Iterable[str]) -> str | None:
    """The closest of names that begin with the given one, else hold it, are held by it, or have its model numbers."""
    given = _letters(name)
    numbers = re.findall(r"[a-z]*\d[0-9a-z]{2,}", name.casefold())
    longer = [each for each in names if given and each.startswith(given)]
    around = [each for each in names if given and given in each]
    inside = sorted((each for each in names if each in given), key=len)[-1:]
    alike = [each for each in names if numbers and _holds(each, numbers)]
    for likely in (longer, around, inside, alike):
        if likely:
            return get_close_matches(given, likely, n=1, cutoff=0.0)[0]
    close = get_close_matches(given, names, n=1)
    return close[0] if close else None


class Catalogue(Mapping[str, T], Generic[T]):
    """Named entries of one TOML file, built on first use.

    Every table of the file is an entry; the sources of its values are in its ``source`` sub-table. An entry with
    ``same_as`` is a second name of another entry. `mend` ends the error on an unknown name.
    """

    def __init__(self, file: str, build: Callable[[str, dict[str, Any]], T], *, mend: str = "") -> None:
        self._file = file
        self._build = build
        self._mend = f" {mend}." if mend else ""

    @cached_property
    def _tables(self) -> dict[str, dict[str, Any]]:
        return tomllib.loads(data_path(f"catalogue/{self._file}").read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> T:
        if name not in self._tables:
            wanted = f"{name!r}{_suggestion(str(name), self._tables)}"
            known = ", ".join(sorted(self._tables))
            raise CatalogueError(f"{self._file} has no entry {wanted}; it has {known}.{self._mend}")
        table = self._tables[name]
        return self._build(name, self._tables[table["same_as"]] if "same_as" in table else table)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"Catalogue({', '.join(self)})"
