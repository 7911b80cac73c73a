"""The result of a sweep: a data set with named axes, its best points, fronts, pictures and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.analysis.sweeps.dataset import dataset_of
from workbench.analysis.sweeps.grid import Grid, Place
from workbench.analysis.sweeps.reading import VARIABLES, Base, Row
from workbench.core.display import escaped
from workbench.core.errors import ScenarioError
from workbench.core.result import Result
from workbench.core.units import format_quantity
from workbench.scenario import Scenario
from workbench.schedules import Schedule

if TYPE_CHECKING:
    import pandas
    import xarray
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """One point of a sweep, ready to be read again.

    Attributes
    ----------
    labels : mapping of str to float or str
        Its coordinates.
    numbers : mapping of str to float
        What the sweep keeps of it; see `workbench.analysis.sweeps.reading.VARIABLES`.
    problem : str
        The reason why it was set aside; empty if it was read.
    """

    labels: Mapping[str, Any]
    numbers: Mapping[str, float]
    problem: str
    _base: Base = field(repr=False)
    _values: Mapping[str, Any] = field(repr=False)
    _row: Row = field(repr=False)
    _units: tuple[str, ...] = field(repr=False)

    @classmethod
    def of(cls, base: Base, grid: Grid, place: Place, row: Row) -> Point:
        """The point at a place of a grid, with its reading."""
        units = tuple(axis.unit for axis in grid.axes)
        return cls(grid.labels(place), row.numbers, row.problem, base, grid.values(place), row, units)

    @cached_property
    def _made(self) -> tuple[Scenario, Schedule]:
        return self._base.at(self._values)

    @property
    def scenario(self) -> Scenario:
        """The scenario of the point."""
        return self._made[0]

    @property
    def schedule(self) -> Schedule:
        """The schedule of the point."""
        return self._made[1]

    @cached_property
    def result(self) -> Result:
        """The whole result: the recorded one of a measurement, else read again, which gives the same.

        Raises
        ------
        WorkbenchError
            If the point was set aside.
        """
        if self._row.result is not None:
            return Result.from_dict(dict(self._row.result), "this point of the sweep")
        return self._base.read(self.scenario, self.schedule)

    def __str__(self) -> str:
        at = ", ".join(f"{name} {label}" for name, label in self._told.items())
        if self.problem:
            return f"{at}: {self.problem}"
        return f"{at}: {', '.join(_in_words(name, value) for name, value in self.numbers.items())}"

    @property
    def _told(self) -> dict[str, str]:
        """The coordinates in words."""
        pairs = zip(self.labels.items(), self._units, strict=True)
        return {name: each if isinstance(each, str) else format_quantity(each, unit) for (name, each), unit in pairs}

    def numbers_of(self, variables: Sequence[str]) -> tuple[float, ...]:
        """Some of its numbers."""
        return tuple(self.numbers[name] for name in variables)

    def brief(self, variable: str) -> str:
        """The coordinates, and one number or the beginning of the problem."""
        at = ", ".join(self._told.values())
        told = shorten(self.problem, 160) if self.problem else _in_words(variable, self.numbers[variable])
        return f"{told} ({at})"


@dataclass(frozen=True)
class Front:
    """The points of which none is better in all of some variables.

    Attributes
    ----------
    variables : tuple of str
    points : tuple of Point
        The front, the best in the first variable first.
    """

    variables: tuple[str, ...]
    points: tuple[Point, ...]
    _sweep: Sweep = field(repr=False)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per point: its coordinates and the variables."""
        import pandas

        numbers = (dict(zip(self.variables, point.numbers_of(self.variables), strict=True)) for point in self.points)
        rows = [{**point.labels, **those} for point, those in zip(self.points, numbers, strict=True)]
        return pandas.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot all points of the sweep over the first two variables, and the front as a line."""
        from workbench.plots.sweeps import plot_front

        names = self.variables[:2]
        cloud = [point.numbers_of(names) for point in self._sweep.read(names)]
        line = sorted(point.numbers_of(names) for point in self.points)
        return plot_front(cloud, line, [VARIABLES[name] for name in names], ax)


@dataclass(frozen=True)
class Sweep:
    """Readings of all points.

    Attributes
    ----------
    dataset : xarray.Dataset
        A dimension and a coordinate per field, or the dimension ``point`` if they are zipped; a variable for each
        number, NaN where a point was set aside, whose reason is in ``problem``.
    grid : Grid
    base : Base
        Scenario, schedule and reader from which all points are made.
    rows : mapping of tuple of int to Row
        The reading of every point.
    """

    dataset: xarray.Dataset
    grid: Grid
    base: Base = field(repr=False)
    rows: Mapping[Place, Row] = field(repr=False)

    @classmethod
    def of(cls, base: Base, grid: Grid, rows: Mapping[Place, Row]) -> Sweep:
        """The sweep of these readings."""
        return cls(dataset_of(base, grid, rows), grid, base, rows)

    @property
    def points(self) -> tuple[Point, ...]:
        """All points, the last axis first."""
        return tuple(Point.of(self.base, self.grid, place, self.rows[place]) for place in self.grid.places())

    @property
    def problems(self) -> tuple[Point, ...]:
        """The points that were set aside."""
        return tuple(point for point in self.points if point.problem)

    def read(self, variables: Sequence[str]) -> list[Point]:
        """The points that were read and have all of these variables.

        Raises
        ------
        ScenarioError
            If there is no such variable, or no such point.
        """
        for name in variables:
            if name not in VARIABLES:
                raise ScenarioError(f"a sweep has no {name!r}; it has {', '.join(self._known())}.")
        found = [point for point in self.points if not point.problem and set(variables) <= set(point.numbers)]
        if not found:
            known = ", ".join(name for name in self._known())
            every = len(self.problems) == len(self.rows)
            why = self.problems[0].problem if every else f"none has {' and '.join(variables)}; they have {known}."
            raise ScenarioError(f"no point of the sweep can be chosen: {why}")
        return found

    def _known(self) -> list[str]:
        there = set[str]().union(*(row.numbers for row in self.rows.values()))
        return [name for name in VARIABLES if name in there]

    def best(self, variable: str = "gen_tok_s") -> Point:
        """The point with the most tokens per second, or the least of a time, a memory, an energy or a price.

        Raises
        ------
        ScenarioError
            If there is no such variable, or every point was set aside.
        """
        sign = 1 if VARIABLES.get(variable, VARIABLES["gen_tok_s"]).more else -1
        return max(self.read([variable]), key=lambda point: sign * point.numbers[variable])

    def pareto(self, *variables: str) -> Front:
        """The points of which none is at least as good in all of these variables and better in one.

        Parameters
        ----------
        *variables : str
            At least two, such as ``"gen_tok_s", "ttft", "gpu_memory_needed"``.

        Raises
        ------
        ScenarioError
            If there are fewer, or no point has them all.
        """
        if len(set(variables)) < 2:
            raise ScenarioError(
                f"a front needs two variables or more, such as 'gen_tok_s' and 'ttft', not {variables}."
            )
        points = self.read(variables)
        signs = np.array([1 if VARIABLES[name].more else -1 for name in variables])
        scores = signs * np.array([point.numbers_of(variables) for point in points])
        kept = [point for point, score in zip(points, scores, strict=True) if not _beaten(score, scores)]
        first = variables[0]
        return Front(variables, tuple(sorted(kept, key=lambda point: -signs[0] * point.numbers[first])), self)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per point: its coordinates, its numbers and its problem."""
        return self.dataset.to_dataframe().reset_index()

    def plot(
        self, x: str | None = None, y: str | None = None, value: str = "gen_tok_s", ax: Axes | None = None
    ) -> list[Axes]:
        """Plot one variable: lines over one numeric axis, a heat map over two, small multiples over the others.

        Parameters
        ----------
        x, y : str, optional
            Axes of the picture; by default the numeric ones, in order. With a `y` it is a heat map.
        value : str
            The variable.
        ax : Axes, optional
            Where to draw a picture that has no small multiples.

        Returns
        -------
        list of Axes
            One for each panel.

        Raises
        ------
        ScenarioError
            If there is no such axis or variable, or more than two axes would be left for small multiples.
        """
        from workbench.plots.sweeps import plot_sweep

        self.read([value])
        return plot_sweep(self.dataset, x, y, value, ax)

    def save(self, path: str | Path) -> Path:
        """Write as netCDF, with scenario and schedule.

        Raises
        ------
        ScenarioError
            If it has something that a file cannot hold, such as operations of the user's own.
        """
        from workbench.analysis.sweeps.saved import save

        return save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """Read a sweep written by `save`.

        Raises
        ------
        ScenarioError
            If the file is missing or holds no sweep, or its scenario cannot be read.
        """
        from workbench.analysis.sweeps.saved import load

        return cls(**load(Path(path)))

    def __str__(self) -> str:
        sizes = " x ".join(f"{size} {dim}" for dim, size in zip(self.grid.dims, self.grid.shape, strict=True))
        told = [f"sweep of {sizes}"]
        if len(self.problems) < len(self.rows):
            told.append(f"at best {self.best().brief('gen_tok_s')}")
        if self.problems:
            told.append(f"{len(self.problems)} of {len(self.rows)} points set aside: {self.problems[0].brief('')}")
        return "; ".join(told)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{escaped(str(self))}</p>{self.dataset._repr_html_()}"


def _in_words(name: str, value: float) -> str:
    return f"{VARIABLES[name].meaning} {format_quantity(float(f'{value:.4g}'), VARIABLES[name].unit)}"


def _beaten(score: npt.NDArray[np.float64], scores: npt.NDArray[np.float64]) -> bool:
    """True if another point is at least as good in all variables and better in one."""
    return bool(((scores >= score).all(axis=1) & (scores > score).any(axis=1)).any())
