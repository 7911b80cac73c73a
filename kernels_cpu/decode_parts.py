"""The beginning and the end of a task: queries in, running values out, the parts of a sequence merged."""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import compiled
from .decode_vectors import take


@compiled("contract")
def pack(q: Any, order: Any, scale: Any, packed: Any, top: Any, total: Any, sums: Any) -> None:
    """One sequence's queries in the order of the lanes, scaled; and its running values cleared."""
    heads, dim = q.shape
    for h in range(heads):
        for x in range(dim):
            packed[h * dim + x] = q[h, order[x]] * scale
    for x in range(top.size):
        top[x], total[x] = -np.inf, 0
    for x in range(sums.size):
        sums[x] = 0


@compiled()
def per_head(tops: Any, totals: Any, group: int, heads: int, room: int, lanes: int, top: Any, total: Any) -> None:
    """From registers, one per chunk of `heads` heads, to one value per head; sums in a fixed order."""
    chunks = (group + heads - 1) // heads
    for h in range(top.size):
        chunk = h // group * chunks + h % group // heads
        lane = chunk * lanes + h % group % heads
        top[h] = tops[lane]
        found = np.float32(0)
        for x in range(lane, (chunk + 1) * lanes, room):
            found += totals[x]
        total[h] = found


@compiled()
def _finish(sums: Any, top: Any, total: Any, sinks: Any, order: Any, out: Any) -> None:
    """out[h] = sums[h] / total[h], dims back in order; a sink takes its share of the weight and has no value."""
    heads, dim = out.shape
    for h in range(heads):
        whole = total[h]
        if sinks.size:
            whole += np.float32(2.0 ** np.float64(sinks[h] - top[h]))
        share = np.float32(1) / whole  # a division per dim took 0.1 ms more over 64 sequences of 32 heads
        for x in range(dim):
            out[h, order[x]] = sums[h * dim + x] * share


@compiled("contract")
def _merge(begin: int, end: int, tops: Any, totals: Any, sums: Any) -> None:
    """Parts of one sequence into the first of them, in their order: the same whoever finished last."""
    heads = tops.shape[1]
    dim = sums.shape[1] // heads
    for h in range(heads):
        high = tops[begin, h]
        for part in range(begin + 1, end):
            high = max(high, tops[part, h])
        for part in range(begin, end):
            share = np.float32(2.0 ** np.float64(tops[part, h] - high))
            kept = np.float32(0) if part == begin else totals[begin, h]
            totals[begin, h] = kept + share * totals[part, h]
            for x in range(h * dim, (h + 1) * dim):
                before = np.float32(0) if part == begin else sums[begin, x]
                sums[begin, x] = before + share * sums[part, x]
        tops[begin, h] = high


@compiled()
def conclude(
    s: int, place: int, top: Any, total: Any, sums: Any, first: Any, left: Any, tops: Any, totals: Any, parts: Any,
    sinks: Any, value_order: Any, out: Any,
) -> None:  # fmt: skip
    """Store a task's values, or the result if it was its sequence's only one or its last one to end."""
    if first[s + 1] - first[s] == 1:
        _finish(sums, top, total, sinks, value_order, out[s])
        return
    for h in range(top.size):
        tops[place, h], totals[place, h] = top[h], total[h]
    for x in range(sums.size):
        parts[place, x] = sums[x]
    if take(left.ctypes.data + 8 * s, -1) == 1:
        _merge(first[s], first[s + 1], tops, totals, parts)
        _finish(parts[first[s]], tops[first[s]], totals[first[s]], sinks, value_order, out[s])
