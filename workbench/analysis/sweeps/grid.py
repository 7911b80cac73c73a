"""The grid of a sweep: one axis for each field, and the points that they make."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from reprlib import repr as short
from typing import Any

from workbench.core.display import short_name
from workbench.core.errors import ScenarioError
from workbench.core.units import is_number
from workbench.scenario import Scenario
from workbench.scenario.fields import Field, fields_of, parsed, with_field
from workbench.schedules import Schedule

ZIPPED = "point"
"""Name of the one dimension of zipped axes."""
_SPREADING = ("schedule", "scheduler", "machine")
"""Parts whose own fields can be swept together with them."""
Place = tuple[int, ...]
"""Number of a point along each dimension."""


@dataclass(frozen=True)
class Axis:
    """One field of a sweep, with its values.

    Attributes
    ----------
    name, short : str
        Dotted name of the field, and name of the axis in data sets and pictures.
    unit, meaning : str
        Unit of its numbers, and its meaning in one line.
    values : tuple
        The values that the field takes.
    labels : tuple of float or str
        The same as coordinates: numbers, or a text for each.
    """

    name: str
    short: str
    unit: str
    meaning: str
    values: tuple[Any, ...]
    labels: tuple[Any, ...]

    @property
    def numeric(self) -> bool:
        """True if the coordinates are numbers."""
        return all(is_number(label) for label in self.labels)

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Grid:
    """All points: every combination of the axes' values, or if they are zipped the first ones, the second ones, ..."""

    axes: tuple[Axis, ...]
    zipped: bool = False

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the dimensions."""
        return (ZIPPED,) if self.zipped else tuple(axis.short for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Points along each dimension."""
        return (len(self.axes[0]),) if self.zipped else tuple(map(len, self.axes))

    def places(self) -> Iterator[Place]:
        """Every point, the last axis first."""
        return itertools.product(*map(range, self.shape))

    def values(self, place: Place) -> dict[str, Any]:
        """The fields of a point with their values."""
        return {axis.name: axis.values[at] for axis, at in self.along(place)}

    def labels(self, place: Place) -> dict[str, Any]:
        """The coordinates of a point."""
        return {axis.short: axis.labels[at] for axis, at in self.along(place)}

    def along(self, place: Place) -> Iterator[tuple[Axis, int]]:
        """Each axis with the number of a point's value."""
        return zip(self.axes, place * len(self.axes) if self.zipped else place, strict=True)


def make_grid(scenario: Scenario, schedule: Schedule, over: Mapping[str, Any], *, zipped: bool) -> Grid:
    """The grid of some fields and their values, which are all checked here.

    Raises
    ------
    ScenarioError
        If there is no field, no value, one twice, no such field, or zipped axes are not of one length.
    """
    if not isinstance(over, Mapping) or not over:
        raise ScenarioError(
            f"a sweep goes over fields, as over={{'memory.kv_capacity': ['10GB', '20GB']}}, not {over!r}."
        )
    given = {name: _given(name, values) for name, values in over.items()}
    hosts = list(_hosts(scenario, schedule, given))
    names = _short_names([_field(hosts, name)[0] for name in given])
    axes = tuple(
        _axis(*_field(hosts, name), short_, values) for (name, values), short_ in zip(given.items(), names, strict=True)
    )
    if zipped and len({len(axis) for axis in axes}) > 1:
        told = " and ".join(f"{len(axis)} of {axis.name}" for axis in axes)
        raise ScenarioError(f"zipped fields go along together, but there are {told} values; give one of each a point.")
    return Grid(axes, zipped)


def _given(name: str, values: Any) -> dict[Any, Any]:
    """The values of a field with a label for each, if labels are given; else numbered."""
    if isinstance(values, Mapping):
        found = dict(values)
    elif isinstance(values, Iterable) and not isinstance(values, str):
        found = dict(enumerate(values))
    else:
        found = {0: values}
    if not found:
        raise ScenarioError(f"a sweep over {name!r} needs at least one value; give a list of them.")
    return found


def _hosts(
    scenario: Scenario, schedule: Schedule, given: Mapping[str, Mapping[Any, Any]]
) -> Iterator[tuple[Scenario, Schedule]]:
    """The scenario and schedule, and those with each value of a part that has fields of its own."""
    yield scenario, schedule
    for name in _SPREADING:
        for value in given.get(name, {}).values():
            yield with_field(scenario, schedule, name, value)


def _field(hosts: list[tuple[Scenario, Schedule]], name: str) -> tuple[Field, tuple[Scenario, Schedule]]:
    """A field, with a scenario and schedule that have it."""
    for host in hosts:
        for field in fields_of(*host):
            if field.name == name:
                return field, host
    parsed(*hosts[0], name, None)
    raise ScenarioError(f"{name!r} is no field of this scenario.")  # `parsed` has said more


def _axis(field: Field, host: tuple[Scenario, Schedule], short_: str, given: Mapping[Any, Any]) -> Axis:
    values = tuple(parsed(*host, field.name, value) for value in given.values())
    named = isinstance(next(iter(given)), str)
    labels = tuple(map(str, given)) if named else _labels(values)
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise ScenarioError(f"a sweep has {twice[0]!r} twice in {field.name!r}; give each value once.")
    return Axis(field.name, short_, field.unit, field.meaning, values, labels)


def _labels(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers as they are, else a text for each value; different parts of one name are numbered."""
    if all(is_number(value) for value in values):
        return values
    texts = [_text(value) for value in values]
    count = Counter[str]()
    found = list[str]()
    for place, text in enumerate(texts):
        count[text] += 1
        same = values[texts.index(text)] == values[place]
        found.append(text if same else f"{text} ({count[text]})")
    return tuple(found)


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    name = getattr(value, "name", None)
    if isinstance(name, str):
        return name
    return short_name(value) if is_dataclass(value) and _is_small(value) else short(value)


def _is_small(value: Any) -> bool:
    """True if the fields of a part make a short name."""
    return len(repr(value)) < 120


def _short_names(fields: list[Field]) -> list[str]:
    """Short names of fields; those of two that would be alike are told apart by the part."""
    count = Counter(field.short for field in fields)
    return [field.short if count[field.short] == 1 else field.name.replace(".", "_") for field in fields]
