"""A look at a grid of points: which axes the picture has, which number it shows, and which point is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.analysis.sweeps.grid import Axis, Grid, Place
from workbench.analysis.sweeps.reading import VARIABLES, Base
from workbench.core.errors import ScenarioError
from workbench.scenario.fields import field_of

SCHEDULE = "schedule"
Matrix = tuple[tuple[Place, ...], ...]
"""Points of a picture: rows of a heat map, or lines, each from the left to the right."""


@dataclass(frozen=True)
class Look:
    """A picture of a grid: its axes, its number and the chosen point.

    Attributes
    ----------
    x : str
        Short name of the axis to the right.
    y : str
        That of the axis upward, which makes a heat map; empty for curves.
    value : str
        The number that is drawn; one of `VARIABLES`.
    at : tuple of int
        The chosen point; the axes that are not drawn are where it is.
    """

    x: str
    y: str
    value: str
    at: Place


def first_look(grid: Grid, base: Base, *, x: str = "", y: str = "", value: str = "gen_tok_s") -> Look:
    """The look that a view begins with: curves over the first numeric axis, at the scenario's own values.

    Raises
    ------
    ScenarioError
        If there is no such axis or number, or both axes are the same.
    """
    numeric = [axis.short for axis in grid.axes if axis.numeric and len(axis) > 1]
    x = x or next((name for name in numeric if name != y), grid.axes[0].short)
    for name in filter(None, (x, y)):
        axis_of(grid, name)
    if y and (grid.zipped or x == y):
        why = "its fields go along together" if grid.zipped else f"both are {x!r}"
        raise ScenarioError(f"a heat map takes two axes of the grid, and {why}; leave y out.")
    if value not in VARIABLES:
        raise ScenarioError(f"a point has no {value!r}; it has {', '.join(VARIABLES)}.")
    at = (0,) if grid.zipped else tuple(_own_place(axis, base) for axis in grid.axes)
    return Look(x, y, value, at)


def _own_place(axis: Axis, base: Base) -> int:
    """Number of the value that the scenario has itself; that in the middle if none is."""
    try:
        own = field_of(base.scenario, base.schedule, axis.name)
    except ScenarioError:  # a field of another machine, say
        return 0
    if own in axis.values:
        return axis.values.index(own)
    return len(axis) // 2 if axis.numeric else 0


def axis_of(grid: Grid, name: str) -> Axis:
    """The axis of a short name.

    Raises
    ------
    ScenarioError
        If there is none.
    """
    for axis in grid.axes:
        if axis.short == name:
            return axis
    raise ScenarioError(f"there is no axis {name!r}; the axes are {', '.join(axis.short for axis in grid.axes)}.")


def lines_axis(grid: Grid, look: Look) -> str:
    """The axis of which curves show every value: the schedule, or the first one that is not numeric; empty for none."""
    if look.y or grid.zipped:
        return ""
    several = [axis for axis in grid.axes if len(axis) > 1 and axis.short != look.x and not axis.numeric]
    names = [axis.short for axis in several]
    return SCHEDULE if SCHEDULE in names else next(iter(names), "")


def up_axis(grid: Grid, look: Look) -> str:
    """The axis of the rows of the matrix: that upward, or that of the lines; empty for a single line."""
    return look.y or lines_axis(grid, look)


def matrix(grid: Grid, look: Look) -> Matrix:
    """The points of the picture; those of numeric axes in ascending order."""
    columns = _ascending(axis_of(grid, look.x))
    if grid.zipped:
        return (tuple((place,) for place in columns),)
    up = up_axis(grid, look)
    rows = _ascending(axis_of(grid, up)) if up else [None]
    return tuple(_row(grid, look, columns, {up: y}) for y in rows)


def _row(grid: Grid, look: Look, columns: Sequence[int], up: dict[str, int | None]) -> tuple[Place, ...]:
    return tuple(_moved(grid, look.at, {look.x: x, **up}) for x in columns)


def _ascending(axis: Axis) -> list[int]:
    places = list(range(len(axis)))
    return sorted(places, key=lambda place: axis.labels[place]) if axis.numeric else places


def _moved(grid: Grid, at: Place, to: dict[str, int | None]) -> Place:
    """A place with other numbers along some axes."""
    found = []
    for axis, old in zip(grid.axes, at, strict=True):
        new = to.get(axis.short)
        found.append(old if new is None else new)
    return tuple(found)


def moved(grid: Grid, look: Look, name: str, place: int) -> Look:
    """The look with another value along one axis; along all of them where they go together."""
    axis = axis_of(grid, name) if not grid.zipped else grid.axes[0]
    number = min(max(place, 0), len(axis) - 1)
    return replace(look, at=(number,) if grid.zipped else _moved(grid, look.at, {name: number}))


def over(grid: Grid, look: Look, *, x: str | None = None, y: str | None = None) -> Look:
    """The look over other axes; an axis that was the other one changes places with it.

    Raises
    ------
    ScenarioError
        If there is no such axis.
    """
    if x is not None:
        axis_of(grid, x)
        return replace(look, x=x, y=look.x if x == look.y else look.y)
    if not y or grid.zipped:
        return replace(look, y="")
    axis_of(grid, y)
    return replace(look, y=y, x=_other(grid, look, y) if y == look.x else look.x)


def _other(grid: Grid, look: Look, taken: str) -> str:
    """An axis to the right in the place of one that goes upward."""
    others = [axis.short for axis in grid.axes if axis.short != taken]
    return look.y or next(iter(others), look.x)


def outward(points: Matrix, at: Place) -> list[Place]:
    """The points in the order in which they are wanted: the chosen one, then those around it."""
    every: Sequence[Place] = [place for row in points for place in row]
    return sorted(every, key=lambda place: sum(abs(one - other) for one, other in zip(place, at, strict=True)))
