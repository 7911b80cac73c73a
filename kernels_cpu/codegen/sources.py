"""The files on which compiled code depends, those that its module imports, and a digest of them and the settings."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import llvmlite
import numba

PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(r"^from (\.+)([\w.]*) import (\([^)]*\)|.+)$", re.MULTILINE)
"""An import when a module is loaded; those in functions and for type checkers alone are indented."""
_SETTINGS = re.compile(rb"(?<!>>> )parameters\(\)\.(\w+)")
"""A group of settings that a file reads, not in an example."""


@functools.cache
def digest_of(modules: frozenset[str]) -> str:
    """A digest of everything on which the code of functions of these modules depends.

    That is their files and those that they import, the groups of settings that these read, and the compilers' versions.

    Parameters
    ----------
    modules : frozenset of str
        Names of modules; one that is not of `kernels_cpu` depends on the whole package.
    """
    # Imported here, or every file that imports this one would depend on that one.
    from ..machine.parameters import Parameters, parameters

    found = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    files = set[Path]()
    for name in modules:
        files |= _needed(name)
    groups = set[str]()
    for file in sorted(files):
        text = _read(file)
        found.update(file.relative_to(PACKAGE).as_posix().encode() + text)
        groups |= {name.decode() for name in _SETTINGS.findall(text)}
    for group in sorted(groups.intersection(Parameters.GROUPS)):
        found.update(repr(getattr(parameters(), group)).encode())
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
