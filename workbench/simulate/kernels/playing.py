"""Kernels that lay out the tasks of a plan on its lanes, as `schedules.plan` does."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.schedules.plan import LANES
from workbench.simulate.kernels.compiling import inner, making

_LANES = len(LANES)


@inner
def _slowed(index: Any, head: Any, tail: Any, start: Any, end: Any, starts: Any, ends: Any, slowdown: Any) -> Any:
    """See `plan._slowed`."""
    for place in range(head, tail):
        transfer = index[place]
        begin = starts[transfer]
        until = ends[transfer]
        first = start if start > begin else begin
        last = end if end < until else until
        beside = last - first
        if beside > 0:
            slowed = beside / (1 - slowdown)
            room = until - first
            end += slowed - beside if slowed <= room else slowdown * room
    return end


@inner
def _delay(index: Any, since: Any, place: Any, late: Any, starts: Any, ends: Any) -> Any:
    """See `plan._Bulk.delay`."""
    if late > 0:
        starts[index[place]] += late
        ends[index[place]] += late
        since[place] += late


@inner
def _let_pass(
    index: Any, since: Any, head: Any, tail: Any, start: Any, length: Any, starts: Any, ends: Any, packet: Any
) -> Any:
    """See `plan._let_pass`."""
    for place in range(head, tail):
        begin = starts[index[place]]
        end = ends[index[place]]
        then = since[place]
        if start >= end:
            continue
        if start <= begin:
            _delay(index, since, place, start + length - begin, starts, ends)
            continue
        packets = -(-(start - then) // packet)
        if packets > 0:
            start = then + packets * packet
            start = start if start < end else end
        elif start < then:
            start = then
        if start < end:
            ends[index[place]] += length
            since[place] = start + length
    for behind in range(head + 1, tail):
        late = ends[index[behind - 1]] - starts[index[behind]]
        if late > 0:
            _delay(index, since, behind, late, starts, ends)
    return start


@inner
def _go_on(
    at: Any,
    stop: Any,
    order: Any,
    seconds: Any,
    slowdowns: Any,
    packet: Any,
    tracks: Any,
    under_way: Any,
    rings: Any,
    starts: Any,
    ends: Any,
) -> Any:
    """See `plan._Lanes.go_on`."""
    lanes, bulks, groups, first, after, small, _, _, _ = order
    free, longer, over_at = tracks
    index, since = under_way
    head, tail, opened = rings
    for task in range(at, stop):
        lane = lanes[task]
        length = seconds[groups[task]]
        start = free[lane]
        for place in range(first[task], first[task + 1]):
            if ends[after[place]] > start:
                start = ends[after[place]]
        if bulks[task]:
            if not _is_open(opened, lane):
                opened[opened[_LANES]] = lane
                opened[_LANES] += 1
            over = start
            found = False
            for each in range(_LANES):
                if small[each] and (not found or free[each] < over):
                    over = free[each]
                    found = True
            while head[lane] < tail[lane] and ends[index[lane, head[lane]]] <= over:
                over_at[lane] = ends[index[lane, head[lane]]]
                head[lane] += 1
            if over_at[lane] > start:
                start = over_at[lane]
            if head[lane] < tail[lane] and ends[index[lane, tail[lane] - 1]] > start:
                start = ends[index[lane, tail[lane] - 1]]
            index[lane, tail[lane]] = task
            since[lane, tail[lane]] = start
            tail[lane] += 1
            starts[task] = start
            ends[task] = start + length
            continue
        if length and head[lane] < tail[lane]:
            start = _let_pass(index[lane], since[lane], head[lane], tail[lane], start, length, starts, ends, packet)
        end = start + length
        slowdown = slowdowns[groups[task]]
        if slowdown and length:
            for place in range(opened[_LANES]):
                each = opened[place]
                end = _slowed(index[each], head[each], tail[each], start, end, starts, ends, slowdown)
            longer[lane] += end - start - length
        starts[task] = start
        ends[task] = end
        free[lane] = end


@inner
def _is_open(opened: Any, lane: Any) -> Any:
    """True if a lane has had a bulk transfer."""
    found = False
    for place in range(opened[_LANES]):
        found |= opened[place] == lane
    return found


@inner
def _look(
    at: Any,
    reach: Any,
    lanes: Any,
    tracks: Any,
    under_way: Any,
    rings: Any,
    starts: Any,
    ends: Any,
    sizes: Any,
    window: Any,
    moving: Any,
    over: Any,
    longer: Any,
    since_free: Any,
) -> Any:
    """Store the state after the tasks before `at`, see `plan._Lanes._state`; return the end of the last.

    `sizes` are the lengths of `window`, `moving` and `over`. A row of `moving` has the lane, the place before the next
    task, start, end and since; one of `over` has the lane, its `over_at` and its `over`.
    """
    free, so_far, over_at = tracks
    index, since = under_way
    head, tail, opened = rings
    last = ends[at - 1] if at else 0.0
    begun = 0.0
    found = False
    for lane in range(_LANES):
        longer[lane] = so_far[lane]
        since_free[lane] = free[lane] - last if lanes[lane] else 0.0
        if lanes[lane] and (not found or free[lane] < begun):
            begun = free[lane]
            found = True
    count = 0
    for order in range(opened[_LANES]):
        lane = opened[order]
        for place in range(head[lane], tail[lane]):
            transfer = index[lane, place]
            if ends[transfer] > begun:
                moving[count, 0] = lane
                moving[count, 1] = transfer - at
                moving[count, 2] = starts[transfer] - last
                moving[count, 3] = ends[transfer] - last
                moving[count, 4] = since[lane, place] - last
                count += 1
    low = at - reach if at > reach else 0
    for place in range(low, at):
        window[place - low] = ends[place]
    sizes[0] = at - low
    sizes[1] = count
    sizes[2] = 0
    if opened[_LANES] and not count:
        earliest = window[0] if at > low else 0.0
        for place in range(1, at - low):
            if window[place] < earliest:
                earliest = window[place]
        for order in range(opened[_LANES]):
            lane = opened[order]
            end = ends[index[lane, tail[lane] - 1]] if tail[lane] > head[lane] else 0.0
            end = end if end > over_at[lane] else over_at[lane]
            over[order, 0] = lane
            over[order, 1] = (earliest if earliest > end else end) - last
            over[order, 2] = end
            sizes[2] += 1
    return last


@inner
def _alike(
    shift: Any,
    left: Any,
    sizes: Any,
    window: Any,
    moving: Any,
    over: Any,
    since_free: Any,
    sizes0: Any,
    window0: Any,
    moving0: Any,
    over0: Any,
    since_free0: Any,
) -> Any:
    """See `plan._State.like`; the arrays that end in 0 are those of the state before."""
    for each in range(3):
        if sizes[each] != sizes0[each]:
            return False
    worst = 0.0
    for place in range(sizes[0]):
        worst = max(worst, abs(window[place] - window0[place] - shift))
    for lane in range(_LANES):
        worst = max(worst, abs(since_free[lane] - since_free0[lane]))
    for place in range(sizes[1]):
        if moving[place, 0] != moving0[place, 0] or moving[place, 1] != moving0[place, 1]:
            return False
        for column in range(2, 5):
            worst = max(worst, abs(moving[place, column] - moving0[place, column]))
    for place in range(sizes[2]):
        worst = max(worst, abs(over[place, 1] - over0[place, 1]))
    return worst <= 1e-3 * shift / left


@making
def room_of(order: Any) -> Any:
    """The arrays in which `play` and `places_before` note their state, made once for all plans of an order."""
    tasks = len(order[1])
    most = 0
    for task in range(tasks):
        most += order[1][task]
    under_way = (np.empty((_LANES, 2 * most + 1), np.int64), np.empty((_LANES, 2 * most + 1)))
    rings = (np.zeros(_LANES, np.int64), np.zeros(_LANES, np.int64), np.zeros(_LANES + 1, np.int64))
    noted = (np.zeros((2, 3), np.int64), np.empty((2, tasks)), np.empty((2, most, 5)), np.empty((2, _LANES, 3)))
    return np.zeros((4, _LANES)), under_way, rings, noted, np.zeros((2, _LANES)), np.zeros((_LANES, 2), np.int64)


@inner
def play(
    order: Any, seconds: Any, slowdowns: Any, packet: Any, skip: Any, starts: Any, ends: Any, busy: Any, room: Any
) -> Any:
    """See `plan.play`; `starts` and `ends` (tasks,) and `busy` (lanes,) are written, and `room`, see `room_of`."""
    repeats = order[6]
    repeat_lanes = order[7]
    groups = order[8]
    tasks = len(order[1])
    of_lanes, under_way, rings, noted, since_free, _ = room
    starts[:] = 0.0
    ends[:] = 0.0
    of_lanes[:2] = 0.0
    free = of_lanes[0]
    over_at = of_lanes[1]  # end of the last bulk transfer that no later task meets
    longer = of_lanes[2:]
    busy[:] = 0.0
    tracks = (free, busy, over_at)
    head, tail, opened = rings
    head[:] = 0
    tail[:] = 0
    opened[:] = 0
    index, since = under_way
    sizes, window, moving, over = noted
    at = 0
    repeat = 0
    repeating = False
    last0 = 0.0
    new = 0
    count = len(repeats) if skip else 0
    while True:
        size = repeats[repeat, 1] if repeat < count else 0
        if repeating:
            stop = at + size
        else:
            stop = repeats[repeat, 0] if repeat < count else tasks
        _go_on(at, stop, order, seconds, slowdowns, packet, tracks, under_way, rings, starts, ends)
        left = (repeats[repeat, 2] - at) // size - 1 if repeating else 0
        at = stop
        if repeat == count:
            break
        lanes = repeat_lanes[repeat]
        old = new
        new = 1 - new
        last = _look(
            at,
            repeats[repeat, 3],
            lanes,
            tracks,
            under_way,
            rings,
            starts,
            ends,
            sizes[new],
            window[new],
            moving[new],
            over[new],
            longer[new],
            since_free[new],
        )
        alike = repeating and _alike(
            last - last0,
            left,
            sizes[new],
            window[new],
            moving[new],
            over[new],
            since_free[new],
            sizes[old],
            window[old],
            moving[old],
            over[old],
            since_free[old],
        )
        if alike:
            shift = (last - last0) * left
            at += size * left
            before = at - sizes[new, 0]
            for place in range(sizes[new, 0]):
                ends[before + place] = window[new, place] + shift
            for lane in range(_LANES):
                head[lane] = 0
                tail[lane] = 0
                if lanes[lane]:
                    free[lane] += shift
                    busy[lane] += (longer[new, lane] - longer[old, lane]) * left
            for place in range(sizes[new, 2]):
                end = over[new, place, 2]
                over_at[int(over[new, place, 0])] = end + left * (end - over[old, place, 2])
            for place in range(sizes[new, 1]):
                lane = int(moving[new, place, 0])
                task = at + int(moving[new, place, 1])
                then = last + shift
                starts[task] = then + moving[new, place, 2]
                ends[task] = then + moving[new, place, 3]
                index[lane, tail[lane]] = task
                since[lane, tail[lane]] = then + moving[new, place, 4]
                tail[lane] += 1
        last0 = last
        repeating = not alike and (repeats[repeat, 2] - at) // size - 1 > 0
        if not repeating:
            repeat += 1
    for group in range(len(groups)):
        busy[groups[group, 0]] += groups[group, 1] * seconds[group]


@inner
def places_before(order: Any, starts: Any, ends: Any, before: Any, room: Any) -> Any:
    """See `plan.places_before`; `before` (tasks,) is written, and `room`, see `room_of`."""
    lanes, bulks, _, first, after, _, _, _, _ = order
    held = room[5]
    held[:] = -1
    for task in range(len(lanes)):
        lane = lanes[task]
        last = -1
        for place in range(first[task], first[task + 1]):
            if last < 0 or ends[after[place]] > ends[last]:
                last = after[place]
        for bulk in range(1 + bulks[task]):  # small transfers pass bulk ones
            other = held[lane, bulk]
            if other >= 0 and ends[other] <= starts[task] and (last < 0 or ends[other] > ends[last]):
                last = other
        before[task] = last if last < 0 or ends[last] > starts[last] else before[last]
        held[lane, bulks[task]] = task
