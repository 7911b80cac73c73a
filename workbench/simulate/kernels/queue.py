"""Kernels that choose and complete the batches of an iteration, as the queues of the schedulers do.

There are thousands of running sequences, and an iteration changes few. So `standing` counts them by what comes next: a
ring has the number of sequences that end at each coming `_decoded`, and another array, for each remainder of `_decoded`
by the tokens of a block, the number that need another block. Offset and ends at of running sequences are copied to
arrays in the order in which they run. These begin at `BASE`, so that the oldest sequences, which most often are those
that end, leave without moving the others. Full at and the blocks held follow from the offset, and are written to the
columns when a stretch ends.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workbench.simulate.kernels.compiling import inner, making
from workbench.simulate.kernels.fields import (
    ADMITTED,
    BASE,
    BLOCK,
    BUDGET,
    DECODED,
    DECODING,
    DUE,
    FINISHED,
    FIRST_NEW,
    FREE,
    FRONT,
    LATEST,
    MOST_RUNNING,
    NEW,
    PACE,
    PREEMPTED,
    PREEMPTIONS,
    PREFILLS_FIRST,
    RECOMPUTED,
    RUNNING,
    SHORTEST,
)


@making
def stand(columns: Any, running: Any, counts: Any) -> Any:
    """Copy what is asked of running sequences from the columns."""
    output, offset, ends_at = columns[1], columns[3], columns[5]
    room = len(running)
    offsets = np.empty(room, np.int64)
    ends = np.empty(room, np.int64)
    longest = 0
    for request in range(len(output)):
        longest = max(longest, output[request])
    ending = np.zeros(longest + 1, np.int64)
    growing = np.zeros(counts[BLOCK], np.int64)
    for place in range(counts[BASE], counts[BASE] + counts[RUNNING]):
        request = running[place]
        offsets[place] = offset[request]
        ends[place] = ends_at[request]
        ending[ends[place] % len(ending)] += 1
        growing[-offsets[place] % len(growing)] += 1
    return offsets, ends, ending, growing


@inner
def leave(columns: Any, running: Any, counts: Any, standing: Any) -> None:
    """Write back to the columns what has changed."""
    _, _, _, _, full_at, _, held = columns
    offsets = standing[0]
    for place in range(counts[RUNNING]):
        blocks = _blocks(offsets[place] + counts[DECODED], counts)
        full_at[running[place]] = blocks * counts[BLOCK] - offsets[place]
        held[running[place]] = blocks


@inner
def _blocks(length: Any, counts: Any) -> Any:
    """Blocks that so many tokens take."""
    return -(-length // counts[BLOCK])


@inner
def _make_room(columns: Any, running: Any, preempted: Any, counts: Any, latest: Any, standing: Any, needed: Any) -> Any:
    """See `PagedQueue._make_room` and `PagedQueue._preempt`; return the running sequences that need another block."""
    prompt, output, emitted, _, _, _, held = columns
    offsets, ends, ending, growing = standing
    kept = counts[RUNNING]
    free = counts[FREE]
    while needed > free:
        kept -= 1
        length = offsets[kept] + counts[DECODED]
        free += _blocks(length, counts)
        needed -= length % counts[BLOCK] == 0
    for place in range(counts[RUNNING] - 1, kept - 1, -1):
        victim = running[place]
        emitted[victim] = output[victim] - (ends[place] - counts[DECODED])
        ending[ends[place] % len(ending)] -= 1
        growing[-offsets[place] % len(growing)] -= 1
        if counts[LATEST] >= 0:
            latest[victim] = counts[LATEST]
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


@inner
def _decode(columns: Any, running: Any, preempted: Any, counts: Any, latest: Any, standing: Any) -> Any:
    """See `PagedQueue._decode`; true if a request was preempted."""
    growing = standing[3]
    before = counts[PREEMPTIONS]
    needed = growing[counts[DECODED] % len(growing)]
    needed = _make_room(columns, running, preempted, counts, latest, standing, needed)
    counts[FREE] -= needed
    counts[DECODED] += 1
    return counts[PREEMPTIONS] > before


@inner
def _admit(columns: Any, lists: Any, counts: Any, standing: Any, most: Any, budget: Any, least: Any) -> Any:
    """Admit waiting requests while they fit, at most so many in all and `least` whatever the budget; return how many.

    See `PagedQueue._fitting`, `PagedQueue._admit` and `PagedQueue._start_decoding`.
    """
    prompt, output, emitted, offset, _, ends_at, _ = columns
    running, preempted, new = lists
    offsets, ends, ending, growing = standing
    decoded = counts[DECODED]
    tokens = 0
    admitted = 0
    while admitted < most:
        request = preempted[counts[FRONT]] if counts[PREEMPTED] else new[counts[FIRST_NEW]]
        length = prompt[request] + emitted[request]
        blocks = _blocks(length, counts)
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
        offset[request] = length - decoded
        ends_at[request] = output[request] - emitted[request] - 1 + decoded
        place = counts[RUNNING]
        running[place] = request
        offsets[place] = offset[request]
        ends[place] = ends_at[request]
        ending[ends[place] % len(ending)] += 1
        growing[-offsets[place] % len(growing)] += 1
        counts[RUNNING] += 1
        admitted += 1
    counts[ADMITTED] = admitted
    return admitted


@inner
def _places(counts: Any) -> Any:
    """Requests that can be admitted at most, see `PagedQueue._waiting`."""
    return min(counts[FREE], counts[MOST_RUNNING] - counts[RUNNING])


@inner
def choose(columns: Any, lists: Any, counts: Any, reals: Any, latest: Any, standing: Any) -> Any:
    """See `ResourceAwareQueue._choose` and `ContinuousQueue._choose`, while sequences run; return those that decode."""
    running, preempted, _ = lists
    counts[ADMITTED] = 0
    if counts[PREFILLS_FIRST]:
        most = min(counts[PREEMPTED] + counts[NEW], _places(counts))
        room = reals[BUDGET] - counts[RUNNING]
        if most > 0 and room > 0.0:
            most = int(min(float(most), max(1.0, room)))
            if _admit(columns, lists, counts, standing, most, reals[BUDGET], 1):
                return 0
        _decode(columns, running, preempted, counts, latest, standing)
        return counts[RUNNING]
    hurt = _decode(columns, running, preempted, counts, latest, standing)
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
        admitted = _admit(columns, lists, counts, standing, most, budget, 0)
        due -= max(0, admitted - waiting)
    reals[DUE] = due
    return decodes


@inner
def _sort(numbers: Any, many: Any) -> None:
    """Sort the first numbers in place: Shell's sort with Knuth's gaps, compiled in a tenth of NumPy's time."""
    gap = 1
    while gap < many // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for place in range(gap, many):
            number = numbers[place]
            low = place
            while low >= gap and numbers[low - gap] > number:
                numbers[low] = numbers[low - gap]
                low -= gap
            numbers[low] = number
        gap //= 3


@inner
def _by_remainder(numbers: Any, many: Any) -> Any:
    """Sums of the first numbers whose places have the remainders 0, 1, 2 and 3 by 4."""
    one = two = three = four = 0
    fours = many // 4 * 4
    for place in range(0, fours, 4):
        one += numbers[place]
        two += numbers[place + 1]
        three += numbers[place + 2]
        four += numbers[place + 3]
    left = many - fours
    one += numbers[fours] if left > 0 else 0
    two += numbers[fours + 1] if left > 1 else 0
    three += numbers[fours + 2] if left > 2 else 0
    return one, two, three, four


@inner
def count(columns: Any, running: Any, counts: Any, standing: Any, loads: Any, rows: Any) -> None:
    """Write the rows of each part of the batch, see `Batch.rows` and `schedules.base.balanced`.

    `loads` are arrays to work in: lengths of requests, and load and squares of parts.
    """
    prompt, _, emitted, _, _, _, _ = columns
    lengths, load, squares = loads
    decodes = counts[DECODING]
    parts = len(load)
    offsets = standing[0]
    rows[:] = 0.0
    sums = _by_remainder(offsets, decodes)
    for part in range(parts):
        context = 0
        number = (decodes - part + parts - 1) // parts
        if 4 % parts == 0:
            for remainder in range(part, 4, parts):
                context += sums[remainder]
        else:
            for place in range(part, decodes, parts):
                context += offsets[place]
        rows[8 * part + 1] = number
        rows[8 * part + 3] = context + number * counts[DECODED]
        rows[8 * part + 4] = number
    admitted = counts[ADMITTED]
    if not admitted:
        return
    first = counts[RUNNING] - admitted
    for place in range(admitted):
        request = running[first + place]
        lengths[place] = prompt[request] + emitted[request]
    _sort(lengths, admitted)
    load[:] = 0
    squares[:] = 0
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


@inner
def complete(columns: Any, running: Any, counts: Any, latest: Any, standing: Any, now: Any, last: Any) -> None:
    """See `PagedQueue.complete`."""
    held = columns[6]
    offsets, ends, ending, growing = standing
    decoded = counts[DECODED]
    finishing = ending[decoded % len(ending)]
    if not finishing:
        return
    ending[decoded % len(ending)] = 0
    counts[FINISHED] += finishing
    place = -1
    for _ in range(finishing):
        place += 1
        while ends[place] != decoded:
            place += 1
        request = running[place]
        counts[FREE] += _blocks(offsets[place] + decoded, counts)
        growing[-offsets[place] % len(growing)] -= 1
        held[request] = 0
        last[request] = now
        if counts[LATEST] >= 0:
            latest[request] = counts[LATEST]
    kept = place
    for before in range(place, -1, -1):
        if ends[before] != decoded:
            running[kept] = running[before]
            offsets[kept] = offsets[before]
            ends[kept] = ends[before]
            kept -= 1
    counts[BASE] += finishing
    counts[RUNNING] -= finishing


@inner
def goes_on(counts: Any, standing: Any) -> Any:
    """True if a running sequence has more than one token to come, so that this is not the last iteration."""
    ending = standing[2]
    return ending[(counts[DECODED] + 1) % len(ending)] < counts[RUNNING]
