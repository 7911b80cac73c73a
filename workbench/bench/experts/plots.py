"""Plots of measured expert kernels: speed by tokens per expert, and share of the memory's rate at few tokens.

Each takes an `ax` and returns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from workbench.bench.experts.speeds import ExpertSpeeds

_COLOURS = ("#1d4ed8", "#60a5fa", "#059669", "#d97706", "#6b7280", "#be185d", "#7c3aed", "#b45309")
_LIMIT = "#9ca3af"
_MARK = "#111827"
_SHADES = (1.0, 0.45)


def plot_expert_speeds(
    speeds: ExpertSpeeds, ax: Axes | None = None, *, against: str | None = None, marks: Sequence[tuple[str, str]] = ()
) -> Axes:
    """Plot the rate of every implementation over tokens per expert.

    The limits of memory are dashed, that of fp32 arithmetic is dotted.

    Parameters
    ----------
    speeds : ExpertSpeeds
    against : str, optional
        An implementation whose speed counts as one; the picture then shows ratios and no limits.
    marks : sequence of (str, str)
        Pairs of implementations; a ring marks the number of tokens from which on the first is never slower.

    Raises
    ------
    ValueError
        If one of them was not measured.
    """
    named = [against]
    for pair in marks:
        named.extend(pair)
    for name in named:
        if name is not None and name not in speeds.contenders:
            raise ValueError(f"there is no contender {name!r}: give one of {list(speeds.contenders)}.")
    ax = ax if ax is not None else plt.subplots(figsize=(8, 4.6), layout="constrained")[1]
    colours = dict(zip(speeds.contenders, _COLOURS, strict=False))
    for name, colour in colours.items():
        tokens = [n for n in speeds.tokens(name) if against is None or (against, n) in speeds.runs]
        heights = [_height(speeds, name, n, against) for n in tokens]
        marker = "s" if name.startswith("torch") else "o"
        ax.plot(tokens, heights, f"{marker}-", markersize=4, color=colour, label=name)
    if against is None:
        _limits(ax, speeds)
    for place, pair in enumerate(marks):
        _crossing(ax, speeds, pair, against, 0.04 + 0.13 * place)
    ax.set(xscale="log", yscale="log", xlabel="tokens per expert")
    ax.set_ylabel("GFLOP per second" if against is None else f"times as fast as {against}")
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_title(str(speeds), loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return ax


def _height(speeds: ExpertSpeeds, name: str, tokens: int, against: str | None) -> float:
    if against is None:
        return speeds.flop_rate(name, tokens) / 1e9
    return speeds.seconds(against, tokens) / speeds.seconds(name, tokens)


def _limits(ax: Axes, speeds: ExpertSpeeds) -> None:
    """Draw one dashed line per size of weights up to the highest rate, and one across for fp32 multiply-adds."""
    top = max(speeds.flop_rate(*key) for key in speeds.runs)
    last = max(tokens for _, tokens in speeds.runs)
    formats = {size: name for name, size in speeds.weight_bytes.items()}
    for place, name in enumerate(formats.values()):
        end = top / speeds.memory_limit(name, 1)
        label = "as fast as memory is read" if place == 0 else None
        ax.plot([1, end], [speeds.memory_limit(name, 1) / 1e9, top / 1e9], "--", color=_LIMIT, lw=1, label=label)
    label = "fp32 multiply-adds"
    ax.plot([1, last], [speeds.multiply / 1e9] * 2, ":", color=_MARK, linewidth=1, label=label)


def _crossing(ax: Axes, speeds: ExpertSpeeds, pair: tuple[str, str], against: str | None, bottom: float) -> None:
    """Draw a ring around the crossing, with its explanation at the lower right."""
    name, other = pair
    tokens = speeds.overtakes(name, other)
    place = (0.98, bottom)
    style: dict[str, Any] = {"ha": "right", "fontsize": 9, "color": _MARK}
    if tokens is None:
        ax.annotate(f"{name} is not ahead\nof {other}", place, xycoords="axes fraction", **style)
        return
    height = _height(speeds, name, tokens, against)
    ax.plot(tokens, height, "o", markersize=11, markerfacecolor="none", markeredgecolor=_MARK)
    said = f"{name} is ahead of\n{other} from {tokens} token{'s' if tokens > 1 else ''} on"
    arrow = {"arrowstyle": "-", "color": _MARK, "linewidth": 0.8, "shrinkB": 6, "relpos": (0, 0.5)}
    ax.annotate(said, (tokens, height), place, textcoords="axes fraction", arrowprops=arrow, **style)


def plot_memory_share(several: Sequence[ExpertSpeeds], ax: Axes | None = None, *, tokens: int = 1) -> Axes:
    """Plot each implementation's rate of reading weights over the rate of reading memory in order just before.

    Parameters
    ----------
    several : sequence of ExpertSpeeds
        Measurements of the same implementations, such as with one thread and with all; one bar each.
    tokens : int
        Tokens per expert.
    """
    names = [name for name in several[0].contenders if (name, tokens) in several[0].runs]
    lines = len(names) * len(several)
    ax = ax if ax is not None else plt.subplots(figsize=(8, 1.2 + 0.32 * lines), layout="constrained")[1]
    colours = dict(zip(several[0].contenders, _COLOURS, strict=False))
    height = 0.8 / len(several)
    for row, name in enumerate(names):
        for place, speeds in enumerate(several):
            share = speeds.memory_share(name, tokens)
            seconds = speeds.seconds(name, tokens)
            y = row + (place - (len(several) - 1) / 2) * height
            ax.barh(y, share, height * 0.92, color=colours[name], alpha=_SHADES[place % len(_SHADES)])
            threads = "1 thread" if speeds.threads == 1 else f"{speeds.threads} threads"
            rate = speeds.weight_bytes[name] / seconds
            said = f"{threads}: {share:.0%} = {rate / 1e9:.1f} GB/s, {seconds * 1e3:.2f} ms per expert"
            ax.annotate(said, (max(1, share), y), (6, 0), textcoords="offset points", va="center", fontsize=8)
    ax.axvline(1, color=_MARK, linewidth=0.8, linestyle="--")
    ax.set_yticks(range(len(names)), [_sized(several[0], name) for name in names])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.75)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.set_xlabel("share of the rate at which memory is read in order")
    ax.xaxis.set_label_coords(1 / 1.75 / 2, -0.14)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _sized(speeds: ExpertSpeeds, name: str) -> str:
    return f"{name}\n{speeds.weight_bytes[name] / 1e6:.1f} MB per expert"
