"""Plots of a layer's routed experts over tokens: rates under the roofline, ratios, and the ridges of rooflines.

Each takes an `ax` and returns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from workbench.bench.moe.speeds import MoeShape, MoeSpeeds

_COLOURS = ("#1d4ed8", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_ROOF = "#111827"


def plot_moe_speeds(speeds: MoeSpeeds, ax: Axes | None = None, *, against: str | None = None) -> Axes:
    """Plot the rate of every implementation over tokens, under the roofline for the experts touched.

    Parameters
    ----------
    speeds : MoeSpeeds
    against : str, optional
        An implementation whose speed counts as one; the picture then shows ratios and no roof.

    Raises
    ------
    ValueError
        If that implementation was not measured.
    """
    if against is not None and against not in speeds.contenders:
        raise ValueError(f"there is no contender {against!r}: give one of {list(speeds.contenders)}.")
    ax = ax if ax is not None else plt.subplots(figsize=(8, 4.4), layout="constrained")[1]
    tokens = speeds.tokens
    for name, colour, marker in zip(speeds.contenders, _COLOURS, _MARKERS, strict=False):
        heights = [_height(speeds, name, count, against) for count in tokens]
        ax.plot(tokens, heights, marker=marker, markersize=5, color=colour, label=name)
    if against is None:
        _roof(ax, speeds)
    ax.set(xscale="log", yscale="log", xlabel="tokens in the batch")
    ax.set_ylabel("GFLOP per second" if against is None else f"times as fast as {against}")
    _plain_numbers(ax)
    ax.set_title(str(speeds).replace("; ", "\n"), loc="left", fontsize=9)
    return _finished(ax)


def _height(speeds: MoeSpeeds, name: str, tokens: int, against: str | None) -> float:
    if against is None:
        return speeds.flop_rate(name, tokens) / 1e9
    return speeds.seconds(against, tokens) / speeds.seconds(name, tokens)


def _roof(ax: Axes, speeds: MoeSpeeds) -> None:
    roofs = [speeds.roof(count) / 1e9 for count in speeds.tokens]
    ax.plot(speeds.tokens, roofs, "--", color=_ROOF, linewidth=1.2, label="memory and arithmetic allow")


def plot_ridges(
    shapes: Sequence[MoeShape], read: float, multiply: float, ax: Axes | None = None, *, said: str = ""
) -> Axes:
    """Plot the roofline over tokens of one layer of each model, with its ridge: T = multiply / read * E / k.

    Parameters
    ----------
    shapes : sequence of MoeShape
    read, multiply : float
        Rates of the memory [B/s] and of arithmetic [FLOP/s].
    said : str
        Title, such as the name of the machine.
    """
    ax = ax if ax is not None else plt.subplots(figsize=(8, 4.4), layout="constrained")[1]
    ridges = [shape.ridge(read, multiply) for shape in shapes]
    tokens = np.geomspace(1, 8 * max(ridges), 300)
    for shape, ridge, colour in zip(shapes, ridges, _COLOURS, strict=False):
        shares = [shape.roof(count, read, multiply) / multiply for count in tokens]
        label = f"{shape.name}: top {shape.chosen} of {shape.experts}, ridge {ridge:,.0f}"
        ax.plot(tokens, shares, color=colour, label=label)
        ax.axvline(ridge, color=colour, linewidth=0.8, linestyle=":")
    ax.set(xscale="log", yscale="log", xlabel="tokens in the batch", ylabel="most, of the arithmetic rate")
    _plain_numbers(ax)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    ax.set_title(said or f"{multiply / 1e12:,.3g} TFLOP/s, {read / 1e9:,.0f} GB/s", loc="left", fontsize=9)
    return _finished(ax)


def _plain_numbers(ax: Axes) -> None:
    ax.xaxis.set_major_locator(LogLocator(base=4 if ax.get_xlim()[1] < 1e5 else 10, numticks=12))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _finished(ax: Axes) -> Axes:
    ax.grid(True, which="major", color="#e5e7eb", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2, frameon=False, fontsize=8.5)
    return ax
