"""Pictures that compare schedules: layers on one time axis, busy lanes, rates, and maps of the best schedule."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import chain, cycle

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from workbench.core.result import Result
from workbench.core.timeline import Timeline
from workbench.core.units import format_seconds, four_digits
from workbench.plots.results import middle, plot_timeline

_COLOURS = ("#6b7280", "#059669", "#d97706", "#78350f", "#db2777", "#7c3aed", "#2563eb", "#dc2626", "#0891b2")
_MARKERS = "osDv^<>XP"
_MICRO_BATCH_TASK = re.compile(r"[A-Za-z](\d+)(?:[a-z]|p\d+)")
"""Names of tasks of one micro-batch in one layer, such as ``A12b``."""
_LEGEND = 36
"""Characters in a line of a legend."""

Rates = Mapping[str, Mapping[float, float]]
"""Output tokens per second by schedule and by the value on the horizontal axis."""


def plot_layers(results: Sequence[Result], layers: int = 2) -> list[Axes]:
    """Plot lane charts of a few layers in the middle of one iteration of each result, on one time axis.

    Parameters
    ----------
    results : sequence of Result
        Results with timelines of tasks, from `steady`, `run` and ``simulate(..., detail=Detail.TASK)``.
    layers : int
        Number of layers, from the end of a layer's last micro-batch to that of another layer.
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
        for text in legend.get_texts() if legend else ():  # long lines of a legend would leave no room for the lanes
            text.set_text(textwrap.fill(text.get_text(), _LEGEND, subsequent_indent="    "))
    axes[-1].set_xlabel("time")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value) if value else "0"))
    return axes


def _title(result: Result, layer: float) -> str:
    late = f", deferred {result.facts['deferred']}" if "deferred" in result.facts else ""
    rate = f"{four_digits(result.gen_tok_s)} output tokens/s"
    return f"{result.schedule}{late}: {format_seconds(layer)} per layer, {rate}"


def middle_layers(timeline: Timeline, count: int) -> Timeline:
    """Cut `count` layers in the middle of the middle iteration out of a timeline of tasks; the cut begins at zero.

    Raises
    ------
    ValueError
        If there are not `count` layers and one before them.
    """
    iteration = timeline.window(*middle(timeline, 1))
    ends: dict[int, float] = {}
    for span in iteration:
        if named := _MICRO_BATCH_TASK.fullmatch(span.name):
            layer = int(named[1])
            ends[layer] = max(ends.get(layer, span.end), span.end)
    if count >= len(ends):
        raise ValueError(f"{count} layers were asked for of a timeline of {len(ends)}; ask for fewer than it has.")
    first = (len(ends) - 1 - count) // 2
    begin = ends[first]
    end = ends[first + count]
    kept = [span for span in iteration if span.start < end and span.end > begin]
    cut = [s._replace(start=max(s.start, begin) - begin, end=min(s.end, end) - begin) for s in kept]
    return Timeline(cut, timeline.labels)


def plot_busy(results: Sequence[Result], ax: Axes | None = None) -> Axes:
    """Plot the share of time that each lane was busy, one row per result, with its requests and its rate beside it."""
    size = (7.5, 0.5 + 0.32 * len(results))
    ax = ax if ax is not None else plt.subplots(figsize=size, layout="constrained")[1]
    lanes = list(results[0].busy)
    shares = np.array([_shares(result, lanes) for result in results])
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


def _shares(result: Result, lanes: Sequence[str]) -> list[float]:
    return [result.utilisation[lane] for lane in lanes]


def plot_rates(rates: Rates, ax: Axes | None = None, *, over: str, title: str = "") -> Axes:
    """Plot output tokens per second, one line per schedule, on logarithmic axes."""
    ax = _lines(rates, ax, over, title)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    ax.set_ylabel("output tokens per second")
    return ax


def plot_against_best(rates: Rates, ax: Axes | None = None, *, over: str, title: str = "") -> Axes:
    """Plot output tokens per second as a share of the best schedule's, one line per schedule."""
    ax = _lines(against_best(rates), ax, over, title)
    ax.set_ylim(0, 1.05)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylabel("of the best schedule's rate")
    return ax


def against_best(rates: Rates) -> dict[str, dict[float, float]]:
    """Divide each rate by the highest at the same place."""
    best: dict[float, float] = {}
    for curve in rates.values():
        for place, rate in curve.items():
            best[place] = max(best.get(place, 0.0), rate)
    shares: dict[str, dict[float, float]] = {}
    for name, curve in rates.items():
        shares[name] = {place: rate / best[place] for place, rate in curve.items()}
    return shares


def plot_needed(
    rates: Mapping[float, Rates], ax: Axes | None = None, *, over: str, along: str, within: float = 0.02
) -> Axes:
    """Plot a map of schedules: at each place the first one whose rate is within a share of the best.

    Parameters
    ----------
    rates : mapping of float to Rates
        Rates by the value on the vertical axis, with schedules in order of preference, such as the simplest first.
    over, along : str
        Labels of the horizontal and the vertical axis, both logarithmic.
    within : float
        Share by which a rate may fall short of the best.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(9, 4), layout="constrained")[1]
    rows = {place: needed(row_rates, within) for place, row_rates in rates.items()}
    names = list(dict.fromkeys(chain.from_iterable(rates.values())))
    x = sorted(set(chain.from_iterable(rows.values())))
    y = sorted(rows)
    chosen = np.full((len(y), len(x)), np.nan)
    for (j, i), _ in np.ndenumerate(chosen):
        if x[i] in rows[y[j]]:
            chosen[j, i] = names.index(rows[y[j]][x[i]])
    colours = ListedColormap(_palette(names))
    norm = BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names))
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
    """Choose at each place the first schedule whose rate is within a share of the best."""
    chosen: dict[float, str] = {}
    for name, curve in against_best(rates).items():
        for place, share in curve.items():
            if share >= 1 - within:
                chosen.setdefault(place, name)
    return chosen


def _lines(curves: Rates, ax: Axes | None, over: str, title: str) -> Axes:
    ax = ax if ax is not None else plt.subplots(figsize=(9, 4), layout="constrained")[1]
    for (name, curve), colour, marker in zip(curves.items(), cycle(_COLOURS), cycle(_MARKERS), strict=False):
        ax.plot(
            list(curve),
            list(curve.values()),
            marker + "-",
            color=colour,
            label=name,
            markersize=6,
            markerfacecolor="none",
        )
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
    """Edges of cells around logarithmic centres; a single cell covers a factor of two."""
    logs = np.log(centres)
    if len(logs) == 1:
        return np.exp([logs[0] - np.log(2) / 2, logs[0] + np.log(2) / 2])
    between = (logs[1:] + logs[:-1]) / 2
    first = logs[0] - (between[0] - logs[0])
    last = logs[-1] + (logs[-1] - between[-1])
    return np.exp(np.concatenate(([first], between, [last])))


def _plain(value: float, _: object = None) -> str:
    return f"{value:,g}"
