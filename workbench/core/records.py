"""Conversion of frozen dataclasses to plain values that JSON holds, and back by their annotations."""

from __future__ import annotations

import enum
import json
import types
from collections.abc import Mapping
from dataclasses import Field, field, fields, is_dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, Union, get_args, get_origin, get_type_hints

from workbench.core.errors import WorkbenchError
from workbench.core.units import is_number, is_whole

_LONGEST = 200
_KEY = "saved as"
LEFT_OUT = "left out"
"""Key of a field's metadata: True if `saved_repr` leaves it out at its default."""


def saved_as(key: str, default: float) -> Any:
    """A dataclass field with a default, whose key in saved records is not its name."""
    return field(default=default, metadata={_KEY: key})


def saved_repr(record: Any) -> str:
    """Text of a dataclass with its saved keys, without fields that are marked as left out and have their defaults.

    A scenario's digest, which is saved too, is made of such texts; that of a record without a newer field stays.
    """
    values = list[str]()
    for known in fields(record):
        value = getattr(record, known.name)
        if not (known.metadata.get(LEFT_OUT) and value == known.default):
            values.append(f"{_saved_key(known)}={value!r}")
    return f"{type(record).__qualname__}({', '.join(values)})"


def _saved_key(known: Field[Any]) -> str:
    key: str = known.metadata.get(_KEY, known.name)
    return key


def is_file(path: Path) -> bool:
    """True for a file that can be read to its end: no folder, no pipe, and no name that the system refuses."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """True for a folder; a name that the system refuses is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def reason(error: BaseException) -> str:
    """Message of an error, in one line of at most 200 characters; for an error that is not ours, with its type."""
    told = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
    line = " ".join(told.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def read_json(path: str | Path) -> Any:
    """The value that a JSON file holds.

    Raises
    ------
    ValueError
        If there is no such file, it is a pipe or a folder, cannot be read, or is not JSON in UTF-8 that Python's own
        reader can follow.
    """
    path = Path(path)
    if not is_file(path):
        raise ValueError(f"{path} is not there, or is no file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid JSON (it is nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error


def to_plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, tuples as lists, enumerations by their value, paths as text.

    Raises
    ------
    TypeError
        If the value holds something else.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if is_whole(value):
        return int(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {_saved_key(known): to_plain(getattr(value, known.name)) for known in fields(value)}
    raise TypeError(f"{value!r} cannot be kept as JSON; use numbers, text, tuples and dataclasses of these.")


def from_plain(kind: Any, value: Any) -> Any:
    """Inverse of `to_plain` for a value annotated as `kind`; fields that are missing take their defaults.

    Raises
    ------
    TypeError, ValueError, KeyError, AttributeError
        If the value is nothing of that kind.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, types.UnionType):
        chosen = [arg for arg in args if arg is not type(None)]
        return value if value is None or len(chosen) > 1 else from_plain(chosen[0], value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{short(value)} is no list")
        kinds = [args[0]] * len(value) if args[1:] == (...,) else args
        return tuple(from_plain(one, item) for one, item in zip(kinds, value, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        names = {_saved_key(known): known.name for known in fields(kind)}
        given = dict[str, Any]()
        for key, item in value.items():
            name = names.get(key, key)
            given[name] = from_plain(hints.get(name, Any), item)
        return kind(**given)
    if isinstance(kind, type) and issubclass(kind, enum.Enum | Path):
        return kind(value)
    if origin is Mapping:
        return {key: from_plain(args[1], item) for key, item in value.items()}
    if kind is float and not is_number(value):
        raise TypeError(f"{short(value)} is no number")
    if kind in (bool, int, str) and type(value) is not kind:
        raise TypeError(f"{short(value)} is no {kind.__name__}")
    return value
