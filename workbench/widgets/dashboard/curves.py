"""The dashboard's picture of predictions: one figure that is redrawn and shown as a PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D

from workbench.core.result import Result
from workbench.core.units import format_bytes
from workbench.plots import frame_sweep, sweep_lines

Pairs = Sequence[tuple[float, Result]]
"""KV capacities [B], each with a result drawn there."""
INK = "#7d858f"  # between the themes: contrast 3.7 to white, 5.0 to JupyterLab's dark grey
SIZE = (6.0, 3.6)  # inches
DPI = 100
EMPTY = "These settings can be served at none of these KV capacities."
_EDGE = 0.06  # share of the axis, at each end, where labels are aligned inwards
_PALE = 0.25  # opacity of earlier curves
_TOPS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
"""Ends of the vertical axis, times a power of ten: few, so that the axis rarely changes while a slider moves."""


class CurvePicture:
    """A picture of pairs of KV capacity and result.

    Axes and legend take nearly all of the drawing time, so they are drawn only when they change, and else copied.
    """

    def __init__(self) -> None:
        self.figure = Figure(figsize=SIZE, dpi=DPI, facecolor="none")
        self.figure.subplots_adjust(left=0.1, right=0.975, top=0.77, bottom=0.13)
        self.canvas = FigureCanvasAgg(self.figure)
        self.ax = self.figure.add_subplot()
        self._framed: object = None
        self._frame: Any = None

    def png(self, pairs: Pairs, chosen: float, span: tuple[float, float], before: Pairs = ()) -> bytes:
        """Draw the pairs over the capacities of `span` [B], with a mark at the chosen one.

        The pairs of `before` stay visible in pale behind curves that are not complete yet.
        """
        for artist in (*self.ax.lines, *self.ax.texts):
            artist.remove()
        old = sweep_lines(before, self.ax)
        for line in old:
            line.set(alpha=_PALE, label="_")  # an underscore keeps it out of the legend
        new = sweep_lines(pairs, self.ax)
        self._set_frame(new, span, top_of((*pairs, *before)))
        self.canvas.restore_region(self._frame)  # type: ignore[no-untyped-call]
        mark: list[Artist] = []
        labels: list[Artist] = []
        if pairs:
            mark.append(self.ax.axvline(chosen, color=INK, linewidth=0.8))
        else:
            labels.append(self._text(math.sqrt(span[0] * span[1]), 0.5, EMPTY, "center"))
        labels.append(self._text(chosen, 1.015, format_bytes(chosen), beside(chosen, span)))
        for artist in (*old, *mark, *new, *labels):
            self.ax.draw_artist(artist)
        buffer = io.BytesIO()
        pixels = np.asarray(self.canvas.buffer_rgba())  # type: ignore[no-untyped-call]
        imsave(buffer, pixels, format="png", pil_kwargs={"compress_level": 1})
        return buffer.getvalue()

    def _text(self, capacity: float, height: float, words: str, where: str) -> Artist:
        """Write words over a KV capacity [B], at a share of the height."""
        over = self.ax.get_xaxis_transform()
        return self.ax.text(capacity, height, words, transform=over, ha=where, fontsize=9, color=INK)

    def _set_frame(self, lines: Sequence[Line2D], span: tuple[float, float], top: float) -> None:
        needed = (span, top, tuple((line.get_label(), line.get_color()) for line in lines))
        if needed == self._framed:
            return
        if legend := self.ax.get_legend():
            legend.remove()
        frame_sweep(self.ax, lines)
        self.ax.set_xlim(span[0] / 1.1, span[1] * 1.1)
        self.ax.set_ylim(0, top)
        self.ax.yaxis.set_visible(bool(lines))
        _tone(self.ax)
        for line in self.ax.lines:
            line.set_animated(True)  # left out of the frame
        self.canvas.draw()  # type: ignore[no-untyped-call]
        self._frame = self.canvas.copy_from_bbox(self.figure.bbox)  # type: ignore[no-untyped-call]
        self._framed = needed


def top_of(pairs: Pairs) -> float:
    """Choose the end of a vertical axis that shows all rates with a small margin."""
    most = 1.02 * max((result.gen_tok_s for _, result in pairs), default=1.0)
    power = 10.0 ** math.floor(math.log10(most))
    return float(next(top * power for top in _TOPS if top * power >= most))


def beside(chosen: float, span: tuple[float, float]) -> str:
    """Choose the alignment of words at a KV capacity: centred, or inwards near the ends of the axis."""
    share = math.log(chosen / span[0]) / math.log(span[1] / span[0])
    if share < _EDGE:
        return "left"
    return "right" if share > 1 - _EDGE else "center"


def _tone(ax: Axes) -> None:
    """Make the background transparent and lines grey; not by rc parameters, which all threads share."""
    ax.set_facecolor("none")
    ax.tick_params(colors=INK, labelsize=9)
    legend = ax.get_legend()
    for text in (ax.xaxis.label, ax.yaxis.label, *(legend.get_texts() if legend else ())):
        text.set_color(INK)
    for spine in ax.spines.values():
        spine.set_color(INK)
