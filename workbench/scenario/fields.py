"""Fields of a scenario and its schedule by dotted names, such as ``memory.kv_capacity``: their list, reading, setting.

The names are those of the dataclasses themselves, and so are meanings and units, from their docstrings.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from workbench.core.errors import ScenarioError
from workbench.core.units import format_bytes, is_number, is_whole, parse_bytes
from workbench.hardware import Device, Link, Machine, machines
from workbench.models import ModelConfig, models
from workbench.scenario.scenario import Scenario
from workbench.schedules import Schedule
from workbench.workload.resizing import Sizes, resized, sizes

_LANES = ("gpu", "cpu", "link")
_NEEDS_OTHERS = ("count",)
"""Fields that mean nothing alone: memory and rates of a `Device` are those of all its GPUs or sockets together."""
_SECTION = re.compile(r"^(?:Parameters|Attributes)\n-+\n(.*?)(?=^\S[^\n]*\n-+$|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^(\w[\w, ]*?) : [^\n]*\n((?:[ \t]+[^\n]*\n?|\n)+)", re.MULTILINE)
_UNIT = re.compile(r"\s*\[([^\]]+)\]")
_SENTENCE_END = re.compile(r"(?<=\.) ")


class FieldKind(enum.Enum):
    """The values that a field takes."""

    NUMBER = "number"
    COUNT = "whole number"
    CHOICE = "choice"
    WHOLE = "whole part"


@dataclass(frozen=True)
class Field:
    """One field of a scenario or its schedule.

    Attributes
    ----------
    name : str
        Dotted name, such as ``machine.gpu.memory``.
    kind : FieldKind
        NUMBER and COUNT are numeric; a CHOICE is text, an enumeration or a bool; WHOLE is a part such as a machine.
    unit : str
        Unit of a number, such as ``B/s``; empty for counts and shares.
    meaning : str
        Meaning in one line.
    value : object
        Its value in this scenario and schedule.
    choices : tuple
        The values of an enumeration or a bool; empty for others.
    """

    name: str
    kind: FieldKind
    unit: str
    meaning: str
    value: Any
    choices: tuple[Any, ...] = ()

    @property
    def short(self) -> str:
        """The name without the part that it is of, such as ``kv_capacity``; of a machine with the lane."""
        first, *others = self.name.split(".")
        return "_".join(others if first == "machine" else others[-1:]) or first

    @property
    def numeric(self) -> bool:
        """True for numbers and counts."""
        return self.kind in (FieldKind.NUMBER, FieldKind.COUNT)


def fields_of(scenario: Scenario, schedule: Schedule) -> tuple[Field, ...]:
    """Every field that can be changed: those of the scenario, and the schedule with its own.

    Parameters
    ----------
    scenario : Scenario
    schedule : Schedule

    Returns
    -------
    tuple of Field
        Whole parts, such as ``machine``, each followed by its own fields, such as ``machine.gpu.memory``.
    """
    return tuple(entry.field for entry in _Parts(scenario, schedule).entries())


def field_of(scenario: Scenario, schedule: Schedule, name: str) -> Any:
    """The value of a field: bytes, seconds and tokens as numbers.

    Raises
    ------
    ScenarioError
        If there is no field of that name.
    """
    return _Parts(scenario, schedule).entry(name).field.value


def with_field(scenario: Scenario, schedule: Schedule, name: str, value: Any) -> tuple[Scenario, Schedule]:
    """Scenario and schedule with another value in one field; see `with_fields`."""
    return with_fields(scenario, schedule, {name: value})


def with_fields(scenario: Scenario, schedule: Schedule, values: Mapping[str, Any]) -> tuple[Scenario, Schedule]:
    """Scenario and schedule with other values in some fields, built once with all of them.

    Whole parts come first, so that ``machine`` and ``machine.link`` go together. Numbers may be text such as
    ``"70GB"``; models and machines may be names of the catalogue, and members of an enumeration their values.

    Parameters
    ----------
    scenario : Scenario
    schedule : Schedule
    values : mapping of str to object
        New values by dotted name.

    Raises
    ------
    ScenarioError
        If there is no field of such a name, or a value is none of that field.
    WorkbenchError
        If these values do not go together: the error of the scenario, the part or the schedule itself.

    Examples
    --------
    >>> with_fields(scenario, VSLPipe(), {"memory.kv_capacity": "70GB", "machine.link": 16e9})  # doctest: +SKIP
    """
    wholes = {name: value for name, value in values.items() if "." not in name}
    parts = _Parts(scenario, schedule)
    for name, value in wholes.items():
        parts.whole(name, parts.entry(name).parse(value))
    own = dict[str, dict[str, Any]]()
    for name, value in values.items():
        if name not in wholes:
            entry = parts.entry(name)
            found = entry.parse(value)
            if found != entry.field.value:
                part, _, rest = name.partition(".")
                own.setdefault(part, {})[rest] = found
    for part, changes in own.items():
        parts.change(part, changes)
    return parts.built()


def parsed(scenario: Scenario, schedule: Schedule, name: str, value: Any) -> Any:
    """A value in the form that `field_of` gives it back: ``"70GB"`` as 70e9.

    Raises
    ------
    ScenarioError
        If there is no field of that name, or the value is none of it.
    """
    return _Parts(scenario, schedule).entry(name).parse(value)


@dataclass(frozen=True)
class _Entry:
    """A field with the annotation by which its values are read."""

    field: Field
    hint: Any

    def parse(self, value: Any) -> Any:
        """A value in the form of the field."""
        try:
            return _parsed(value, self.hint, self.field.name)
        except (TypeError, ValueError) as error:
            raise ScenarioError(str(error)) from None


class _Parts:
    """The parts of a scenario, and its schedule, while they are changed."""

    def __init__(self, scenario: Scenario, schedule: Schedule) -> None:
        self._scenario = scenario
        self.schedule = schedule
        self.values = {known.name: getattr(scenario, known.name) for known in fields(Scenario)}
        self._changed = set[str]()

    def entries(self) -> Iterator[_Entry]:
        """All fields, each whole part before its own."""
        for name, part in self._all.items():
            yield from _entries_of(name, part)

    def entry(self, name: str) -> _Entry:
        """The field of a name.

        Raises
        ------
        ScenarioError
            If there is none; it names the nearest ones.
        """
        part = str(name).partition(".")[0]
        if part in self._all:
            for entry in _entries_of(part, self._all[part]):
                if entry.field.name == name:
                    return entry
        raise ScenarioError(_unknown(name, [entry.field.name for entry in self.entries()]))

    @property
    def _all(self) -> dict[str, Any]:
        return {**self.values, "schedule": self.schedule}

    def whole(self, name: str, value: Any) -> None:
        """Put another part in the place of one."""
        if name == "schedule":
            self.schedule = value
        elif value is not self.values[name]:
            self.values[name] = value
            self._changed.add(name)

    def change(self, part: str, changes: Mapping[str, Any]) -> None:
        """Change some fields of one part."""
        old = self.schedule if part == "schedule" else self.values[part]
        with_changes: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
            "machine": _machine_with,
            "workload": _workload_with,
        }
        self.whole(part, with_changes.get(part, _replaced)(old, changes))

    def built(self) -> tuple[Scenario, Schedule]:
        """The scenario, checked as a whole, and the schedule."""
        changes = {name: self.values[name] for name in self._changed}
        return (self._scenario.on(**changes) if changes else self._scenario), self.schedule


def _unknown(name: object, known: Sequence[str]) -> str:
    """The error on a name that no field has."""
    last = {each: each.rpartition(".")[2] for each in known}
    alike = [each for each in known if last[each] == str(name).rpartition(".")[2]]
    near = [*alike, *difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)]
    told = ", ".join(map(repr, dict.fromkeys(near[:3]))) or ", ".join(each for each in known if "." not in each)
    return f"{name!r} is no field of this scenario and schedule; give one such as {told}."


def _replaced(part: Any, changes: Mapping[str, Any]) -> Any:
    return replace(part, **changes)


def _workload_with(workload: Any, changes: Mapping[str, Any]) -> Any:
    return resized(workload, **{**sizes(workload)._asdict(), **changes})


def _machine_with(machine: Machine, changes: Mapping[str, Any]) -> Machine:
    """The machine with other values; a slower link is a throttled one, which `run` keeps to."""
    parts: dict[str, Any] = {"gpu": machine.gpu, "cpu": machine.cpu, "link": machine.link}
    if "link" in changes:
        parts["link"] = replace(machine.link, h2d=changes["link"], d2h=changes["link"])
    own = {name: value for name, value in changes.items() if name != "link"}
    for name, value in own.items():
        lane, *path = name.split(".")
        parts[lane] = _changed_at(parts[lane], path, value)
    link = parts["link"]
    slower = link.h2d < machine.link.h2d or link.d2h < machine.link.d2h
    found = replace(machine, **parts, throttled=machine.throttled or slower)
    return replace(found, sources=_sources(machine, found))


def _changed_at(part: Any, path: list[str], value: Any) -> Any:
    """A device, link or interconnect with another value in one field."""
    name, *rest = path
    if not rest:
        return replace(part, **{name: value})
    if name == "flops":
        rates = tuple((dtype, value if dtype == rest[0] else rate) for dtype, rate in part.flops)
        return replace(part, flops=rates)
    return replace(part, **{name: replace(getattr(part, name), **{rest[0]: value})})


def _sources(old: Machine, new: Machine) -> dict[str, str]:
    """The sources of a machine's values; those of changed ones say what they were."""
    before, after = _rates(old), _rates(new)
    changed = {name: value for name, value in before.items() if after[name] != value}
    return old.sources_with({name: f"set on purpose, from {format_bytes(value)}" for name, value in changed.items()})


def _rates(machine: Machine) -> dict[str, float]:
    found = dict[str, float]()
    for lane, device in (("gpu", machine.gpu), ("cpu", machine.cpu)):
        found |= {f"{lane}.memory": device.memory, f"{lane}.bandwidth": device.bandwidth}
        found |= {f"{lane}.flops.{dtype}": rate for dtype, rate in device.flops}
    return found | {"link.h2d": machine.link.h2d, "link.d2h": machine.link.d2h}


def _entries_of(name: str, part: Any) -> Iterator[_Entry]:
    """A part, and its own fields."""
    hint = Schedule if name == "schedule" else _hints(Scenario)[name]
    yield _Entry(Field(name, FieldKind.WHOLE, "", _first_line(_members(hint)[0]), part), hint)
    if isinstance(part, Machine):
        for lane in _LANES:
            yield from _of_lane(f"{name}.{lane}", getattr(part, lane))
    elif name == "workload":
        yield from _of_class(name, Sizes, sizes(part)._asdict())
    elif name in ("memory", "scheduler", "schedule") and is_dataclass(part):
        yield from _of_part(name, part)


def _of_lane(prefix: str, lane: Device | Link) -> Iterator[_Entry]:
    """Fields of a device or of the link, whose own rate is that of both directions."""
    if isinstance(lane, Link):
        meaning = "Rate of the link in both directions, or of the slower one."
        yield _Entry(Field(prefix, FieldKind.NUMBER, "B/s", meaning, min(lane.h2d, lane.d2h)), float)
    for entry in _of_part(prefix, lane):
        if entry.field.name.rpartition(".")[2] not in _NEEDS_OTHERS:
            yield entry
    if isinstance(lane, Device):
        meaning, unit = _described(Device, "flops")
        for dtype, rate in lane.flops:
            yield _Entry(Field(f"{prefix}.flops.{dtype}", FieldKind.NUMBER, unit, meaning, rate), float)
        if lane.between is not None:
            yield from _of_part(f"{prefix}.between", lane.between)


def _of_part(prefix: str, part: Any) -> Iterator[_Entry]:
    """Fields of a dataclass."""
    return _of_class(prefix, type(part), {known.name: getattr(part, known.name) for known in fields(part)})


def _of_class(prefix: str, kind: type, values: Mapping[str, Any]) -> Iterator[_Entry]:
    """Fields of a class that are numbers or choices; plain text names things and is left out."""
    hints = _hints(kind)
    for name, value in values.items():
        hint = hints.get(name, type(value))
        found = _kind(hint)
        if found is None:
            continue
        meaning, unit = _described(kind, name)
        meaning = meaning or _first_line(_members(hint)[0])
        if found is FieldKind.NUMBER and isinstance(value, str):
            value = parse_bytes(value)
        yield _Entry(Field(f"{prefix}.{name}", found, unit, meaning, value, _choices(hint)), hint)


@cache
def _members(hint: Any) -> tuple[Any, ...]:
    """The classes of a union, or the one class."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@cache
def _kind(hint: Any) -> FieldKind | None:
    """The kind of a field that is no whole part; None if it cannot be changed alone."""
    members = _members(hint)
    if float in members:
        return FieldKind.NUMBER
    if int in members:
        return FieldKind.COUNT
    if _choices(hint) or members == (str, NoneType):
        return FieldKind.CHOICE
    return None


@cache
def _choices(hint: Any) -> tuple[Any, ...]:
    for member in _members(hint):
        if member is bool:
            return (False, True)
        if isinstance(member, type) and issubclass(member, enum.Enum):
            return tuple(member)
    return ()


def _parsed(value: Any, hint: Any, name: str) -> Any:
    """A value in the form of its annotation.

    Raises
    ------
    ValueError
        If it is none.
    """
    members = _members(hint)
    if value is None and NoneType in members:
        return None
    if float in members and isinstance(value, str):
        return parse_bytes(value, what=name)
    if float in members and is_number(value):
        return int(value) if is_whole(value) else float(value)
    if int in members and is_whole(value):
        return int(value)
    for kind, catalogue in ((ModelConfig, models), (Machine, machines)):
        if kind in members and isinstance(value, str):
            return catalogue[value]
    for choice in _choices(hint):
        if value is choice or (isinstance(choice, enum.Enum) and value == choice.value):
            return choice
    if str in members and float not in members and isinstance(value, str):
        return value
    if not {float, int} & set(members) and not _choices(hint) and _fits(value, members):
        return value
    raise ValueError(f"{value!r} is no value of {name}; give {_wanted(hint)}.")


def _fits(value: Any, members: tuple[Any, ...]) -> bool:
    """True for a whole part; the scenario itself checks a scheduler, which needs no base class."""
    kinds = [kind for kind in members if isinstance(kind, type) and not getattr(kind, "_is_protocol", False)]
    return not kinds or isinstance(value, tuple(kinds))


def _wanted(hint: Any) -> str:
    """The values that a field takes, in words."""
    members = _members(hint)
    choices = [repr(each.value if isinstance(each, enum.Enum) else each) for each in _choices(hint)]
    words = choices or [_WORDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in members]
    return " or ".join(dict.fromkeys(words))


_WORDS = {float: "a number or text such as '16GB'", int: "a whole number", str: "text", NoneType: "None"}


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The annotations of a class; none of one whose names are not known here, as in a notebook's own class."""
    try:
        return get_type_hints(kind)
    except NameError:
        return {}


@cache
def _first_line(kind: Any) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


@cache
def _described(kind: type, name: str) -> tuple[str, str]:
    """Meaning and unit of a field, from the docstring of the first class that describes it; empty if none does."""
    for each in kind.__mro__:
        for section in _SECTION.findall(f"{inspect.cleandoc(each.__doc__ or '')}\n"):
            for names, text in _ENTRY.findall(section):
                words = " ".join(text.split())
                if name in names.replace(",", " ").split() and not words.startswith("See "):
                    unit = _UNIT.search(words)
                    return _SENTENCE_END.split(_UNIT.sub("", words, count=1))[0], unit.group(1) if unit else ""
    return "", ""


__all__ = ["Field", "FieldKind", "field_of", "fields_of", "parsed", "with_field", "with_fields"]
