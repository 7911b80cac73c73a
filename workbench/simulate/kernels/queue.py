"""Kernels that choose and complete the batches of an iteration, as the queues of the schedulers do.

Every iteration looks at every running sequence. So `standing` has what is asked of these in arrays of their own, in the
order in which they run: offset, full at and ends at, copied from the columns, and a ring with the number of sequences
that end at each coming `_decoded`. Meanwhile full at is written to the columns no more.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workbench.simulate.kernels.compiling import inner
from workbench.simulate.kernels.fields import (
    ADMITTED,
    BLOCK,
    BUDGET,
    DECODED,
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


@inner
def stand(columns: Any, running: Any, counts: Any) -> Any:
    """Copy what is asked of running sequences from the columns."""
    output, offset, full_at, ends_at = columns[1], columns[3], columns[4], columns[5]
    room = len(running)
    offsets = np.empty(room, np.int64)
    fulls = np.empty(room, np.int64)
    ends = np.empty(room, np.int64)
    longest = 0
    for request in range(len(output)):
        longest = max(longest, output[request])
    ending = np.zeros(longest + 1, np.int64)
    for place in range(counts[RUNNING]):
        request = running[place]
        offsets[place] = offset[request]
        fulls[place] = full_at[request]
        ends[place] = ends_at[request]
        ending[ends[place] % len(ending)] += 1
    return offsets, fulls, ends, ending


@inner
def leave(columns: Any, running: Any, counts: Any, standing: Any) -> None:
    """Write back to the columns what has changed."""
    full_at = columns[4]
    for place in range(counts[RUNNING]):
        full_at[running[place]] = standing[1][place]


@inner
def _make_room(
    columns: Any, running: Any, preempted: Any, counts: Any, latest: Any, standing: Any, full: Any, needed: Any
) -> Any:
    """See `PagedQueue._make_room` and `PagedQueue._preempt`; return the running sequences that need another block.

    `full` are the places of the first `needed`.
    """
    prompt, output, emitted, _, _, _, held = columns
    _, _, ends, ending = standing
    kept = counts[RUNNING]
    free = counts[FREE]
    while needed > free:
        kept -= 1
        free += held[running[kept]]
        if full[needed - 1] == kept:
            needed -= 1
    for place in range(counts[RUNNING] - 1, kept - 1, -1):
        victim = running[place]
        emitted[victim] = output[victim] - (ends[place] - counts[DECODED])
        ending[ends[place] % len(ending)] -= 1
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
def _decode(columns: Any, running: Any, preempted: Any, counts: Any, latest: Any, standing: Any, full: Any) -> Any:
    """See `PagedQueue._decode`; true if a request was preempted."""
    held = columns[6]
    fulls = standing[1]
    decoded = counts[DECODED]
    needed = 0
    for place in range(counts[RUNNING]):
        full[needed] = place
        needed += fulls[place] == decoded
    before = counts[PREEMPTIONS]
    needed = _make_room(columns, running, preempted, counts, latest, standing, full, needed)
    for place in range(needed):
        held[running[full[place]]] += 1
        fulls[full[place]] += counts[BLOCK]
    counts[FREE] -= needed
    counts[DECODED] += 1
    return counts[PREEMPTIONS] > before


@inner
def _admit(columns: Any, lists: Any, counts: Any, standing: Any, most: Any, budget: Any, least: Any) -> Any:
    """Admit waiting requests while they fit, at most so many in all and `least` whatever the budget; return how many.

    See `PagedQueue._fitting`, `PagedQueue._admit` and `PagedQueue._start_decoding`.
    """
    prompt, output, emitted, offset, full_at, ends_at, held = columns
    running, preempted, new = lists
    offsets, fulls, ends, ending = standing
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
        place = counts[RUNNING]
        running[place] = request
        offsets[place] = offset[request]
        fulls[place] = full_at[request]
        ends[place] = ends_at[request]
        ending[ends[place] % len(ending)] += 1
        counts[RUNNING] += 1
        admitted += 1
    counts[ADMITTED] = admitted
    return admitted


@inner
def _places(counts: Any) -> Any:
    """Requests that can be admitted at most, see `PagedQueue._waiting`."""
    return min(counts[FREE], counts[MOST_RUNNING] - counts[RUNNING])


@inner
def choose(columns: Any, lists: Any, counts: Any, reals: Any, latest: Any, standing: Any, full: Any) -> Any:
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
        _decode(columns, running, preempted, counts, latest, standing, full)
        return counts[RUNNING]
    hurt = _decode(columns, running, preempted, counts, latest, standing, full)
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


@inner
def count(columns: Any, running: Any, counts: Any, standing: Any, decodes: Any, rows: Any, parts: Any) -> None:
    """Write the rows of each part of the batch, see `Batch.rows` and `schedules.base.balanced`."""
    prompt, _, emitted, _, _, _, _ = columns
    offsets = standing[0]
    rows[:] = 0.0
    for part in range(parts):
        context = 0
        number = 0
        if parts == 1:
            number = decodes
            for place in range(decodes):
                context += offsets[place]
        else:
            for place in range(part, decodes, parts):
                context += offsets[place]
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


@inner
def complete(columns: Any, running: Any, counts: Any, latest: Any, standing: Any, now: Any, last: Any) -> None:
    """See `PagedQueue.complete`."""
    held = columns[6]
    offsets, fulls, ends, ending = standing
    decoded = counts[DECODED]
    finishing = ending[decoded % len(ending)]
    if not finishing:
        return
    ending[decoded % len(ending)] = 0
    counts[FINISHED] += finishing
    kept = 0
    for place in range(counts[RUNNING]):
        request = running[place]
        if ends[place] == decoded:
            counts[FREE] += held[request]
            held[request] = 0
            last[request] = now
            if counts[LATEST] >= 0:
                latest[request] = counts[LATEST]
        else:
            running[kept] = request
            offsets[kept] = offsets[place]
            fulls[kept] = fulls[place]
            ends[kept] = ends[place]
            kept += 1
    counts[RUNNING] = kept


@inner
def goes_on(counts: Any, standing: Any) -> Any:
    """True if a running sequence has more than one token to come, so that this is not the last iteration."""
    ending = standing[3]
    return ending[(counts[DECODED] + 1) % len(ending)] < counts[RUNNING]
