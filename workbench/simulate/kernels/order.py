"""The tasks of a plan in the arrays that the kernels take."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.schedules.plan import LANES, Turns

Ints = npt.NDArray[np.int64]


class Order(NamedTuple):
    """The `Turns` of a plan in arrays, in the order in which the kernels take them.

    Attributes
    ----------
    lane, bulk, group : ndarray (tasks,) int64
        Of each task: the place of its lane in `LANES`, 1 if it is bulk, and its group.
    first : ndarray (tasks + 1,) int64
        Of each task the place in `after` of the first that it waits for.
    after : ndarray int64
        The tasks that each waits for, one task after the other.
    lanes : ndarray (lanes,) int64
        1 for the lanes of tasks that are not bulk.
    repeats : ndarray (repeats, 4) int64
        First, length, stop and reach of each repeat.
    repeat_lanes : ndarray (repeats, lanes) int64
        1 for the lanes of a repeat's tasks that are not bulk.
    groups : ndarray (groups, 2) int64
        Lane and number of tasks of each group.
    """

    lane: Ints
    bulk: Ints
    group: Ints
    first: Ints
    after: Ints
    lanes: Ints
    repeats: Ints
    repeat_lanes: Ints
    groups: Ints

    @classmethod
    def of(cls, turns: Turns) -> Order:
        """Make the arrays of a plan's turns."""
        lane, after, bulk, group = zip(*turns.tasks, strict=True)
        first = np.cumsum([0, *map(len, after)])
        waits = [other for each in after for other in each]
        repeats = [(*repeat, reach) for repeat, _, reach in turns.repeats]
        return cls(
            _ints([LANES.index(each) for each in lane]),
            _ints(bulk),
            _ints(group),
            _ints(first),
            _ints(waits),
            _among(turns.lanes),
            _ints(repeats).reshape(-1, 4),
            _ints([_among(lanes) for _, lanes, _ in turns.repeats]).reshape(-1, len(LANES)),
            _ints([(LANES.index(each), count) for each, count in turns.groups]).reshape(-1, 2),
        )


def _ints(values: Any) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int64)


def _among(lanes: tuple[str, ...]) -> Ints:
    return _ints([lane in lanes for lane in LANES])
