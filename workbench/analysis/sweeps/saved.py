"""Sweeps as netCDF files: the data set, and the scenario, schedule and axes beside it as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.analysis.sweeps.grid import Axis, Grid
from workbench.analysis.sweeps.keys import reader_name
from workbench.analysis.sweeps.reading import Base, Reader, Row
from workbench.core.errors import ScenarioError
from workbench.core.records import from_plain, is_file, reason, to_plain
from workbench.core.result import Result
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.scenario.record import part_from, plain_part
from workbench.schedules import Schedule
from workbench.simulate import simulate

if TYPE_CHECKING:
    from workbench.analysis.sweeps.found import Sweep

_FORMAT = "sweep 1"
_KEY = "moe_workbench"
_PARTS = ("pipeline", "model", "machine", "memory", "workload", "scheduler", "routing", "schedule")


def save(sweep: Sweep, path: Path) -> Path:
    """Write a sweep.

    Raises
    ------
    ScenarioError
        If it has something that a file cannot hold, such as operations of the user's own.
    """
    base = sweep.base
    record = {
        "format": _FORMAT,
        "scenario": base.scenario.to_dict(),
        "schedule": plain_part("schedule", base.schedule),
        "reader": reader_name(base.read) or str(base.read),
        "zipped": sweep.grid.zipped,
        "axes": [_plain_axis(axis) for axis in sweep.grid.axes],
        "rows": [sweep.rows[place]._asdict() for place in sweep.grid.places()],
    }
    sweep.dataset.assign_attrs({_KEY: json.dumps(record)}).to_netcdf(path, engine="scipy")
    return path


def load(path: Path) -> dict[str, Any]:
    """The fields of a sweep that `save` wrote.

    Raises
    ------
    ScenarioError
        If the file is missing or holds no sweep.
    """
    import xarray

    if not is_file(path):
        raise ScenarioError(f"{path} is not there, or is no file; give one that Sweep.save wrote.")
    try:
        dataset = xarray.load_dataset(path, engine="scipy")
        record = json.loads(dataset.attrs.pop(_KEY))
        if record["format"] != _FORMAT:
            raise ScenarioError(f"{path} was written in another format; this version reads {_FORMAT!r}.")
        grid = Grid(tuple(map(_axis_from, record["axes"])), record["zipped"])
        schedule = part_from("schedule", record["schedule"])
        rows = dict(zip(grid.places(), (Row(**row) for row in record["rows"]), strict=True))
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ScenarioError(f"{path} is no sweep ({reason(error)}); save it again.") from error
    scenario = Scenario.from_dict(record["scenario"], f"the scenario of {path}")
    return {"dataset": dataset, "grid": grid, "base": Base(scenario, schedule, _reader(record["reader"])), "rows": rows}


def _plain_axis(axis: Axis) -> dict[str, Any]:
    values = [plain_part(axis.name, value) if axis.name in _PARTS else to_plain(value) for value in axis.values]
    return {**to_plain(replace(axis, values=())), "values": values}


def _axis_from(plain: dict[str, Any]) -> Axis:
    values = tuple(part_from(plain["name"], each) if plain["name"] in _PARTS else each for each in plain["values"])
    axis: Axis = from_plain(Axis, {**plain, "values": []})
    return replace(axis, values=values)


@dataclass(frozen=True)
class _Absent:
    """The reader of a saved sweep that a file cannot hold."""

    name: str

    def __call__(self, scenario: Scenario, schedule: Schedule) -> Result:
        raise ScenarioError(f"this sweep was read by {self.name}, which no file holds; read its scenario yourself.")


def _reader(name: str) -> Reader:
    for known in (bound, simulate):
        if name == reader_name(known):
            return known
    return _Absent(name)
