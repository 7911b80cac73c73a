"""Schedules side by side: a few layers of each on one time axis, busy lanes, rates, and which is needed where."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from workbench.core.result import Result
from workbench.core.timeline import Timeline
from workbench.core.units import format_seconds
from workbench.plots.results import middle, plot_timeline

_COLOURS = ("#6b7280", "#059669", "#d97706", "#78350f", "#db2777", "#7c3aed", "#2563eb", "#dc2626", "#0891b2")
_MARKERS = "osDv^<>XP"
_OF_A_PART = re.compile(r"[A-Za-z](\d+)(?:[a-z]|p\d+)")
"""Names of tasks that take one part through one layer, such as ``A12b``."""
_LEGEND = 36
"""Characters in a line of a legend."""

Rates = Mapping[str, Mapping[float, float]]
"""Output tokens per second by schedule, and by whatever they are drawn over."""


def plot_layers(results: Sequence[Result], layers: int = 2) -> list[Axes]:
    """Lane charts of a few layers in the middle of one iteration, one above the other on one time axis.

    Parameters
    ----------
    results : sequence of Result
        With timelines of tasks, as `steady`, `run` and ``simulate(..., detail=Detail.TASK)`` give them.
    layers : int
        So many of each, from the end of one layer's last part to that of another.
    """
    cuts = [middle_layers(result.timeline, layers) for result in results]
    size = (10, 0.4 + 1.55 * len(results))
    _, grid = plt.subplots(len(results), figsize=size, layout="constrained", sharex=True, squeeze=False)
    axes: list[Axes] = list(grid[:, 0])
    longest = max(cut.seconds for cut in cuts)
    for ax, result, cut in zip(axes, results, cuts, strict=True):
        plot_timeline(cut, ax, title=_title(result, cut.seconds / layers), seconds=longest)
        ax.set_xlabel("")
        legend = ax.get_legend()
        for text in legend.get_texts() if legend else ():  # one with many operations would leave the lanes no room
            text.set_text(textwrap.fill(text.get_text(), _LEGEND, subsequent_indent="    "))
    axes[-1].set_xlabel("time")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value) if value else "0"))
    return axes


def _title(result: Result, layer: float) -> str:
    late = f", deferred {result.facts['deferred']}" if "deferred" in result.facts else ""
    return f"{result.schedule}{late}: {format_seconds(layer)} per layer, {result.gen_tok_s:.4g} output tokens/s"


def middle_layers(timeline: Timeline, count: int) -> Timeline:
    """So many layers in the middle of the iteration in the middle, cut out of a timeline of tasks and begun at zero.

    Raises
    ------
    ValueError
        If there are not as many layers, with one before them.
    """
    whole = timeline.window(*middle(timeline, 1))
    ends: dict[int, float] = {}
    for span in whole:
        if named := _OF_A_PART.fullmatch(span.name):
            layer = int(named[1])
            ends[layer] = max(ends.get(layer, span.end), span.end)
    if count >= len(ends):
        raise ValueError(f"{count} layers were asked for of a timeline of {len(ends)}; ask for fewer than it has.")
    first = (len(ends) - 1 - count) // 2
    begin, end = ends[first], ends[first + count]
    kept = [span for span in whole if span.start < end and span.end > begin]
    cut = [s._replace(start=max(s.start, begin) - begin, end=min(s.end, end) - begin) for s in kept]
    return replace(timeline, spans=cut)


def plot_busy(results: Sequence[Result], ax: Axes | None = None) -> Axes:
    """Share of the time that each lane was busy, one row per result; its requests and its rate stand beside it."""
    size = (7.5, 0.5 + 0.32 * len(results))
    ax = ax if ax is not None else plt.subplots(figsize=size, layout="constrained")[1]
    lanes = list(results[0].busy)
    shares = np.array([[result.utilisation[lane] for lane in lanes] for result in results])
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        ax.text(column, row, f"{share:.0%}", ha="center", va="center", color="white" if share > 0.8 else "black")
    ax.set_xticks(range(len(lanes)), lanes)
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(results)), [f"{r.schedule}, {int(r.facts['requests']):,} requests" for r in results])
    rates = ax.secondary_yaxis("right")
    rates.set_yticks(range(len(results)), [f"{r.gen_tok_s:,.4g} output tokens/s" for r in results])
    for side in (ax, rates):
        side.tick_params(length=0)
        side.spines[:].set_visible(False)
    return ax


def plot_rates(rates: Rates, ax: Axes | None = None, *, over: str, title: str = "") -> Axes:
    """Output tokens per second, one line for each schedule; both axes logarithmic."""
    ax = _lines(rates, ax, over, title)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    ax.set_ylabel("output tokens per second")
    return ax


def plot_against_best(rates: Rates, ax: Axes | None = None, *, over: str, title: str = "") -> Axes:
    """Output tokens per second as a share of the best schedule's, one line for each schedule."""
    ax = _lines(against_best(rates), ax, over, title)
    ax.set_ylim(0, 1.05)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylabel("of the best schedule's rate")
    return ax


def against_best(rates: Rates) -> dict[str, dict[float, float]]:
    """Each rate as a share of the highest at the same place."""
    places = {place for curve in rates.values() for place in curve}
    best = {place: max(curve.get(place, 0.0) for curve in rates.values()) for place in places}
    return {name: {place: rate / best[place] for place, rate in curve.items()} for name, curve in rates.items()}


def plot_needed(
    rates: Mapping[float, Rates], ax: Axes | None = None, *, over: str, along: str, within: float = 0.02
) -> Axes:
    """Which schedule is needed where: the first one that comes within a share of the best.

    Parameters
    ----------
    rates : mapping of float to Rates
        By what the upright axis is about; the schedules in the order of preference, such as the simplest first.
    over, along : str
        Labels of the horizontal and the upright axis, both logarithmic.
    within : float
        How much less than the best is as good.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(9, 4), layout="constrained")[1]
    rows = {place: needed(one, within) for place, one in rates.items()}
    names = list(dict.fromkeys(name for one in rates.values() for name in one))
    x, y = sorted({place for row in rows.values() for place in row}), sorted(rows)
    chosen = np.array([[names.index(rows[j][i]) if i in rows[j] else np.nan for i in x] for j in y])
    colours, norm = ListedColormap(_palette(names)), BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names))
    ax.pcolormesh(_edges(x), _edges(y), chosen, cmap=colours, norm=norm, edgecolors="white", linewidth=0.5)
    _over(ax, over, title="")
    ax.set_yscale("log")
    ax.set_xticks(x, [_plain(value) for value in x])
    ax.set_yticks(y, [_plain(value) for value in y])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylabel(along)
    seen = [names[int(place)] for place in np.unique(chosen[~np.isnan(chosen)])]
    keys = [Patch(color=_palette(names)[names.index(name)], label=name) for name in seen]
    ax.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)
    return ax


def needed(rates: Rates, within: float) -> dict[float, str]:
    """The first schedule at each place that comes within a share of the best one."""
    chosen: dict[float, str] = {}
    for name, curve in against_best(rates).items():
        for place, share in curve.items():
            if share >= 1 - within:
                chosen.setdefault(place, name)
    return chosen


def _lines(curves: Rates, ax: Axes | None, over: str, title: str) -> Axes:
    ax = ax if ax is not None else plt.subplots(figsize=(9, 4), layout="constrained")[1]
    for (name, curve), colour, marker in zip(curves.items(), cycle(_COLOURS), cycle(_MARKERS), strict=False):
        x, y = list(curve), list(curve.values())
        ax.plot(x, y, marker + "-", color=colour, label=name, markersize=6, markerfacecolor="none")
    _over(ax, over, title)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)
    return ax


def _over(ax: Axes, over: str, title: str) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_major_formatter(FuncFormatter(_plain))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(over)
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def _palette(names: Sequence[str]) -> list[str]:
    return [colour for _, colour in zip(names, cycle(_COLOURS), strict=False)]


def _edges(centres: Sequence[float]) -> np.ndarray:
    """Edges of cells around logarithmic centres; a single one reaches a factor of two."""
    logs = np.log(centres)
    between = (logs[1:] + logs[:-1]) / 2
    half = (between[0] - logs[0], logs[-1] - between[-1]) if len(between) else (np.log(2) / 2,) * 2
    return np.exp(np.concatenate(([logs[0] - half[0]], between, [logs[-1] + half[1]])))


def _plain(value: float, _: object = None) -> str:
    return f"{value:,g}"
