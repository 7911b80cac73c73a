"""Frozen dataclasses as plain values that JSON holds, and back; their annotations say what the values were."""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, tuples as lists, enumerations by their value, paths as text.

    Raises
    ------
    TypeError
        If something else is in there.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, Integral):
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
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    raise TypeError(f"{value!r} cannot be kept as JSON; use numbers, text, tuples and dataclasses of these.")


def from_plain(kind: Any, value: Any) -> Any:
    """Inverse of `to_plain` for a value annotated as `kind`; fields that are missing take their defaults.

    Raises
    ------
    TypeError, ValueError, KeyError, AttributeError
        If the value is nothing of that kind.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        chosen = [arg for arg in args if arg is not type(None)]
        return value if value is None or len(chosen) > 1 else from_plain(chosen[0], value)
    if origin is tuple:
        kinds = [args[0]] * len(value) if args[1:] == (...,) else args
        return tuple(from_plain(one, item) for one, item in zip(kinds, value, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        known = get_type_hints(kind)
        return kind(**{name: from_plain(known.get(name, Any), item) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum | Path):
        return kind(value)
    if origin is Mapping:
        return {key: from_plain(args[1], item) for key, item in value.items()}
    if kind is float and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TypeError(f"{value!r} is no number")
    if kind in (bool, int, str) and type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
