"""Bars of a lane chart: tasks that can be seen one by one, and how busy a lane was where they cannot."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.timeline import Timeline

_HALF = 0.38  # of a bar's height, where a row is 1 high

Floats = npt.NDArray[np.floating[Any]]


class Bars(NamedTuple):
    """Rectangles (bar, corner, x and y), in seconds from the timeline's begin and rows, and the code of their tasks."""

    corners: Floats
    codes: list[str]


class _Columns(NamedTuple):
    """Spans as arrays: row, place of the code among all codes, start and end [s]."""

    row: npt.NDArray[np.int64]
    code: npt.NDArray[np.int64]
    start: Floats
    end: Floats

    def where(self, chosen: npt.NDArray[Any]) -> _Columns:
        """Those of an index or mask."""
        return _Columns(self.row[chosen], self.code[chosen], self.start[chosen], self.end[chosen])


def bars(timeline: Timeline, pixel: float) -> tuple[Bars, Bars]:
    """The bars of a timeline: columns of what is narrower than a pixel, and all others, long ones first.

    A column is a pixel wide and as high as the share of it in which short tasks kept the lane busy, by code from the
    bottom up. So what is drawn of a lane is in proportion to its work, however many tasks there are.

    Parameters
    ----------
    timeline : Timeline
    pixel : float
        Width of a pixel [s].
    """
    codes = sorted({span.name[:1] for span in timeline})
    spans = _columns(timeline, codes)
    wide = spans.end - spans.start >= pixel
    return _busy(spans.where(~wide), len(timeline.lanes), codes, pixel), _single(spans.where(wide), codes)


def _columns(timeline: Timeline, codes: list[str]) -> _Columns:
    rows, begin = {lane: row for row, lane in enumerate(timeline.lanes)}, timeline.begin
    place = {code: number for number, code in enumerate(codes)}
    return _Columns(
        np.array([rows[span.lane] for span in timeline], dtype=np.int64),
        np.array([place[span.name[:1]] for span in timeline], dtype=np.int64),
        np.array([span.start - begin for span in timeline], dtype=np.float64),
        np.array([span.end - begin for span in timeline], dtype=np.float64),
    )


def _single(spans: _Columns, codes: list[str]) -> Bars:
    """One bar per task; the long ones first, because short transfers pass within long ones."""
    order = np.argsort(spans.start - spans.end, kind="stable")
    row, code, start, end = spans.where(order)
    return Bars(_rectangles(start, end, row + _HALF, row - _HALF), [codes[number] for number in code])


def _busy(spans: _Columns, lanes: int, codes: list[str], pixel: float) -> Bars:
    first = (spans.start // pixel).astype(np.int64)
    edge = np.minimum((first + 1) * pixel, spans.end)  # a short task reaches into the next pixel at most
    share = np.zeros((lanes, 2 + int(first.max(initial=0)), len(codes)))
    np.add.at(share, (spans.row, first, spans.code), (edge - spans.start) / pixel)
    np.add.at(share, (spans.row, first + 1, spans.code), (spans.end - edge) / pixel)
    total = share.cumsum(axis=2)
    low, high = np.minimum(total - share, 1.0), np.minimum(total, 1.0)
    drawn = row, column, code = np.nonzero(share)
    floor, left = row + _HALF, column * pixel
    corners = _rectangles(left, left + pixel, floor - 2 * _HALF * low[drawn], floor - 2 * _HALF * high[drawn])
    return Bars(corners, [codes[number] for number in code])


def _rectangles(left: Floats, right: Floats, bottom: Floats, top: Floats) -> Floats:
    return np.array([(left, bottom), (right, bottom), (right, top), (left, top)]).transpose(2, 0, 1)
