"""The dashboard's picture of predictions: one figure for its whole life, drawn anew and shown as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench.plots import plot_sweep
from workbench.result import Result
from workbench.units import format_bytes

INK = "#7d858f"  # between the themes: contrast 3.7 to white, 5.0 to JupyterLab's dark grey
SIZE = (6.0, 3.6)  # inches
DPI = 100


class CurvePicture:
    """Draws pairs of KV capacity and result; a new figure each time would take three times as long."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=SIZE, dpi=DPI, facecolor="none")
        self.figure.subplots_adjust(left=0.1, right=0.975, top=0.85, bottom=0.13)
        self.canvas = FigureCanvasAgg(self.figure)
        self.ax = self.figure.add_subplot()

    def png(self, pairs: Sequence[tuple[float, Result]], chosen: float, span: tuple[float, float]) -> bytes:
        """The picture with a mark at the chosen KV capacity, over capacities from one end to the other [B]."""
        self.ax.clear()
        plot_sweep(pairs, self.ax)
        self.ax.set_xlim(span[0] / 1.1, span[1] * 1.1)
        self.ax.axvline(chosen, color=INK, linewidth=0.8)
        over = self.ax.get_xaxis_transform()
        self.ax.text(chosen, 1.015, format_bytes(chosen), transform=over, ha="center", fontsize=9)
        _tone(self.ax)
        buffer = io.BytesIO()
        self.canvas.print_png(buffer)  # type: ignore[no-untyped-call]
        return buffer.getvalue()


def _tone(ax: Axes) -> None:
    """Make paper transparent and ink grey; by hand, as the rc parameters belong to every thread."""
    ax.set_facecolor("none")
    ax.tick_params(colors=INK, labelsize=9)
    legend = ax.get_legend()
    for text in (ax.xaxis.label, ax.yaxis.label, *ax.texts, *(legend.get_texts() if legend else ())):
        text.set_color(INK)
    for spine in ax.spines.values():
        spine.set_color(INK)
