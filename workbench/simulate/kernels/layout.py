"""The kernel that prices a plan and lays it out."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.simulate.kernels.compiling import entry, inner, making
from workbench.simulate.kernels.playing import places_before, play, room_of
from workbench.simulate.kernels.pricing import priced


@entry
def lay_out(
    order: Any,
    tapes: Any,
    first_of: Any,
    groups: Any,
    runs_on: Any,
    rows: Any,
    prices: Any,
    carried: Any,
    bandwidth: Any,
    packet: Any,
    skip: Any,
    starts: Any,
    ends: Any,
    busy: Any,
    told: Any,
    before: Any,
) -> Any:
    """Price the groups of a plan and play it, as `PlanCost.lay_out` does where lanes share no cores.

    Parameters
    ----------
    groups : ndarray (groups, 3) int64
        Of each group: its family of tapes, or -1 if its price is given; the first of its rows; and 1 if it is the rest
        of the transfer that takes `carried` seconds.
    runs_on : ndarray int64
        Places of the transfers that the iteration lets run on.
    rows : ndarray float64
        Counts of rows of all parts.
    prices : ndarray (groups, 3) float64
        Seconds, bytes and slowdown of each group, written unless given.
    starts, ends, busy, told : ndarray float64
        Written: see `plan.play`; `told` has `LaidOut`'s dram, seconds and runs_on.
    before : ndarray (tasks,) int64
        Written unless tasks are skipped: see `plan.places_before`.

    Returns
    -------
    int
        The first group for whose rows no tape holds, else -1; nothing else is written if there is one.
    """
    return laid_out(
        order,
        tapes,
        first_of,
        groups,
        runs_on,
        rows,
        prices,
        carried,
        bandwidth,
        packet,
        skip,
        starts,
        ends,
        busy,
        told,
        before,
        scratch_of(order, tapes, groups),
    )


@making
def scratch_of(order: Any, tapes: Any, groups: Any) -> Any:
    """The arrays that `laid_out` works in: values of a tape, times of groups, hints (see `priced`), and `room_of`.

    The last hint is that of the bytes of experts.
    """
    hints = np.full(len(groups) + 1, -1, np.int64)
    return np.empty(tapes[2][0, 8]), np.empty((2, len(groups))), hints, room_of(order)


@inner
def _latest(ends: Any) -> Any:
    """The latest end, at least 0; four at a time, none of which waits for another."""
    one = two = three = four = 0.0
    for task in range(0, len(ends) - 3, 4):
        one = ends[task] if ends[task] > one else one
        two = ends[task + 1] if ends[task + 1] > two else two
        three = ends[task + 2] if ends[task + 2] > three else three
        four = ends[task + 3] if ends[task + 3] > four else four
    for task in range(len(ends) // 4 * 4, len(ends)):
        one = ends[task] if ends[task] > one else one
    return max(max(one, two), max(three, four))


@inner
def laid_out(
    order: Any,
    tapes: Any,
    first_of: Any,
    groups: Any,
    runs_on: Any,
    rows: Any,
    prices: Any,
    carried: Any,
    bandwidth: Any,
    packet: Any,
    skip: Any,
    starts: Any,
    ends: Any,
    busy: Any,
    told: Any,
    before: Any,
    scratch: Any,
) -> Any:
    """See `lay_out` and `scratch_of`."""
    values, times, hints, room = scratch
    seconds = times[0]
    slowdowns = times[1]
    dram = 0.0
    for group in range(len(groups)):
        family, base, rest = groups[group]
        if family >= 0 and not priced(family, base, rows, tapes, first_of, values, prices[group], hints, group):
            return group
        seconds[group] = carried if rest else prices[group, 0]
        slowdowns[group] = prices[group, 2]
        dram += prices[group, 1] * order[8][group, 1]
    play(order, seconds, slowdowns, packet, skip, starts, ends, busy, room)
    later = 0.0
    for place in range(len(runs_on)):
        later = max(later, ends[runs_on[place]])
        ends[runs_on[place]] = -ends[runs_on[place]]
    awaited = _latest(ends)
    for place in range(len(runs_on)):
        ends[runs_on[place]] = -ends[runs_on[place]]
    if not skip:
        places_before(order, starts, ends, before, room)
    told[0] = dram / bandwidth
    told[1] = awaited
    told[2] = later
    return -1
