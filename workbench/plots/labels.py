"""Names beside points of a picture, placed so that they do not overlap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from numpy.typing import ArrayLike, NDArray

Boxes = NDArray[np.float64]
"""Left, bottom, right and top of N boxes [pixels], shape (N, 4)."""

_WIDTH = 0.65
"""Width of a character of matplotlib's default font [font sizes]."""
_HEIGHT = 1.3
"""Height of a character of matplotlib's default font [font sizes]."""
_RADII = np.array([4, 10, 18, 28, 40, 54, 70, 90])
"""Distances between a point and its name to try [points]."""
_ANGLES = np.deg2rad([0, 30, -30, 60, -60, 180, 150, -150, 120, -120])
_TRIED = np.concatenate([radius * np.column_stack([np.cos(_ANGLES), np.sin(_ANGLES)]) for radius in _RADII])
"""Shifts from a point to try, the nearest first [points]."""
_FAR = 10
"""Distance from which a line joins the name to its point [points]."""


class Label(NamedTuple):
    """A name, its point [data units], and its colour."""

    text: str
    x: float
    y: float
    colour: str


def place_labels(ax: Axes, labels: Iterable[Label], *, size: float = 7, avoid: ArrayLike = ()) -> None:
    """Write each name at the nearest free place around its point; a thin line joins a distant name to its point.

    Parameters
    ----------
    ax : Axes
        Axes with their final limits; the layout of their figure is fixed here.
    labels : iterable of Label
        Labels in the order in which they are placed.
    size : float
        Font size [points].
    avoid : array (N, 2)
        Other points that no name should cover [data units].
    """
    names = list(labels)
    ax.figure.canvas.figure.draw_without_rendering()  # fixes the layout, on which display coordinates depend
    pixels = ax.figure.dpi / 72
    anchors = ax.transData.transform(np.array([(label.x, label.y) for label in names]).reshape(-1, 2))
    others = ax.transData.transform(np.asarray(avoid, dtype=np.float64).reshape(-1, 2))
    marks = np.concatenate([anchors, others])
    taken = np.hstack([marks - 2.5 * pixels, marks + 2.5 * pixels])
    for label, anchor in zip(names, anchors, strict=True):
        boxes = _boxes(anchor, pixels, size * len(label.text) * _WIDTH, size * _HEIGHT)
        cost = _overlaps(boxes, taken).sum(axis=1) + 1e3 * _outside(boxes, np.asarray(ax.bbox.extents))
        chosen = int(np.argmin(cost))  # the first of the least costs
        taken = np.vstack([taken, boxes[chosen]])
        _write(ax, label, _TRIED[chosen], size)


def _write(ax: Axes, label: Label, shift: NDArray[np.float64], size: float) -> None:
    line = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.4, "alpha": 0.7, "shrinkA": 0, "shrinkB": 0}
    ax.annotate(
        label.text,
        (label.x, label.y),
        (float(shift[0]), float(shift[1])),
        textcoords="offset points",
        fontsize=size,
        color=label.colour,
        ha="left" if shift[0] > 0 else "right",
        va="center",
        arrowprops=line if np.hypot(*shift) > _FAR else None,
        path_effects=[withStroke(linewidth=1.5, foreground="white")],  # legible on lines
    )


def _boxes(anchor: NDArray[np.float64], pixels: float, width: float, height: float) -> Boxes:
    """Boxes of a name of this size [points], one per shift to try."""
    at = anchor + pixels * _TRIED
    left = np.where(_TRIED[:, 0] > 0, at[:, 0], at[:, 0] - pixels * width)
    bottom = at[:, 1] - pixels * height / 2
    return np.column_stack([left, bottom, left + pixels * width, bottom + pixels * height])


def _overlaps(a: Boxes, b: Boxes) -> NDArray[np.float64]:
    """Shared area of each pair of boxes [pixels^2], shape (a, b)."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    area: NDArray[np.float64] = np.prod(np.maximum(high - low, 0), axis=2)
    return area


def _outside(boxes: Boxes, inside: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance by which each box exceeds the axes [pixels]."""
    low = np.maximum(0, inside[:2] - boxes[:, :2])
    high = np.maximum(0, boxes[:, 2:] - inside[2:])
    beyond: NDArray[np.float64] = (low + high).sum(axis=1)
    return beyond
