"""The files on which compiled code depends, those that its module imports, and a digest of them and the settings."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(r"^from (\.+)([\w.]*) import (\([^)]*\)|.+)$", re.MULTILINE)
"""An import when a module is loaded; those in functions and for type checkers alone are indented."""


def digest_of(modules: Iterable[str]) -> str:
    """A digest of everything on which the code of functions of these modules depends.

    Parameters
    ----------
    modules : iterable of str
        Names of modules; one that is not of `kernels_cpu` depends on the whole package.
    """
    from ..machine.parameters import parameters  # which is itself a file on which much depends

    found = hashlib.sha256(repr(parameters()).encode())
    files = set[Path]()
    for name in modules:
        files |= _needed(name)
    for file in sorted(files):
        found.update(file.relative_to(PACKAGE).as_posix().encode() + _read(file))
    return found.hexdigest()


@functools.cache
def _read(file: Path) -> bytes:
    return file.read_bytes()


@functools.cache
def _needed(module: str) -> frozenset[Path]:
    """The files that a module imports, itself included."""
    package, _, name = module.partition(".")
    start = PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
    if package != PACKAGE.name or not start.exists():
        return frozenset(PACKAGE.rglob("*.py"))
    found = set[Path]()
    waiting = [start]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imports(file)
    return frozenset(found)


@functools.cache
def _imports(file: Path) -> tuple[Path, ...]:
    return tuple(_imported(file))


def _imported(file: Path) -> Iterator[Path]:
    """The files of the package that a file imports."""
    for dots, name, names in _IMPORT.findall(_read(file).decode()):
        target = file.parents[len(dots) - 1].joinpath(*filter(None, name.split(".")))
        if target.is_dir():
            inside = [target / f"{each}.py" for each in re.findall(r"\w+", names)]
            yield from (each for each in (target / "__init__.py", *inside) if each.exists())
        else:
            yield target.with_suffix(".py")
