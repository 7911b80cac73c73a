"""Compiled kernels of the virtual clock: prices of a plan's groups, and the plan laid out on its lanes.

They compute what `Pricer` and `plan.play` compute, operation by operation and in the same order, so that the results
are the same bit by bit; no fast-math is allowed. Importing this module compiles them, or loads them from Numba's cache;
`loading` decides when that is done. They stand in one file because that cache notices edits of this file alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import numpy.typing as npt

from workbench.schedules.plan import LANES, Turns
from workbench.serving.iterations import NEVER
from workbench.simulate.tapes import ABOVE, ADD, AT_MOST, DIVIDE, EXACT, LESS, MULTIPLY, NOT_LESS, SUBTRACT, TRUE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LANES = len(LANES)
_H2D = LANES.index("h2d")


def _kernel(signature: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a kernel; the one with a signature is compiled at once and kept on disk if a folder can be written."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiler: Any = functools.partial(numba.njit, nogil=True, error_model="numpy")
        if signature is None:
            return cast(Callable[..., Any], compiler(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))
        try:
            made = compiler(signature, cache=True, no_cfunc_wrapper=True)(function)
        except (RuntimeError, OSError):  # there is no folder that can be written
            made = compiler(signature, no_cfunc_wrapper=True)(function)
        return cast(Callable[..., Any], made)

    return decorate


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
            _ints([_among(lanes) for _, lanes, _ in turns.repeats]).reshape(-1, _LANES),
            _ints([(LANES.index(each), count) for each, count in turns.groups]).reshape(-1, 2),
        )


def _ints(values: Any) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int64)


def _among(lanes: tuple[str, ...]) -> Ints:
    return _ints([lane in lanes for lane in LANES])


# ---------------------------------------------------------------------------------------------------- laying out a plan


@_kernel()
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


@_kernel()
def _delay(index: Any, since: Any, place: Any, late: Any, starts: Any, ends: Any) -> Any:
    """See `plan._Bulk.delay`."""
    if late > 0:
        starts[index[place]] += late
        ends[index[place]] += late
        since[place] += late


@_kernel()
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


@_kernel()
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
        if length:
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


@_kernel()
def _is_open(opened: Any, lane: Any) -> Any:
    """True if a lane has had a bulk transfer."""
    found = False
    for place in range(opened[_LANES]):
        found |= opened[place] == lane
    return found


@_kernel()
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


@_kernel()
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


@_kernel()
def _play(order: Any, seconds: Any, slowdowns: Any, packet: Any, skip: Any, starts: Any, ends: Any, busy: Any) -> Any:
    """See `plan.play`; `starts` and `ends` (tasks,) and `busy` (lanes,) are written."""
    bulk = order[1]
    repeats = order[6]
    repeat_lanes = order[7]
    groups = order[8]
    tasks = len(bulk)
    starts[:] = 0.0
    ends[:] = 0.0
    free = np.zeros(_LANES)
    over_at = np.zeros(_LANES)  # end of the last bulk transfer that no later task meets
    busy[:] = 0.0
    tracks = (free, busy, over_at)
    most = 0
    for task in range(tasks):
        most += bulk[task]
    under_way = (np.empty((_LANES, 2 * most + 1), np.int64), np.empty((_LANES, 2 * most + 1)))
    head = np.zeros(_LANES, np.int64)
    tail = np.zeros(_LANES, np.int64)
    rings = (head, tail, np.zeros(_LANES + 1, np.int64))
    index, since = under_way
    at = 0
    repeat = 0
    repeating = False
    sizes = np.zeros((2, 3), np.int64)
    window = np.empty((2, tasks))
    moving = np.empty((2, most, 5))
    over = np.empty((2, _LANES, 3))
    longer = np.empty((2, _LANES))
    since_free = np.empty((2, _LANES))
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


@_kernel()
def _places_before(order: Any, starts: Any, ends: Any, before: Any) -> Any:
    """See `plan.places_before`; `before` (tasks,) is written."""
    lanes, bulks, _, first, after, _, _, _, _ = order
    held = np.full((_LANES, 2), -1, np.int64)
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


# ------------------------------------------------------------------------------------------------------- pricing groups


@_kernel()
def _holds(tape: Any, base: Any, rows: Any, tapes: Any, values: Any) -> Any:
    """Run one tape on the rows from `base` on; false if a check of it fails."""
    steps, constants, table, _ = tapes
    first, stop, constant, count, inputs = table[tape, :5]
    for place in range(inputs):
        values[place] = rows[base + place]
        if not abs(values[place]) < EXACT:
            return False
    for place in range(count):
        values[inputs + place] = constants[constant + place]
    top = inputs + count
    for step in range(first, stop):
        code = steps[step, 0]
        one = values[steps[step, 1]]
        other = values[steps[step, 2]]
        if code >= LESS:
            if code == LESS:
                held = one < other
            elif code == NOT_LESS:
                held = not one < other
            elif code == AT_MOST:
                held = one <= other
            elif code == ABOVE:
                held = not one <= other
            elif code == TRUE:
                held = one != 0.0
            else:
                held = one == 0.0
            if not held:
                return False
            continue
        if code == ADD:
            result = one + other
        elif code == SUBTRACT:
            result = one - other
        elif code == MULTIPLY:
            result = one * other
        elif code == DIVIDE:
            if other == 0.0:
                return False
            result = one / other
        else:
            result = math.pow(one, other)
        if steps[step, 3] and not abs(result) < EXACT:
            return False
        values[top] = result
        top += 1
    return True


@_kernel()
def _priced(family: Any, base: Any, rows: Any, tapes: Any, first_of: Any, values: Any, answer: Any) -> Any:
    """Answer with the outputs of the family's tape that holds for the rows; false if none does."""
    table = tapes[2]
    follow = tapes[3]
    tape = first_of[family]
    while tape >= 0:
        if _holds(tape, base, rows, tapes, values):
            for place in range(len(answer)):
                answer[place] = values[table[tape, 5 + place]]
            return True
        tape = follow[tape]
    return False


_ONE = "int64[::1]"
_TWO = "int64[:, ::1]"
_ORDER = f"Tuple(({_ONE}, {_ONE}, {_ONE}, {_ONE}, {_ONE}, {_ONE}, {_TWO}, {_TWO}, {_TWO}))"
_TAPES = f"Tuple(({_TWO}, float64[::1], {_TWO}, {_ONE}))"
_REAL = "float64[::1]"


@_kernel(
    f"int64({_ORDER}, {_TAPES}, {_ONE}, {_TWO}, {_ONE}, {_REAL}, float64[:, ::1], float64, float64, float64, boolean, "
    f"{_REAL}, {_REAL}, {_REAL}, {_REAL}, {_ONE})"
)
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
    values = np.empty(tapes[2][0, 8])
    seconds = np.empty(len(groups))
    slowdowns = np.empty(len(groups))
    dram = 0.0
    for group in range(len(groups)):
        family, base, rest = groups[group]
        if family >= 0 and not _priced(family, base, rows, tapes, first_of, values, prices[group]):
            return group
        seconds[group] = carried if rest else prices[group, 0]
        slowdowns[group] = prices[group, 2]
        dram += prices[group, 1] * order[8][group, 1]
    _play(order, seconds, slowdowns, packet, skip, starts, ends, busy)
    awaited = 0.0
    later = 0.0
    for place in range(len(runs_on)):
        later = max(later, ends[runs_on[place]])
        ends[runs_on[place]] = -ends[runs_on[place]]
    for task in range(len(ends)):
        awaited = max(awaited, ends[task])
    for place in range(len(runs_on)):
        ends[runs_on[place]] = -ends[runs_on[place]]
    if not skip:
        _places_before(order, starts, ends, before)
    told[0] = dram / bandwidth
    told[1] = awaited
    told[2] = later
    return -1


# ------------------------------------------------------------------------------------------------ iterations one by one

RUNNING, FRONT, PREEMPTED, FIRST_NEW, NEW, DECODED, FREE, PREEMPTIONS, RECOMPUTED, FINISHED = range(10)
"""Counts of a queue: its lists' lengths and beginnings, and the numbers of the same names in `PagedQueue`."""
ADMITTED, DECODING, OPEN, NUMBER, BEGUN, DONE, LIMIT, BLOCK, TOTAL, PREFILLS_FIRST, MOST_RUNNING = range(10, 21)
"""Counts of the iteration under way: requests just admitted, which stand last among the running, sequences that decode,
and 1 while its batch is not executed. Counts of the record: number of the iteration, runs of tokens begun, iterations
done, and iterations allowed. Fixed ones: tokens of a block, blocks, 1 for the queue of `ContinuousBatching`, and most
running sequences."""
COUNTS = 21
DUE, NOW, CARRIED, BUDGET, PACE, SHORTEST, NEXT_ARRIVAL, CONTEXT, READ = range(9)
REALS = 9


@_kernel()
def _make_room(columns: Any, running: Any, preempted: Any, counts: Any, full: Any, needed: Any) -> Any:
    """See `PagedQueue._make_room` and `PagedQueue._preempt`; return the running sequences that need another block.

    `full` are the places of the first `needed`.
    """
    prompt, output, emitted, _, _, ends_at, held = columns
    kept = counts[RUNNING]
    free = counts[FREE]
    while needed > free:
        kept -= 1
        free += held[running[kept]]
        if full[needed - 1] == kept:
            needed -= 1
    for place in range(counts[RUNNING] - 1, kept - 1, -1):
        victim = running[place]
        emitted[victim] = output[victim] - (ends_at[victim] - counts[DECODED])
        counts[RECOMPUTED] += prompt[victim] + emitted[victim] - 1
        held[victim] = 0
        counts[FRONT] -= 1
        if counts[FRONT] < 0:
            counts[FRONT] += len(preempted)
        preempted[counts[FRONT]] = victim
    counts[PREEMPTED] += counts[RUNNING] - kept
    counts[PREEMPTIONS] += counts[RUNNING] - kept
    counts[FREE] = free
    counts[RUNNING] = kept
    return needed


@_kernel()
def _decode(columns: Any, running: Any, preempted: Any, counts: Any, full: Any) -> Any:
    """See `PagedQueue._decode`; true if a request was preempted."""
    _, _, _, _, full_at, _, held = columns
    needed = 0
    for place in range(counts[RUNNING]):
        if full_at[running[place]] == counts[DECODED]:
            full[needed] = place
            needed += 1
    before = counts[PREEMPTIONS]
    needed = _make_room(columns, running, preempted, counts, full, needed)
    for place in range(needed):
        grown = running[full[place]]
        held[grown] += 1
        full_at[grown] += counts[BLOCK]
    counts[FREE] -= needed
    counts[DECODED] += 1
    return counts[PREEMPTIONS] > before


@_kernel()
def _admit(
    columns: Any, running: Any, preempted: Any, new: Any, counts: Any, most: Any, budget: Any, least: Any
) -> Any:
    """Admit waiting requests while they fit, at most so many in all and `least` whatever the budget; return how many.

    See `PagedQueue._fitting`, `PagedQueue._admit` and `PagedQueue._start_decoding`.
    """
    prompt, output, emitted, offset, full_at, ends_at, held = columns
    block = counts[BLOCK]
    decoded = counts[DECODED]
    tokens = 0
    admitted = 0
    while admitted < most:
        request = preempted[counts[FRONT]] if counts[PREEMPTED] else new[counts[FIRST_NEW]]
        length = prompt[request] + emitted[request]
        blocks = -(-length // block)
        tokens += length
        if (tokens > budget and admitted >= least) or blocks > counts[FREE]:
            break
        if counts[PREEMPTED]:
            counts[PREEMPTED] -= 1
            counts[FRONT] = (counts[FRONT] + 1) % len(preempted)
        else:
            counts[FIRST_NEW] += 1
            counts[NEW] -= 1
        counts[FREE] -= blocks
        held[request] = blocks
        offset[request] = length - decoded
        full_at[request] = blocks * block - length + decoded
        ends_at[request] = output[request] - emitted[request] - 1 + decoded
        running[counts[RUNNING]] = request
        counts[RUNNING] += 1
        admitted += 1
    counts[ADMITTED] = admitted
    return admitted


@_kernel()
def _places(counts: Any) -> Any:
    """Requests that can be admitted at most, see `PagedQueue._waiting`."""
    return min(counts[FREE], counts[MOST_RUNNING] - counts[RUNNING])


@_kernel()
def _choose(columns: Any, lists: Any, counts: Any, reals: Any, full: Any) -> Any:
    """See `ResourceAwareQueue._choose` and `ContinuousQueue._choose`, while sequences run; return those that decode."""
    running, preempted, new = lists
    counts[ADMITTED] = 0
    if counts[PREFILLS_FIRST]:
        most = min(counts[PREEMPTED] + counts[NEW], _places(counts))
        room = reals[BUDGET] - counts[RUNNING]
        if most > 0 and room > 0.0:
            most = int(min(float(most), max(1.0, room)))
            if _admit(columns, running, preempted, new, counts, most, reals[BUDGET], 1):
                return 0
        _decode(columns, running, preempted, counts, full)
        return counts[RUNNING]
    hurt = _decode(columns, running, preempted, counts, full)
    decodes = counts[RUNNING]
    due = reals[DUE]
    rest = 0.0 if math.isinf(due) else due - math.trunc(due)
    due = reals[PACE] + (rest if rest < due else due)
    if not hurt:
        budget = reals[BUDGET] - decodes
        places = _places(counts)
        waiting = counts[PREEMPTED]
        again = min(waiting, places)
        allowed = min(budget / reals[SHORTEST] + 1, max(due, 0.0))
        most = again + max(0, int(min(float(min(counts[NEW], places - again)), allowed)))
        admitted = _admit(columns, running, preempted, new, counts, most, budget, 0)
        due -= max(0, admitted - waiting)
    reals[DUE] = due
    return decodes


@_kernel()
def _sort(numbers: Any) -> None:
    """Sort numbers in place: Shell's sort with Knuth's gaps, which compiles in a tenth of the time of NumPy's."""
    gap = 1
    while gap < len(numbers) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for place in range(gap, len(numbers)):
            number = numbers[place]
            low = place
            while low >= gap and numbers[low - gap] > number:
                numbers[low] = numbers[low - gap]
                low -= gap
            numbers[low] = number
        gap //= 3


@_kernel()
def _count(columns: Any, running: Any, counts: Any, decodes: Any, rows: Any, parts: Any) -> None:
    """Write the rows of each part of the batch, see `Batch.rows` and `schedules.base.balanced`."""
    prompt, _, emitted, offset, _, _, _ = columns
    rows[:] = 0.0
    for part in range(parts):
        context = 0
        number = 0
        for place in range(part, decodes, parts):
            context += offset[running[place]]
            number += 1
        rows[8 * part + 1] = number
        rows[8 * part + 3] = context + number * counts[DECODED]
        rows[8 * part + 4] = number
    admitted = counts[ADMITTED]
    if not admitted:
        return
    first = counts[RUNNING] - admitted
    lengths = np.empty(admitted, np.int64)
    for place in range(admitted):
        request = running[first + place]
        lengths[place] = prompt[request] + emitted[request]
    _sort(lengths)
    load = np.zeros(parts, np.int64)
    squares = np.zeros(parts, np.int64)
    for place in range(admitted - 1, -1, -1):
        least = 0
        for part in range(1, parts):
            if load[part] < load[least]:
                least = part
        load[least] += lengths[place]
        squares[least] += lengths[place] * lengths[place]
        rows[8 * least + 4] += 1.0
    for part in range(parts):
        rows[8 * part] = load[part]
        rows[8 * part + 2] = (squares[part] + load[part]) // 2


@_kernel()
def _told(running: Any, counts: Any, decodes: Any, end: Any, tokens: Any) -> Any:
    """Record who got a token, see `_Tokens.add`; return the tokens that continue a stretch."""
    first, latest, begun = tokens
    number = counts[NUMBER]
    on_time = 0
    for turn in range(2):  # prefills, then decodes
        for place in range(counts[RUNNING] - counts[ADMITTED], counts[RUNNING]) if turn == 0 else range(decodes):
            request = running[place]
            if turn == 1 and latest[request] == number - 1:
                on_time += 1
            else:
                begun[counts[BEGUN], 0] = request
                begun[counts[BEGUN], 1] = number
                begun[counts[BEGUN], 2] = latest[request]
                counts[BEGUN] += 1
                if latest[request] == NEVER:
                    first[request] = end
            latest[request] = number
    return on_time


@_kernel()
def _complete(columns: Any, running: Any, counts: Any, now: Any, last: Any) -> None:
    """See `PagedQueue.complete`."""
    ends_at = columns[5]
    held = columns[6]
    kept = 0
    for place in range(counts[RUNNING]):
        request = running[place]
        if ends_at[request] == counts[DECODED]:
            counts[FREE] += held[request]
            held[request] = 0
            counts[FINISHED] += 1
            last[request] = now
        else:
            running[kept] = request
            kept += 1
    counts[RUNNING] = kept


@_kernel()
def _goes_on(columns: Any, running: Any, counts: Any) -> Any:
    """True if a running sequence has more than one token to come, so that this is not the last iteration."""
    ends_at = columns[5]
    place = 0
    while place < counts[RUNNING] and ends_at[running[place]] == counts[DECODED] + 1:
        place += 1
    return place < counts[RUNNING]


@_kernel(
    f"int64({_ORDER}, {_TAPES}, {_ONE}, {_TWO}, {_ONE}, float64[:, ::1], float64, float64, boolean, "
    f"UniTuple({_ONE}, 7), UniTuple({_ONE}, 3), {_ONE}, {_REAL}, Tuple(({_REAL}, {_ONE}, {_TWO})), {_REAL}, {_REAL}, "
    f"{_TWO}, float64[:, ::1], {_REAL}, float64[:, ::1], float64[:, ::1], {_TWO}, int64)"
)
def advance(
    order: Any,
    tapes: Any,
    first_of: Any,
    groups: Any,
    runs_on: Any,
    prices: Any,
    bandwidth: Any,
    packet: Any,
    skip: Any,
    columns: Any,
    lists: Any,
    counts: Any,
    reals: Any,
    tokens: Any,
    last: Any,
    rows: Any,
    whole: Any,
    real: Any,
    busy: Any,
    starts: Any,
    ends: Any,
    before: Any,
    reading: Any,
) -> Any:
    """Run iterations in the middle of a run until one is due that only Python can make.

    Parameters
    ----------
    columns : tuple of ndarray (requests,) int64
        Prompt, output, emitted, offset, full at, ends at of `PagedQueue`, and the blocks held.
    lists : tuple of ndarray int64
        Running, preempted (a ring) and new requests.
    counts, reals : ndarray
        See `RUNNING` and `DUE`, and the names beside them.
    tokens : tuple of ndarray
        First, latest and begun of `iterations._Tokens`; of each stretch begun: request, iteration, and that before.
    last : ndarray (requests,) float64
        Time of each request's last token.
    rows : ndarray (8 * parts,) float64
    whole : ndarray (iterations, 5) int64
        Written: prefill, decode, used blocks, emitted tokens and tokens on time of each iteration.
    real : ndarray (iterations, 4) float64
        Written: begin, end, seconds, and bytes of experts of each iteration.
    starts, ends, before : ndarray (iterations, tasks)
        Written, see `lay_out`; of one row only if tasks are skipped.
    reading : int
        The family of tapes that gives the bytes of experts; -1 if these are given.

    Returns
    -------
    int
        -1, or the group for whose rows no tape holds; after the last group, `reading`.
    """
    running = lists[0]
    full = np.empty(len(running), np.int64)
    told = np.empty(3)
    held_by = np.empty(_LANES)
    read = np.empty(3)
    values = np.empty(tapes[2][0, 8])
    parts = len(rows) // 8
    while counts[DONE] < counts[LIMIT]:
        if not counts[OPEN]:
            if reals[NEXT_ARRIVAL] <= reals[NOW] or not _goes_on(columns, running, counts):
                return -1
            if counts[BEGUN] + len(running) > len(tokens[2]):
                return -1
            counts[DECODING] = _choose(columns, lists, counts, reals, full)
            _count(columns, running, counts, counts[DECODING], rows, parts)
            counts[OPEN] = 1
        decodes = counts[DECODING]
        done = counts[DONE]
        row = 0 if skip else done
        missing = lay_out(
            order,
            tapes,
            first_of,
            groups,
            runs_on,
            rows,
            prices,
            reals[CARRIED],
            bandwidth,
            packet,
            skip,
            starts[row],
            ends[row],
            held_by,
            told,
            before[row],
        )
        if missing >= 0:
            return missing
        if reading >= 0 and not _priced(reading, 0, rows, tapes, first_of, values, read):
            return len(groups)
        taken = told[0] if told[0] > told[1] else told[1]
        begin = reals[NOW]
        end = begin + taken
        reals[NOW] = end
        late = told[2] - taken
        reals[CARRIED] = late if late > 0.0 else 0.0
        held_by[_H2D] -= reals[CARRIED]
        for lane in range(_LANES):
            busy[lane] += held_by[lane]
        prefill = 0.0
        emits = 0.0
        context = 0.0
        for part in range(parts):
            prefill += rows[8 * part]
            context += rows[8 * part + 3]
            emits += rows[8 * part + 4]
        reals[CONTEXT] += context
        whole[done, 0] = int(prefill)
        whole[done, 1] = decodes
        whole[done, 2] = counts[TOTAL] - counts[FREE]
        whole[done, 3] = int(emits)
        whole[done, 4] = _told(running, counts, decodes, end, tokens)
        real[done, 0] = begin
        real[done, 1] = end
        real[done, 2] = taken
        real[done, 3] = read[0] if reading >= 0 else reals[READ]
        _complete(columns, running, counts, end, last)
        counts[NUMBER] += 1
        counts[DONE] += 1
        counts[OPEN] = 0
    return -1
