"""The data set of a sweep: coordinates with units, a variable for each number, and the reasons of what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from workbench.analysis.sweeps.grid import Axis, Grid, Place
from workbench.analysis.sweeps.keys import reader_name
from workbench.analysis.sweeps.reading import VARIABLES, Base, Row
from workbench.core.result import versions

if TYPE_CHECKING:
    import xarray


def dataset_of(base: Base, grid: Grid, rows: Mapping[Place, Row]) -> xarray.Dataset:
    """The data set of all readings; variables that no point has are left out.

    Parameters
    ----------
    base : Base
    grid : Grid
    rows : mapping of tuple of int to Row
        The reading of every point.
    """
    import xarray

    variables = dict[str, xarray.Variable]()
    for name, about in VARIABLES.items():
        numbers = np.full(grid.shape, math.nan)
        for place, row in rows.items():
            numbers[place] = row.numbers.get(name, math.nan)
        if not np.isnan(numbers).all():
            better = "more" if about.more else "less"
            attributes = {"units": about.unit, "long_name": about.meaning, "better": better}
            variables[name] = xarray.Variable(grid.dims, numbers, attributes)
    problems = np.full(grid.shape, "", dtype=object)
    for place, row in rows.items():
        problems[place] = row.problem
    variables["problem"] = xarray.Variable(grid.dims, problems.astype(str), {"long_name": "reason without a reading"})
    coordinates = {axis.short: _coordinate(axis, grid) for axis in grid.axes}
    sources = sorted({row.source for row in rows.values() if row.source})
    attributes = {
        "source": ", ".join(sources),
        "reader": reader_name(base.read) or str(getattr(base.read, "__qualname__", base.read)),
        "machine": base.scenario.machine.name,
        "versions": json.dumps(versions()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return xarray.Dataset(variables, coordinates, attributes)


def _coordinate(axis: Axis, grid: Grid) -> xarray.Variable:
    import xarray

    dim = grid.dims[0] if grid.zipped else axis.short
    labels = np.array(axis.labels, dtype=np.float64 if axis.numeric else str)
    return xarray.Variable((dim,), labels, {"units": axis.unit, "long_name": axis.meaning, "field": axis.name})
