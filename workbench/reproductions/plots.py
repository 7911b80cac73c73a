"""Pictures of reproduced values. Each takes an `ax` and returns it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from workbench.reproductions import Outcome, Reproduction, Row
from workbench.reproductions.offload_runs import Compared, Phase
from workbench.reproductions.rows import UNFITTED

_MARKS = {
    Outcome.MET: ("#059669", "o"),
    Outcome.MISSED: ("#dc2626", "D"),
    Outcome.MISPRINT: ("#d97706", "X"),
    Outcome.COMPARED: ("#2563eb", "s"),
}
_BAND = "#e5e7eb"
_ENDS = 0.5, 2.0
_LINE = 0.21
"""Height of one item [inch]."""
_PHASES = {Phase.DECODE: "#2563eb", Phase.PREFILL: "#d97706"}
_ENGINES = "osD^vPX"
_FACTOR = 2


def plot_ratios(reproductions: Iterable[Reproduction], ax: Axes | None = None) -> Axes:
    """Plot computed over published values, one line per table or figure, with its widest tolerance as a grey band.

    Statements, words and values of zero have no ratio and are left out. A ratio below one half or above two is drawn at
    the edge with its value beside it. A mark is hollow if something was fitted, or if the tolerance is our own choice.
    """
    lines = [line for one in reproductions for line in _lines(one)]
    ax = ax if ax is not None else plt.subplots(figsize=(8, 1.1 + _LINE * len(lines)), layout="constrained")[1]
    for place, (_, _, rows) in enumerate(lines):
        width = max(row.printed.tolerance.allowed(_size(row)) / _size(row) for row in rows)
        label = "tolerance, the line's widest" if place == 0 else None
        ax.barh(place, 2 * width, left=1 - width, height=0.8, color=_BAND, zorder=1, label=label)
    for outcome, is_unfitted in product(_MARKS, (True, False)):
        placed = ((place, row) for place, (_, _, rows) in enumerate(lines) for row in rows if row.outcome is outcome)
        found = [(row.ratio, place) for place, row in placed if (row.printed.evidence in UNFITTED) is is_unfitted]
        if found:
            _mark(ax, found, outcome, is_unfitted)
            _beyond(ax, found)
    _papers(ax, [paper for paper, _, _ in lines])
    ax.axvline(1, color="#111827", linewidth=0.8, zorder=2)
    ax.set_yticks(range(len(lines)), [item for _, item, _ in lines], fontsize=8)
    ax.set(xscale="log", xlim=_ENDS, ylim=(len(lines) - 0.4, -0.6), xlabel="computed / published")
    ax.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=8)
    return ax


def plot_public_runs(points: Iterable[Compared], ax: Axes | None = None) -> Axes:
    """Plot simulated over published rates of public runs: one marker per engine, one colour per phase.

    Both axes are logarithmic. On the line both are equal; in the grey band they differ by a factor of 2 at most.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(6.5, 6), layout="constrained")[1]
    points = list(points)
    rates = [rate for one in points for rate in (one.published, one.simulated)]
    ends = np.array([min(rates) / 1.5, max(rates) * 1.5])
    ax.fill_between(ends, ends / _FACTOR, ends * _FACTOR, color=_BAND, zorder=1, label=f"within a factor of {_FACTOR}")
    ax.plot(ends, ends, color="#111827", linewidth=0.8, zorder=2)
    engines = dict(zip(dict.fromkeys(one.run.engine for one in points), _ENGINES, strict=False))
    for (engine, marker), (phase, colour) in product(engines.items(), _PHASES.items()):
        found = [one for one in points if one.run.engine == engine and one.phase is phase]
        if found:
            x = [one.published for one in found]
            y = [one.simulated for one in found]
            label = f"{engine}, {phase.value}"
            ax.plot(x, y, marker, color=colour, markersize=5, alpha=0.7, markeredgewidth=0, zorder=3, label=label)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ax.set(xlabel="published [tokens/s]", ylabel="simulated from data sheets [tokens/s]")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", frameon=False, fontsize=8)
    return ax


def _mark(ax: Axes, found: list[tuple[float, int]], outcome: Outcome, is_unfitted: bool) -> None:
    """Draw one mark per ratio, hollow unless nothing was fitted."""
    colour, marker = _MARKS[outcome]
    x, y = np.array(found).T
    (marks,) = ax.plot(np.clip(x, *_ENDS), y, marker, markersize=5, color=colour, zorder=3, clip_on=False)
    marks.set_fillstyle("full" if is_unfitted else "none")
    marks.set_label(outcome.value if is_unfitted else f"{outcome.value}, fitted")


def _lines(one: Reproduction) -> list[tuple[str, str, list[Row]]]:
    """The paper's items in their order, each with the rows that have a ratio."""
    items: dict[str, list[Row]] = {}
    for row in one.rows:
        if np.isfinite(row.ratio):
            items.setdefault(row.printed.item, []).append(row)
    return [(one.paper, item, rows) for item, rows in items.items()]


def _size(row: Row) -> float:
    """The published value, or the larger end of a range."""
    value = row.printed.value
    return float(max(map(abs, value)) if isinstance(value, tuple) else abs(float(value)))


def _beyond(ax: Axes, found: list[tuple[float, int]]) -> None:
    """Write the ratio beside each mark at an edge."""
    for ratio, place in found:
        if not _ENDS[0] <= ratio <= _ENDS[1]:
            at = (float(np.clip(ratio, *_ENDS)), place)
            side, align = (6, "left") if ratio < 1 else (-6, "right")
            ax.annotate(f"{ratio:,.3g}", at, (side, 0), textcoords="offset points", fontsize=7, ha=align, va="center")


def _papers(ax: Axes, names: list[str]) -> None:
    """Draw a rule between the papers, and each one's name at the right."""
    for place, name in enumerate(names):
        if place == 0 or names[place - 1] != name:
            ax.axhline(place - 0.5, color="#9ca3af", linewidth=0.6, zorder=2)
            ax.annotate(name, (1.02, place), xycoords=("axes fraction", "data"), fontsize=9, weight="bold", va="center")
