"""Pictures of results: throughput bars and curves, lane charts, KV and batch over time.

Each function takes an `ax` and returns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

from workbench.core.result import Result, Source
from workbench.core.timeline import ITERATION, SUBSCRIPTS, Timeline, code_of
from workbench.plots.lane_bars import bars

COLOURS = {
    Source.BOUND: "#9ca3af",
    Source.PREDICTED: "#a78bfa",
    Source.SIMULATED: "#60a5fa",
    Source.MEASURED: "#059669",
    Source.RECORDED: "#34d399",
    Source.PUBLISHED: "#f59e0b",
}
PREDICTORS = (COLOURS[Source.PREDICTED], "#7c3aed", "#ddd6fe")
"""Colours of several predictive models, in order."""
TASK_COLOURS = {
    "A": "#2563eb",
    "B": "#d1048c",
    "F": "#cc9f6b",
    "C": "#0a8f62",
    "D": "#8fb83e",
    "Q": "#d97706",
    "T": "#e58fd0",
    "H": "#a53b3c",
    "X": "#632fbb",
    "W": "#2c8cb3",
    "K": "#c29b12",
}
"""Colours of tasks: on white and on black alike, and those of one lane told apart by colour-blind readers."""
_OTHER = "#6b7280"
SCHEDULE_COLOURS = ("#d97706", "#059669", "#0891b2", "#7c3aed", "#2563eb", "#db2777")
_PALER = 0.45
"""How much nearer to white each further pipeline of a stack is drawn."""


def task_colour(code: str) -> str:
    """Colour of the tasks of a node; those of further pipelines of a stack are paler."""
    red, green, blue = (1 - channel for channel in to_rgb(TASK_COLOURS.get(code[:1], _OTHER)))
    number = int(code[1:].translate(str.maketrans(SUBSCRIPTS, "0123456789")) or "1")
    left = (1 - _PALER) ** (number - 1)
    return to_hex((1 - left * red, 1 - left * green, 1 - left * blue))


_SMALL = 7
_LETTER = 0.9 * _SMALL
"""Width per letter that a bubble's label needs [points], including a margin on both sides."""
_DARKER = 0.7


def plot_throughput(results: Sequence[Result], ax: Axes | None = None) -> Axes:
    """Plot the output tokens per second of every result, grouped by schedule and coloured by source."""
    schedules = list(dict.fromkeys(result.schedule for result in results))
    if ax is None:
        size = (7, max(3.2, 1 + 0.45 * len(schedules)))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    sources = list(Source)
    origins = {result.origin: result for result in sorted(results, key=lambda r: sources.index(r.source))}
    colours = _colours(list(origins.values()))
    height = 0.8 / len(origins)
    labels = set[str]()
    for row, schedule in enumerate(schedules):
        for place, origin in enumerate(origins):
            found = [r for r in results if r.schedule == schedule and r.origin == origin]
            if not found:
                continue
            y = row + (place - (len(origins) - 1) / 2) * height
            rate = found[0].gen_tok_s
            label = None if origin in labels else origin
            ax.barh(y, rate, height * 0.92, color=colours[origin], label=label)
            ax.annotate(f" {rate:.3g}", (rate, y), va="center", fontsize=9)
            labels.add(origin)
    ax.set_yticks(range(len(schedules)), schedules)
    ax.invert_yaxis()
    ax.set_xlabel("output tokens per second")
    ax.margins(x=0.12)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False)
    return ax


def _colours(results: Sequence[Result]) -> dict[str, str]:
    """A colour for each origin: that of its source, with shades for several predictive models."""
    shades = cycle(PREDICTORS)
    return {r.origin: next(shades) if r.source is Source.PREDICTED else COLOURS[r.source] for r in results}


def plot_gains(gains: Sequence[tuple[str, float]], ax: Axes | None = None) -> Axes:
    """Plot the gain in throughput by more of each resource: one bar per factor, starting at one."""
    ax = ax if ax is not None else plt.subplots(figsize=(7, 0.6 + 0.45 * len(gains)), layout="constrained")[1]
    names, factors = zip(*gains, strict=True)
    ax.barh(names, [factor - 1 for factor in factors], left=1, height=0.7, color=COLOURS[Source.SIMULATED])
    for row, factor in enumerate(factors):
        ax.annotate(f" {factor:.2f}x", (max(factor, 1.0), row), va="center", fontsize=9)
    ax.invert_yaxis()
    ax.axvline(1, color=_OTHER, linewidth=0.8)
    ax.set_xlabel("output tokens per second, as a factor")
    ax.margins(x=0.12)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_timeline(timeline: Timeline, ax: Axes | None = None, *, title: str = "", seconds: float | None = None) -> Axes:
    """Plot a lane chart: one row per lane, one bar per task, and in idle time the task that the next one waited for.

    Tasks narrower than a pixel are drawn together, as high as the share of the pixel in which they kept the lane busy.

    Parameters
    ----------
    timeline : Timeline
    title : str
    seconds : float, optional
        Length of the time axis, by default that of the timeline [s].
    """
    ax = ax if ax is not None else plt.subplots(figsize=(10, 2.2), layout="constrained")[1]
    until = seconds or max(timeline.seconds, 1e-9)
    pixel = until / ax.get_window_extent().width
    columns, single = bars(timeline, pixel)
    codes = [*columns.codes, *single.codes]
    chart = PolyCollection(
        np.concatenate([columns.corners, single.corners]),  # type: ignore[arg-type]
        facecolors=[task_colour(code) for code in codes],
        edgecolors="white",
        linewidths=[0.0] * len(columns.codes) + [0.3] * len(single.codes),
        antialiaseds=[False] * len(columns.codes) + [True] * len(single.codes),  # no gaps between columns
    )
    ax.add_collection(chart, autolim=False)
    ax.set_yticks(range(len(timeline.lanes)), timeline.lanes)
    ax.set_ylim(len(timeline.lanes) - 0.5, -0.5)
    ax.set_xlim(0, until)
    ax.set_xlabel("seconds")
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    keys = {code: f"{code}  {timeline.labels.get(code, '')}" for code in sorted(set(codes))}
    patches = [Patch(color=task_colour(code), label=label) for code, label in keys.items()]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False, fontsize=8)
    _label_bubbles(timeline, ax, pixel)
    return ax


def _label_bubbles(timeline: Timeline, ax: Axes, pixel: float) -> None:
    """Label idle time with the task that ended it, in a darker shade of its colour, where the label fits."""
    letter = _LETTER * ax.figure.dpi / 72 * pixel
    for bubble in timeline.bubbles():
        lane, _, name = bubble.after.partition(" ")
        fitting = [label for label in _wordings(lane, name) if len(label) * letter < bubble.end - bubble.start]
        if fitting and lane != bubble.lane:  # a lane that waited for its own task was only late
            centre = (bubble.start + bubble.end) / 2 - timeline.begin
            row = timeline.lanes.index(bubble.lane)
            shade = [_DARKER * channel for channel in to_rgb(task_colour(code_of(name)))]
            ax.text(centre, row, fitting[0], color=shade, fontsize=_SMALL, ha="center", va="center", clip_on=True)


def _wordings(lane: str, name: str) -> tuple[str, ...]:
    """Labels of idle time that task `name` of a lane ended, the longest first."""
    if name:
        return (f"waits for {name}", f"({name})")
    return ("next iteration",) if lane == ITERATION else ()


def plot_lanes(results: Sequence[Result], iterations: tuple[int, int] | None = None) -> list[Axes]:
    """Plot lane charts of several results, such as simulated and measured, on one time axis.

    Parameters
    ----------
    results : sequence of Result
        Results with timelines of tasks, from `run` and ``simulate(..., detail=Detail.TASK)``.
    iterations : (int, int), optional
        First one shown, and the one after the last; by default two in the middle of the first result.
    """
    first, last = iterations or middle(results[0].timeline)
    windows = [result.timeline.window(first, last) for result in results]
    _, grid = plt.subplots(
        len(results), figsize=(10, 2 * len(results)), layout="constrained", sharex=True, squeeze=False
    )
    axes: list[Axes] = list(grid[:, 0])
    longest = max(window.seconds for window in windows)
    for ax, result, window in zip(axes, results, windows, strict=True):
        title = f"{result.source.value}: {result.schedule}, iterations {first} to {last - 1}"
        plot_timeline(window, ax, title=title, seconds=longest)
    return axes


def middle(timeline: Timeline, count: int = 2) -> tuple[int, int]:
    """Return the `count` iterations in the middle: the first of them, and the one after the last."""
    seen = 1 + max((span.iteration for span in timeline), default=0)
    first = max(0, (seen - count) // 2)
    return first, min(seen, first + count)


def plot_iterations(result: Result, ax: Axes | None = None, *, title: str = "") -> Axes:
    """Plot the prefill and decode tokens of every iteration, and the KV blocks in use, over time."""
    ax = ax if ax is not None else plt.subplots(figsize=(10, 2.4), layout="constrained")[1]
    edges = np.concatenate(([0.0], np.cumsum(result.steps.array("seconds"))))
    decode = result.steps.array("decode")
    prefill = result.steps.array("prefill")
    ax.stairs(decode, edges, fill=True, color="#059669", label="decode tokens")
    ax.stairs(decode + prefill, edges, baseline=decode, fill=True, color="#60a5fa", label="prefill tokens")
    ax.set_xlabel("seconds")
    ax.set_ylabel("tokens per iteration")
    blocks = ax.twinx()
    blocks.stairs(result.steps.array("used_blocks"), edges, baseline=None, color="#111827", label="KV blocks in use")
    blocks.set_ylabel("KV blocks")
    blocks.set_ylim(bottom=0)
    token_handles, token_labels = ax.get_legend_handles_labels()
    block_handles, block_labels = blocks.get_legend_handles_labels()
    ax.legend(
        [*token_handles, *block_handles],
        [*token_labels, *block_labels],
        loc="upper left",
        bbox_to_anchor=(0, 1.2),
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    ax.set_xlim(0, edges[-1])
    ax.set_ylim(bottom=0)
    ax.set_title(title, loc="right", fontsize=10)
    return ax
