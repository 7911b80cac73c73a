"""The kernel that makes iterations one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.schedules.plan import LANES
from workbench.serving.iterations import NEVER
from workbench.simulate.kernels.compiling import entry, inner, making
from workbench.simulate.kernels.fields import (
    ADMITTED,
    BASE,
    BEGUN,
    CARRIED,
    CONTEXT,
    DECODING,
    DONE,
    FREE,
    LATEST,
    LIMIT,
    NEXT_ARRIVAL,
    NOW,
    NUMBER,
    OPEN,
    READ,
    RUNNING,
    TOTAL,
)
from workbench.simulate.kernels.layout import laid_out, scratch_of
from workbench.simulate.kernels.pricing import priced
from workbench.simulate.kernels.queue import choose, complete, count, goes_on, leave, stand

_LANES = len(LANES)
_H2D = LANES.index("h2d")


@making
def _from_base(running: Any, standing: Any, counts: Any) -> Any:
    """The running sequences and what stands of them, from the oldest on."""
    base = counts[BASE]
    offsets, ends, ending, growing = standing
    return running[base:], (offsets[base:], ends[base:], ending, growing)


@inner
def _opened(
    columns: Any, lists: Any, counts: Any, reals: Any, tokens: Any, standing: Any, loads: Any, rows: Any
) -> Any:
    """Choose the next batch and write its rows; false if only Python can."""
    running = lists[0]
    if reals[NEXT_ARRIVAL] <= reals[NOW] or not goes_on(counts, standing):
        return False
    if counts[BEGUN] + len(running) > len(tokens[2]):
        return False
    counts[DECODING] = choose(columns, lists, counts, reals, tokens[1], standing)
    count(columns, running, counts, standing, loads, rows)
    counts[OPEN] = 1
    return True


@inner
def _told(running: Any, counts: Any, decodes: Any, end: Any, tokens: Any) -> Any:
    """Record who got a token, see `_Tokens.add`; return the tokens that continue a stretch.

    Decodes leave `latest` as it is where all continue, as long as there is no prefill without them.
    """
    latest = tokens[1]
    number = counts[NUMBER]
    if not decodes:
        _write_latest(running, counts, latest, counts[RUNNING] - counts[ADMITTED])
    for place in range(counts[RUNNING] - counts[ADMITTED], counts[RUNNING]):
        _begin(running[place], number, counts, end, tokens)
    if not decodes:
        return 0
    on_time = decodes
    if counts[LATEST] < 0:
        for place in range(decodes):
            if latest[running[place]] != number - 1:
                _begin(running[place], number, counts, end, tokens)
                on_time -= 1
    counts[LATEST] = number
    return on_time


@inner
def _write_latest(running: Any, counts: Any, latest: Any, places: Any) -> None:
    """Write the iteration of the latest token of so many of the running sequences, if it is not written yet."""
    if counts[LATEST] >= 0:
        for place in range(places):
            latest[running[place]] = counts[LATEST]
        counts[LATEST] = -1


@inner
def _begin(request: Any, number: Any, counts: Any, end: Any, tokens: Any) -> None:
    """Record a stretch of tokens of a request that begins with an iteration."""
    first, latest, begun = tokens
    begun[counts[BEGUN], 0] = request
    begun[counts[BEGUN], 1] = number
    begun[counts[BEGUN], 2] = latest[request]
    counts[BEGUN] += 1
    if latest[request] == NEVER:
        first[request] = end
    latest[request] = number


@inner
def _executed(reals: Any, told: Any, held_by: Any, busy: Any) -> Any:
    """Let the time pass that a plan takes, see `_Clock.execute`; return its seconds."""
    taken = told[0] if told[0] > told[1] else told[1]
    reals[NOW] += taken
    late = told[2] - taken
    reals[CARRIED] = late if late > 0.0 else 0.0
    held_by[_H2D] -= reals[CARRIED]
    for lane in range(_LANES):
        busy[lane] += held_by[lane]
    return taken


@inner
def _recorded(
    running: Any,
    counts: Any,
    reals: Any,
    tokens: Any,
    rows: Any,
    taken: Any,
    begin: Any,
    read: Any,
    whole: Any,
    real: Any,
) -> None:
    """Record the iteration that has just been executed, see `Record.add`."""
    prefill = 0.0
    emits = 0.0
    context = 0.0
    for first in range(0, len(rows), 8):
        prefill += rows[first]
        context += rows[first + 3]
        emits += rows[first + 4]
    reals[CONTEXT] += context
    whole[0] = int(prefill)
    whole[1] = counts[DECODING]
    whole[2] = counts[TOTAL] - counts[FREE]
    whole[3] = int(emits)
    whole[4] = _told(running, counts, counts[DECODING], reals[NOW], tokens)
    real[0] = begin
    real[1] = reals[NOW]
    real[2] = taken
    real[3] = read


@entry
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
    order, tapes, first_of, groups, runs_on, prices, bandwidth, packet, skip
        See `lay_out`.
    columns : tuple of ndarray (requests,) int64
        Prompt, output, emitted, offset, full at, ends at of `PagedQueue`, and the blocks held.
    lists : tuple of ndarray int64
        Running, preempted (a ring) and new requests.
    counts, reals : ndarray
        See `fields`.
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
    told = np.empty(3)
    held_by = np.empty(_LANES)
    read = np.empty(3)
    scratch = scratch_of(order, tapes, groups)
    values, _, hints, _ = scratch
    parts = len(rows) // 8
    loads = (np.empty(len(lists[0]), np.int64), np.empty(parts, np.int64), np.empty(parts, np.int64))
    every = stand(columns, lists[0], counts)
    missing = -1
    while counts[DONE] < counts[LIMIT]:
        running, standing = _from_base(lists[0], every, counts)
        here = (running, lists[1], lists[2])
        if not counts[OPEN] and not _opened(columns, here, counts, reals, tokens, standing, loads, rows):
            break
        done = counts[DONE]
        row = 0 if skip else done
        missing = laid_out(
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
            scratch,
        )
        if missing < 0 and reading >= 0:
            known = priced(reading, 0, rows, tapes, first_of, values, read, hints, len(groups))
            missing = -1 if known else len(groups)
        if missing >= 0:
            break
        begin = reals[NOW]
        taken = _executed(reals, told, held_by, busy)
        of_experts = read[0] if reading >= 0 else reals[READ]
        _recorded(running, counts, reals, tokens, rows, taken, begin, of_experts, whole[done], real[done])
        complete(columns, running, counts, tokens[1], standing, reals[NOW], last)
        counts[NUMBER] += 1
        counts[DONE] += 1
        counts[OPEN] = 0
    running, standing = _from_base(lists[0], every, counts)
    leave(columns, running, counts, standing)
    _write_latest(running, counts, tokens[1], counts[RUNNING] - counts[OPEN] * counts[ADMITTED])
    return missing
