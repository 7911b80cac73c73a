"""Pictures of readings for the browser: plain values, and texts with their units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.analysis.sweeps.grid import Axis, Grid, Place
from workbench.analysis.sweeps.reading import VARIABLES
from workbench.core.units import format_quantity
from workbench.plots.sweeps import axis_words, coordinate_words, is_wide
from workbench.widgets.explore.look import Look, Matrix, axis_of, matrix, up_axis
from workbench.widgets.explore.readings import Readings
from workbench.widgets.state.figures import Plain

_ALIKE = 1e-3
"""Relative difference up to which bounds are one line."""
_TOLD = (
    "gen_tok_s",
    "bound_gen_tok_s",
    "seconds",
    "ttft",
    "tbt",
    "preemptions",
    "gpu_memory_needed",
    "host_memory_needed",
    "energy",
    "gpu_price",
)


def controls(grid: Grid, look: Look) -> Plain:
    """A slider for each numeric axis and a chooser for each other one; one slider for axes that go along together."""
    if grid.zipped:
        steps = [", ".join(texts) for texts in zip(*map(_texts, grid.axes), strict=True)]
        label = ", ".join(axis_words(axis.short) for axis in grid.axes)
        made = [_slider(grid.axes[0].short, label, look.at[0], steps)]
    else:
        made = [_control(axis, at) for axis, at in zip(grid.axes, look.at, strict=True)]
    return {"groups": [{"title": "The point that is chosen", "controls": made}]}


def _control(axis: Axis, at: int) -> Plain:
    texts = _texts(axis)
    label = axis_words(axis.short)
    if axis.numeric:
        return _slider(axis.short, label, at, texts)
    options = [{"value": str(place), "label": text, "why": ""} for place, text in enumerate(texts)]
    return {"name": axis.short, "label": label, "kind": "choice", "value": str(at), "options": options}


def _slider(name: str, label: str, at: int, steps: Sequence[str]) -> Plain:
    return {"name": name, "label": label, "kind": "slider", "at": at, "steps": list(steps), "note": ""}


def _texts(axis: Axis) -> list[str]:
    return [told(axis, place) for place in range(len(axis))]


def told(axis: Axis, place: int) -> str:
    """One value of an axis in words."""
    return coordinate_words(axis.labels[place], axis.unit)


def place_in_words(grid: Grid, place: Place) -> str:
    """A point by its coordinates."""
    return ", ".join(f"{axis_words(axis.short)} {told(axis, at)}" for axis, at in grid.along(place) if len(axis) > 1)


def picture(readings: Readings, look: Look, *, busy: bool, problem: str = "") -> Plain:
    """Curves or a heat map: the axes, a row of cells for each line or row, the chosen and the best of them."""
    grid = readings.grid
    points = matrix(grid, look)
    flat = [place for row in points for place in row]
    missing = len(readings.missing(flat))
    up = up_axis(grid, look)
    value = VARIABLES[look.value]
    return {
        "kind": "map" if look.y else "lines",
        "value": {"name": look.value, "label": value.meaning, "unit": value.unit},
        "values": [{"value": name, "label": VARIABLES[name].meaning} for name in _offered(readings, look)],
        "x": _axis(axis_of(grid, look.x), [_along(grid, place, look.x) for place in points[0]]),
        "y": _axis(axis_of(grid, up), [_along(grid, row[0], up) for row in points]) if up else None,
        "axes": [{"value": axis.short, "label": axis_words(axis.short)} for axis in grid.axes],
        "together": grid.zipped,
        "cells": [_cells(readings, look, row) for row in points],
        "bounds": _bounds(readings, points) if look.value == "gen_tok_s" and not look.y else [],
        "at": _found(points, look.at),
        "best": _best(readings, look, points),
        "read": len(flat) - missing,
        "of": len(flat),
        "busy": busy and missing > 0,
        "problem": problem,
    }


def _along(grid: Grid, place: Place, name: str) -> int:
    """Number of a point's value along an axis."""
    return next(at for axis, at in grid.along(place) if axis.short == name)


def _offered(readings: Readings, look: Look) -> list[str]:
    """The numbers that points have, and the one that is drawn."""
    known = {name for row in list(readings.rows.values()) for name in row.numbers} | {look.value}
    return [name for name in VARIABLES if name in known]


def _axis(axis: Axis, places: Sequence[int]) -> Plain:
    labels = [axis.labels[place] for place in places]
    at = [float(label) for label in labels] if axis.numeric else [float(number) for number in range(len(labels))]
    wide = axis.numeric and is_wide(at)
    words = [told(axis, place) for place in places]
    return {"name": axis.short, "label": axis_words(axis.short), "at": at, "words": words, "log": wide}


def _cells(readings: Readings, look: Look, row: Sequence[Place]) -> list[Plain]:
    return [_cell(readings, look, place) for place in row]


def _cell(readings: Readings, look: Look, place: Place) -> Plain:
    """One point: its number, or the reason why there is none; neither if it is not read yet."""
    row = readings.known(place)
    if row is None:
        return {"value": None, "why": ""}
    value = row.numbers.get(look.value)
    missing = f"{VARIABLES[look.value].meaning} is not known here" if value is None else ""
    return {"value": None if row.problem else value, "why": row.problem or missing}


def _bounds(readings: Readings, points: Matrix) -> list[list[float | None]]:
    """The bound of every point, line by line; one line if all lines have the same."""
    found = [list(map(readings.most, row)) for row in points]
    columns = [_known(column) for column in zip(*found, strict=True)]
    same = all(not column or max(column) - min(column) <= _ALIKE * max(column) for column in columns)
    return [[column[0] if column else None for column in columns]] if same else found


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _found(points: Matrix, at: Place) -> list[int]:
    """Row and column of a point."""
    return next([y, row.index(at)] for y, row in enumerate(points) if at in row)


def _best(readings: Readings, look: Look, points: Matrix) -> list[int] | None:
    """Row and column of the best point that was read; none while there is only one."""
    sign = 1 if VARIABLES[look.value].more else -1
    found = dict[Place, float]()
    for row in points:
        for place in row:
            read = readings.rows.get(place)
            if read is not None and not read.problem and look.value in read.numbers:
                found[place] = sign * read.numbers[look.value]
    return _found(points, max(found, key=lambda place: found[place])) if len(set(found.values())) > 1 else None


def chosen(readings: Readings, look: Look) -> Plain:
    """The chosen point: what it is, its numbers, and the explanation of its result or the reason why there is none."""
    row = readings.known(look.at)
    sentences = readings.explained(look.at)
    numbers = {} if row is None else row.numbers
    return {
        "title": place_in_words(readings.grid, look.at),
        "numbers": [[VARIABLES[name].meaning, number(name, numbers[name])] for name in _shown(numbers)],
        "sentences": sentences or [],
        "problem": "" if row is None else row.problem,
        "busy": row is None or (sentences is None and not row.problem),
    }


def _shown(numbers: Plain) -> list[str]:
    return [name for name in _TOLD if name in numbers]


def number(name: str, value: float) -> str:
    """A number of a point with its unit, in four digits."""
    unit = VARIABLES[name].unit
    return format_quantity(float(f"{value:.4g}"), "" if unit == "tokens/s" else unit)
