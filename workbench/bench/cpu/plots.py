"""Plots of measured kernels on the roofline and over the number of threads. Each takes an `ax` and returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

_COLOURS = ("#1d4ed8", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_ROOF = "#111827"
_TEXT = "#4b5563"


@dataclass(frozen=True)
class Roofline:
    """Measured rates on some threads.

    Attributes
    ----------
    threads : int
    read, multiply : float
        The ceilings [B/s] and [FLOP/s].
    points : mapping of name to (intensity, rate) pairs
        FLOP per byte and FLOP/s, one pair per work. The name is the implementation's; a prefix with a colon, such as
        "expert: ", names the work: it keeps the colour and makes the marker hollow.
    """

    threads: int
    read: float
    multiply: float
    points: Mapping[str, Sequence[tuple[float, float]]]


def plot_roofline(roofline: Roofline, ax: Axes | None = None) -> Axes:
    """Plot arithmetic rate over arithmetic intensity, both logarithmic, under the measured ceilings.

        rate <= min(read * intensity, multiply)

    Notes
    -----
    Williams, Waterman, Patterson: Roofline (2009); both ceilings are measured, none is a data sheet's.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(7, 4.4), layout="constrained")[1]
    pairs = [pair for own in roofline.points.values() for pair in own]
    intensities = [x for x, _ in pairs]
    least = min(intensities) / 4
    most = 2 * max(*intensities, roofline.multiply / roofline.read)
    x = np.geomspace(least, most, 200)
    ax.plot(x, np.minimum(roofline.read * x, roofline.multiply) / 1e9, color=_ROOF, linewidth=1.5)
    _say_ceilings(ax, roofline, least, most)
    peers = list(dict.fromkeys(_peer(name) for name in roofline.points))
    for name, own in roofline.points.items():
        place = peers.index(_peer(name))
        colour = _COLOURS[place % len(_COLOURS)]
        marker = _MARKERS[place % len(_MARKERS)]
        intensity, rate = np.array(own).T
        fill = "full" if name == _peer(name) else "none"
        ax.plot(intensity, rate / 1e9, marker, color=colour, label=name, markersize=6, alpha=0.85, fillstyle=fill)
    ax.set(xscale="log", yscale="log", xlim=(least, most), xlabel="arithmetic intensity [FLOP/byte]")
    ax.set(ylabel="arithmetic rate [GFLOP/s]", ylim=(min(y for _, y in pairs) / 2e9, roofline.multiply * 2.2 / 1e9))
    for axis, ticks in ((ax.xaxis, LogLocator(base=2)), (ax.yaxis, LogLocator(subs=(1, 2, 5)))):
        axis.set_major_locator(ticks)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_title(f"{_threads(roofline.threads)}", loc="left", fontsize=10)
    ax.grid(True, which="major", color="#e5e7eb")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _say_ceilings(ax: Axes, roofline: Roofline, least: float, most: float) -> None:
    said = f"fp32 multiply-adds {roofline.multiply / 1e9:,.0f} GFLOP/s"
    ax.annotate(said, (most, roofline.multiply / 1e9), (-4, 4), textcoords="offset points", ha="right", color=_TEXT)
    x = 1.15 * least
    y = 1.25 * roofline.read * 1.15 * least / 1e9
    turned = {"rotation": np.degrees(np.arctan2(y, x)), "rotation_mode": "anchor", "transform_rotates_text": True}
    ax.text(x, y, f"reading {roofline.read / 1e9:,.1f} GB/s", color=_TEXT, **turned)


def _peer(name: str) -> str:
    """Name of the implementation without the work before it: "ours" from "expert: ours"."""
    return name.rpartition(": ")[2]


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def plot_rooflines(rooflines: Sequence[Roofline], figure: Figure | None = None) -> Figure:
    """Plot one roofline per number of threads, side by side, with one legend."""
    if figure is None:
        figure = plt.figure(figsize=(5.2 * len(rooflines) + 1.3, 4.2), layout="constrained")
    axes = figure.subplots(1, len(rooflines), squeeze=False)[0]
    for roofline, ax in zip(rooflines, axes, strict=True):
        plot_roofline(roofline, ax)
        if ax is not axes[-1]:
            ax.get_legend().remove()
    return figure


def save_rooflines(rooflines: Sequence[Roofline], path: Path) -> None:
    """Save the rooflines to a file; its suffix chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = plot_rooflines(rooflines)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_over_threads(
    rates: Mapping[str, Mapping[int, float]],
    *,
    required: float | None = None,
    said: str = "required",
    ax: Axes | None = None,
) -> Axes:
    """Plot KV entries attended per second over the number of threads, with the rate that the rest of a system needs.

    Parameters
    ----------
    rates : mapping of name to rates by number of threads
        Entries per second; an entry is one token's K and V in one layer [1/s].
    required : float, optional
        Rate at which a horizontal line is drawn [1/s].
    said : str
        Label of that line.

    Notes
    -----
    MoE-Lens, Figure 10. Dotted lines scale the rate of the fewest threads in proportion to the threads.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(7, 4), layout="constrained")[1]
    for (name, own), colour, marker in zip(rates.items(), cycle(_COLOURS), cycle(_MARKERS), strict=False):
        threads, rate = np.array(sorted(own.items())).T
        ax.plot(threads, rate / 1e6, marker=marker, color=colour, label=name)
        ax.plot(threads, rate[0] / threads[0] * threads / 1e6, ":", color=colour, linewidth=1)
    if required is not None:
        ax.axhline(required / 1e6, color=_ROOF, linewidth=1.2, linestyle="--", label=said)
    ax.set(xlabel="threads", ylabel="KV entries attended [million/s]", ylim=(0, None))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax
