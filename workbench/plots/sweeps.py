"""Pictures of sweeps: lines over one field, heat maps over two, small multiples over the others, and fronts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from workbench.core.errors import ScenarioError
from workbench.core.units import format_quantity
from workbench.plots.results import SCHEDULE_COLOURS

if TYPE_CHECKING:
    import xarray

_GREY = "#6b7280"
_REFUSED: Mapping[str, Any] = {"facecolor": "#f3f4f6", "edgecolor": "#9ca3af", "hatch": "////"}
_BEST: Mapping[str, Any] = {
    "marker": "*",
    "linestyle": "",
    "color": "k",
    "markeredgecolor": "w",
    "markersize": 10,
    "zorder": 4,
}
_BOUND = "bound_gen_tok_s"
_WIDE = 8.0
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""
_TICKS = 8
_SHOWN = 60
"""Most cells of a heat map that show their numbers."""
_ABBREVIATIONS = {"kv": "KV", "gpu": "GPU", "cpu": "CPU", "h2d": "H2D", "d2h": "D2H", "len": "length"}


class Measure(Protocol):
    """A variable of a sweep."""

    @property
    def unit(self) -> str:
        """Its unit; empty for a count."""

    @property
    def meaning(self) -> str:
        """Its meaning in a few words."""


class _Layout(NamedTuple):
    """The dimensions of a picture: its axes, the colour of lines, and the columns and rows of panels."""

    x: str
    y: str | None
    hue: str | None
    panels: tuple[str, ...]


def plot_sweep(
    dataset: xarray.Dataset,
    x: str | None = None,
    y: str | None = None,
    value: str = "gen_tok_s",
    ax: Axes | None = None,
) -> list[Axes]:
    """Plot one variable of a sweep's data set.

    Lines go over the first numeric dimension, with another one as their colour, and dashed lines are bounds. Two
    numeric dimensions make a heat map, in which points that were set aside are hatched. The best point has a star. Up
    to two further dimensions become columns and rows of panels.

    Parameters
    ----------
    dataset : xarray.Dataset
        As `Sweep.dataset` has it.
    x, y : str, optional
        Dimensions to use instead; a `y` makes a heat map.
    value : str
    ax : Axes, optional
        Only for a picture of one panel.

    Raises
    ------
    ScenarioError
        If there is no such dimension, more than two are left for panels, or `ax` is given for several panels.
    """
    dataset = _along_fields(dataset, x)
    layout = _layout(dataset, x, y)
    dataset = dataset.squeeze([dim for dim in dataset.dims if dataset.sizes[dim] == 1 and dim not in layout[:2]])
    panels = list(_panels(dataset, layout.panels))
    axes = _grid(dataset, layout, ax)
    if layout.y is None:
        _draw_lines(axes, panels, layout, value)
    else:
        _draw_maps(axes, panels, layout, value)
    for ax_, (title, _) in zip(axes, panels, strict=True):
        ax_.set_title(title, fontsize=9)
    return axes


def plot_front(
    cloud: Sequence[tuple[float, ...]],
    line: Sequence[tuple[float, ...]],
    measures: Sequence[Measure],
    ax: Axes | None = None,
) -> Axes:
    """Plot the points of a sweep over two variables, and those of the front as a line."""
    ax = ax if ax is not None else plt.subplots(figsize=(6, 3.8), layout="constrained")[1]
    x, y = zip(*cloud, strict=True)
    ax.scatter(x, y, s=14, color="#d1d5db", label="all points", zorder=1)
    ax.plot(*zip(*line, strict=True), "o-", color=SCHEDULE_COLOURS[4], markersize=5, label="front", zorder=2)
    both = ((ax.xaxis, ax.set_xscale), (ax.yaxis, ax.set_yscale))
    for (axis, logarithmic), values, measure in zip(both, (x, y), measures, strict=True):
        axis.set_label_text(_measured(measure.meaning, measure.unit))
        if is_wide(values):
            logarithmic("log")
        if measure.unit in ("B", "s"):
            axis.set_major_formatter(FuncFormatter(partial(_tick, measure.unit)))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax


def _tick(unit: str, value: float, place: int | None = None) -> str:
    return format_quantity(value, unit)


def is_wide(values: Collection[float]) -> bool:
    """True if an axis with these values is logarithmic."""
    return min(values) > 0 and max(values) / min(values) >= _WIDE


def _along_fields(dataset: xarray.Dataset, x: str | None) -> xarray.Dataset:
    """Zipped fields as one dimension, named by `x` or by the first numeric field."""
    if dataset.dims and next(iter(dataset.dims)) in dataset.coords:
        return dataset
    fields = [str(name) for name in dataset.coords]
    chosen = x if x in fields else next((name for name in fields if _numeric(dataset, name)), fields[0])
    return dataset.swap_dims({next(iter(dataset.dims)): chosen}).sortby(chosen)


def _numeric(dataset: xarray.Dataset, name: str) -> bool:
    return dataset[name].dtype.kind in "fiu"


def _layout(dataset: xarray.Dataset, x: str | None, y: str | None) -> _Layout:
    every = [str(dim) for dim in dataset.dims]
    for asked in (x, y):
        if asked is not None and asked not in every:
            raise ScenarioError(f"the sweep has no axis {asked!r}; it has {', '.join(every)}.")
    names = [dim for dim in every if dataset.sizes[dim] > 1 or dim in (x, y)] or every[:1]
    numeric = [name for name in names if _numeric(dataset, name)]
    x = x or next(name for name in [*numeric, *names] if name != y)
    if y is None and x in numeric:
        y = next((name for name in numeric if name != x), None)
    rest = [name for name in names if name not in (x, y)]
    hue = None
    if y is None and rest:
        hue = next((name for name in rest if not _numeric(dataset, name)), rest[0])
        rest.remove(hue)
    if len(rest) > 2:
        raise ScenarioError(
            f"a picture takes two axes of small multiples, and {', '.join(rest)} are left; draw a part, as in "
            f"workbench.plots.plot_sweep(sweep.dataset.isel({rest[-1]}=[0]))."
        )
    return _Layout(x, y, hue, tuple(rest))


def _panels(dataset: xarray.Dataset, names: Sequence[str]) -> Iterator[tuple[str, xarray.Dataset]]:
    """Each panel with its title, row by row; the first name goes along the columns."""
    ordered = tuple(reversed(names))
    for places in product(*(range(dataset.sizes[name]) for name in ordered)):
        at = dict(zip(ordered, places, strict=True))
        labels = [f"{axis_words(name)} {_label(dataset, name, at[name])}" for name in names]
        yield "\n".join(labels), dataset.isel(at)


def _grid(dataset: xarray.Dataset, layout: _Layout, ax: Axes | None) -> list[Axes]:
    columns, rows = ([dataset.sizes[name] for name in layout.panels] + [1, 1])[:2]
    if ax is not None:
        if columns * rows > 1:
            raise ScenarioError("ax takes one picture, and this one has small multiples; leave ax out.")
        return [ax]
    size = (7, 3.6) if columns * rows == 1 else (min(3.6 * columns, 15), 2.8 * rows)
    _, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True)
    return list(grid.flat)


# ------------------------------------------------------------------------------------------------------------- lines


def _draw_lines(
    axes: Sequence[Axes], panels: Sequence[tuple[str, xarray.Dataset]], layout: _Layout, value: str
) -> None:
    for ax, (_, panel) in zip(axes, panels, strict=True):
        _lines(ax, panel, layout, value)
        _frame(ax, panel, layout.x)
    axes[0].set_ylim(bottom=0)
    for ax in _first_column(axes):
        ax.set_ylabel(_value_label(panels[0][1], value), fontsize=10 if len(axes) == 1 else 8)
    for ax in _last_row(axes):
        ax.set_xlabel(axis_words(layout.x) + (" (logarithmic)" if ax.get_xscale() == "log" else ""))
    if any((panel["problem"] != "").any() for _, panel in panels):
        axes[0].plot([], [], "x", color=_GREY, label="set aside")
    if _mark_best(axes, panels, layout, value):
        axes[0].plot([], [], **_BEST, label="best")
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        columns = 2 if max(map(len, labels)) > 25 else min(len(labels), 4)
        axes[0].figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)


def _lines(ax: Axes, panel: xarray.Dataset, layout: _Layout, value: str) -> None:
    """Draw the lines of a panel, crosses on the axis where points were set aside, and bounds."""
    x = _positions(panel, layout.x)
    colours = cycle(SCHEDULE_COLOURS)
    bounds = list[tuple[npt.NDArray[np.float64], str]]()
    for hue in range(panel.sizes[layout.hue]) if layout.hue else (None,):
        one = panel if hue is None else panel.isel({layout.hue: hue})
        label = str(panel.attrs.get("source", value)) if hue is None else _label(panel, str(layout.hue), hue)
        colour = next(colours)
        ax.plot(x, one[value].values, "o-", color=colour, markersize=4, label=label)
        aside = (one["problem"] != "").values
        ax.plot(x[aside], np.zeros(aside.sum()), "x", color=colour, markersize=7, clip_on=False)
        if value == "gen_tok_s" and _BOUND in one:
            bounds.append((one[_BOUND].values, colour))
    same = all(np.allclose(bounds[0][0], each, 1e-3, 0, equal_nan=True) for each, _ in bounds)
    for each, colour in bounds[:1] if same else bounds:
        ax.plot(x, each, "--", color=_GREY if same else colour, linewidth=1)
    if bounds:
        ax.plot([], [], "--", color=_GREY, linewidth=1, label="bound")


def _positions(panel: xarray.Dataset, name: str) -> npt.NDArray[np.float64]:
    """The coordinates, or the numbers 0, 1, ... of texts."""
    found: npt.NDArray[np.float64] = (
        panel[name].values if _numeric(panel, name) else np.arange(float(panel.sizes[name]))
    )
    return found


def _frame(ax: Axes, panel: xarray.Dataset, name: str) -> None:
    values = _positions(panel, name)
    if _numeric(panel, name) and is_wide(values):
        ax.set_xscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
    places = _apart(np.log(values) if ax.get_xscale() == "log" else values)
    ax.set_xticks(values[places].tolist(), [_label(panel, name, place) for place in places], fontsize=8)
    _slant(ax, [_label(panel, name, place) for place in places])
    ax.spines[["top", "right"]].set_visible(False)


def _apart(positions: npt.NDArray[np.float64]) -> list[int]:
    """Places of ticks whose labels do not run into one another."""
    least = np.ptp(positions) / _TICKS
    chosen = list[int]()
    for place in np.argsort(positions).tolist():
        if not chosen or positions[place] - positions[chosen[-1]] >= least:
            chosen.append(place)
    return chosen


# -------------------------------------------------------------------------------------------------------- heat maps


def _draw_maps(axes: Sequence[Axes], panels: Sequence[tuple[str, xarray.Dataset]], layout: _Layout, value: str) -> None:
    numbers = np.concatenate([panel[value].values.ravel() for _, panel in panels])
    scale = Normalize(np.nanmin(numbers), np.nanmax(numbers))
    mesh = None
    for ax, (_, panel) in zip(axes, panels, strict=True):
        mesh = _map(ax, panel, layout, value, scale)
    for ax in _first_column(axes):
        ax.set_ylabel(axis_words(str(layout.y)))
    for ax in _last_row(axes):
        ax.set_xlabel(axis_words(layout.x))
    figure = axes[0].figure
    if mesh is not None:
        figure.colorbar(mesh, ax=list(axes), label=_value_label(panels[0][1], value), pad=0.02)
    marks: list[Artist] = [Line2D([], [], **_BEST, label="best")] if _mark_best(axes, panels, layout, value) else []
    if np.isnan(numbers).any():
        marks.append(Patch(**_REFUSED, label="set aside"))
    if marks:
        figure.legend(handles=marks, loc="outside upper right", ncols=2, frameon=False, fontsize=8)


def _map(ax: Axes, panel: xarray.Dataset, layout: _Layout, value: str, scale: Normalize) -> QuadMesh:
    numbers = panel[value].transpose(layout.y, layout.x).values
    rows, columns = numbers.shape
    mesh = ax.pcolormesh(np.arange(columns + 1), np.arange(rows + 1), np.ma.masked_invalid(numbers), norm=scale)
    for row, column in np.argwhere(np.isnan(numbers)).tolist():
        ax.add_patch(Rectangle((column, row), 1, 1, linewidth=0, **_REFUSED))
    if numbers.size <= _SHOWN:
        for row, column in np.argwhere(~np.isnan(numbers)).tolist():
            dark = scale(numbers[row, column]) < 0.6
            text = f"{numbers[row, column]:.3g}"
            ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color="w" if dark else "k")
    for axis, name, count in ((ax.xaxis, layout.x, columns), (ax.yaxis, str(layout.y), rows)):
        chosen = np.unique(np.linspace(0, count - 1, min(count, _TICKS)).round().astype(int))
        axis.set_ticks((chosen + 0.5).tolist(), [_label(panel, name, place) for place in chosen], fontsize=8)
    _slant(ax, [_label(panel, layout.x, place) for place in range(columns)])
    return mesh


# -------------------------------------------------------------------------------------------------------------- best


def _mark_best(axes: Sequence[Axes], panels: Sequence[tuple[str, xarray.Dataset]], layout: _Layout, value: str) -> bool:
    """Put a star at the best point; False if there is none, as all are alike."""
    up = layout.y or layout.hue
    dims = [name for name in (up, layout.x) if name is not None]
    numbers = [np.atleast_2d(panel[value].transpose(*dims).values) for _, panel in panels]
    known = np.concatenate([each.ravel() for each in numbers])
    best = (np.nanmax if panels[0][1][value].attrs.get("better") == "more" else np.nanmin)(known)
    if np.nanmin(known) == np.nanmax(known):
        return False
    ax, panel, row, column = next(
        (ax, panel, *np.argwhere(each == best)[0].tolist())
        for ax, (_, panel), each in zip(axes, panels, numbers, strict=True)
        if (each == best).any()
    )
    at = (column + 0.86, row + 0.8) if layout.y else (_positions(panel, layout.x)[column], best)
    ax.plot(*at, **_BEST)
    return True


# ------------------------------------------------------------------------------------------------------------- words


def _label(dataset: xarray.Dataset, name: str, place: int) -> str:
    """The text of one coordinate."""
    return coordinate_words(dataset[name].values.tolist()[place], str(dataset[name].attrs.get("units", "")))


def coordinate_words(value: float | str, unit: str) -> str:
    """A coordinate as one says it; counts of tokens are numbers alone, since their axis names them."""
    return value if isinstance(value, str) else format_quantity(value, "" if unit == "tokens" else unit)


def axis_words(name: str) -> str:
    """The name of an axis as one says it: ``KV capacity``."""
    return " ".join(_ABBREVIATIONS.get(word, word) for word in name.split("_"))


def _value_label(panel: xarray.Dataset, value: str) -> str:
    attributes = panel[value].attrs
    source = panel.attrs.get("source", "")
    told = _measured(str(attributes.get("long_name", value)), str(attributes.get("units", "")))
    return f"{told}, {source}" if source else told


def _measured(meaning: str, unit: str) -> str:
    """A variable with its unit, unless its name says it."""
    return meaning if unit in ("", "tokens/s") else f"{meaning} [{unit}]"


def _slant(ax: Axes, labels: Sequence[str]) -> None:
    """Turn labels that would run into one another."""
    inches = ax.get_window_extent().width / ax.figure.dpi
    if sum(map(len, labels)) > 12 * inches:
        ax.tick_params(axis="x", rotation=30)
        for label in ax.get_xticklabels():
            label.set_horizontalalignment("right")


def _first_column(axes: Sequence[Axes]) -> list[Axes]:
    return [ax for ax in axes if (spec := ax.get_subplotspec()) is None or spec.is_first_col()]


def _last_row(axes: Sequence[Axes]) -> list[Axes]:
    return [ax for ax in axes if (spec := ax.get_subplotspec()) is None or spec.is_last_row()]
