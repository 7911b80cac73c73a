"""Records that are measured once and kept in a file; if the file cannot be used, they are measured again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from workbench.core.errors import WorkbenchError

T = TypeVar("T")

_NOT_WRITTEN: dict[Path, Any] = {}
"""Records that could not be written, kept until this process ends because measuring takes a minute. This is the only
state of the module."""


def kept(
    path: Path,
    make: Callable[[], T],
    *,
    load: Callable[[Path], T],
    save: Callable[[T, Path], object],
    what: str,
    refresh: bool = False,
) -> T:
    """Read a record from its file; make and save it first if there is no file or `refresh` is set.

    A file that cannot be read is written anew. If it cannot be written, this process keeps the record. Both give a
    warning.

    Parameters
    ----------
    path : Path
    make : callable
        Makes the record.
    load : callable
        Reads it from a file, or raises an `OSError` or a `WorkbenchError`.
    save : callable
        Writes it, or raises an `OSError`.
    what : str
        Name of the record in the warning.
    refresh : bool
    """
    if not refresh and path in _NOT_WRITTEN:
        found: T = _NOT_WRITTEN[path]
        return found
    problem = ""
    try:
        if not refresh and path.exists():
            return load(path)
    except (OSError, WorkbenchError) as error:
        problem = f"{what} could not be read and was measured again ({error})"
    made = make()
    try:
        save(made, path)
        made = load(path)  # this call returns what every later call will read
        _NOT_WRITTEN.pop(path, None)
    except (OSError, WorkbenchError) as error:
        _NOT_WRITTEN[path] = made
        problem = (
            f"{path} cannot be written ({error}), and {what} will be measured again in every process; mend the file or "
            "its folder, or set XDG_CACHE_HOME to another one"
        )
    if problem:
        warnings.warn(f"{problem}.", RuntimeWarning, stacklevel=3)
    return made
