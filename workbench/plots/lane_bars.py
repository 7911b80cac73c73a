"""Bars of a lane chart: one per task that is wide enough to be seen, and columns of lane activity for the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.timeline import Timeline, code_of

_HALF = 0.38  # half of a bar's height, in rows

Floats = npt.NDArray[np.floating[Any]]


class Bars(NamedTuple):
    """Corners (bar, corner, x and y) in seconds from the timeline's begin and in rows, and the codes of their tasks."""

    corners: Floats
    codes: list[str]


class _Columns(NamedTuple):
    """Spans as arrays: row, index of the code, start and end [s]."""

    row: npt.NDArray[np.int64]
    code: npt.NDArray[np.int64]
    start: Floats
    end: Floats

    def where(self, chosen: npt.NDArray[Any]) -> _Columns:
        """Select spans by an index or a mask."""
        return _Columns(self.row[chosen], self.code[chosen], self.start[chosen], self.end[chosen])


def bars(timeline: Timeline, pixel: float) -> tuple[Bars, Bars]:
    """Return the bars of a timeline: columns for tasks narrower than a pixel, and a bar for each other task.

    A column is a pixel wide and as high as the share of it in which short tasks kept the lane busy, by code from the
    bottom up. The area drawn for a lane is therefore in proportion to its work. Bars come in order of falling length.

    Parameters
    ----------
    timeline : Timeline
    pixel : float
        Width of a pixel [s].
    """
    codes = sorted({code_of(span.name) for span in timeline})
    spans = _columns(timeline, codes)
    wide = spans.end - spans.start >= pixel
    return _busy(spans.where(~wide), len(timeline.lanes), codes, pixel), _single(spans.where(wide), codes)


def _columns(timeline: Timeline, codes: list[str]) -> _Columns:
    rows = {lane: row for row, lane in enumerate(timeline.lanes)}
    begin = timeline.begin
    place = {code: number for number, code in enumerate(codes)}
    return _Columns(
        np.array([rows[span.lane] for span in timeline], dtype=np.int64),
        np.array([place[code_of(span.name)] for span in timeline], dtype=np.int64),
        np.array([span.start - begin for span in timeline], dtype=np.float64),
        np.array([span.end - begin for span in timeline], dtype=np.float64),
    )


def _single(spans: _Columns, codes: list[str]) -> Bars:
    """One bar per task, the long ones first, because short transfers overlap long ones."""
    order = np.argsort(spans.start - spans.end, kind="stable")
    row, code, start, end = spans.where(order)
    return Bars(_rectangles(start, end, row + _HALF, row - _HALF), [codes[number] for number in code])


def _busy(spans: _Columns, lanes: int, codes: list[str], pixel: float) -> Bars:
    """Columns of one pixel, as high as the share of it that tasks of each code fill."""
    first = (spans.start // pixel).astype(np.int64)
    edge = np.minimum((first + 1) * pixel, spans.end)  # a short task covers at most this pixel and the next
    share = np.zeros((lanes, 2 + int(first.max(initial=0)), len(codes)))
    np.add.at(share, (spans.row, first, spans.code), (edge - spans.start) / pixel)
    np.add.at(share, (spans.row, first + 1, spans.code), (spans.end - edge) / pixel)
    total = share.cumsum(axis=2)
    low = np.minimum(total - share, 1.0)
    high = np.minimum(total, 1.0)
    row, column, code = np.nonzero(share)
    left = column * pixel
    bottom = row + _HALF - 2 * _HALF * low[row, column, code]
    top = row + _HALF - 2 * _HALF * high[row, column, code]
    corners = _rectangles(left, left + pixel, bottom, top)
    return Bars(corners, [codes[number] for number in code])


def _rectangles(left: Floats, right: Floats, bottom: Floats, top: Floats) -> Floats:
    return np.array([(left, bottom), (right, bottom), (right, top), (left, top)]).transpose(2, 0, 1)
