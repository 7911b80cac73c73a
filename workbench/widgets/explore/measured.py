"""The sweep of what a builder or a dashboard has run: over whatever differed between the runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from workbench.analysis.sweeps.found import Sweep
from workbench.analysis.sweeps.grid import Grid, Place, make_grid
from workbench.analysis.sweeps.reading import Base, Row, read_point
from workbench.core.errors import ScenarioError
from workbench.core.result import Result
from workbench.scenario import Scenario
from workbench.scenario.fields import Field, fields_of
from workbench.schedules import Schedule
from workbench.widgets.explore.look import SCHEDULE

_ASIDE = Row({}, "this was not run", lasting=False)


class Measured(NamedTuple):
    """One run and what it was of."""

    scenario: Scenario
    schedule: Schedule
    result: Result


def sweep_of(runs: Sequence[Measured]) -> Sweep:
    """The sweep of some runs; points of its grid that were not run stand aside, and of two alike the later one counts.

    Raises
    ------
    ScenarioError
        If there are none.
    """
    if not runs:
        raise ScenarioError("nothing has been run here yet; press Start, or Measure below the curves.")
    from workbench.engine import run  # it brings torch, which is here by now

    base = Base(runs[0].scenario, runs[0].schedule, run)
    told = [_by_name(each) for each in runs]
    over = {name: _values(told, name) for name in _varied(told)}
    grid = make_grid(base.scenario, base.schedule, over or {SCHEDULE: [base.schedule]}, zipped=False)
    rows = dict.fromkeys(grid.places(), _ASIDE)
    for fields, each in zip(told, runs, strict=True):
        place = _place(grid, fields)
        rows[place] = read_point(replace(base, read=partial(_recorded, each.result)), grid.values(place))
    return Sweep.of(base, grid, rows)


def _recorded(result: Result, *_: object) -> Result:
    return result


def _varied(told: Sequence[dict[str, Field]]) -> list[str]:
    """Names of the fields that differ: those of a part, or the whole part where it is of another kind."""
    found = list[str]()
    for part in (name for name in told[0] if "." not in name):
        inside = [_under(part, fields) for fields in told]
        alike = part != SCHEDULE and all(each == inside[0] for each in inside)
        own = [name for name in inside[0] if _differs(told, name)] if alike else []
        own = [name for name in own if name.rpartition(".")[0] not in own]  # the link, rather than its directions
        found += own or ([part] if _differs(told, part) else [])
    return found


def _differs(told: Sequence[dict[str, Field]], name: str) -> bool:
    return len(_values(told, name)) > 1


def _values(told: Sequence[dict[str, Field]], name: str) -> list[Any]:
    """The values of a field, each once."""
    found = list[Any]()
    for fields in told:
        if fields[name].value not in found:
            found.append(fields[name].value)
    return found


def _by_name(run_: Measured) -> dict[str, Field]:
    return {field.name: field for field in fields_of(run_.scenario, run_.schedule)}


def _under(part: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{part}.")]


def _place(grid: Grid, fields: dict[str, Field]) -> Place:
    return tuple(axis.values.index(fields[axis.name].value) for axis in grid.axes)
