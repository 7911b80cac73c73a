"""The beginning and the end of a task: queries are packed, results stored, partials of one sequence merged.

The partial of a task is the softmax over its run of tokens, per head: the largest score, the sum of the weights, and
the weighted sum of the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import literally, types  # type: ignore[attr-defined]

from ..codegen.compiled import compiled, emitted, literal
from ..codegen.vector_ir import I64, Emitter, Storage, row_loads
from ..threads.task_counts import fetch_add


@emitted
def _packed(
    typing: Any, lanes: Any, storage: Any, dim: Any, paired: Any, rows: Any, factor: Any, source: Any, target: Any
) -> Any:
    """target = factor * source for rows of `dim` fp32, stored in the order in which `widen` loads a cached row.

    Where they are `paired` they are bf16 numbers and stay so, unscaled, in pairs as `Emitter.pairs` loads them. A row
    takes as many bytes either way.
    """
    width = literal(lanes)
    stored = Storage(literal(storage))
    length = literal(dim)
    in_pairs = literal(paired)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not width:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        rows_, factor_, source_, target_ = arguments[4:]
        share = e.spread(factor_)

        def row(index: Any, _: list[Any]) -> list[Any]:
            place = builder.mul(index, I64(4 * length))
            here = e.at(source_, place)
            to = e.at(target_, place)
            for number, load in enumerate(row_loads(length, stored, width)):
                own = [e.load(e.at(here, 4 * (load.start + x * width)), e.f32s, 4) for x in range(load.vectors)]
                if in_pairs and load.vectors == 1:
                    own.append(e.zero)
                if len(own) == 2:
                    own = [e.shuffle(own[0], own[1], range(half, 2 * width, 2)) for half in range(2)]
                if in_pairs:
                    e.store(e.upper_halves(*map(e.bits, own)), e.at(to, 4 * width * number), 4 * width)
                    continue
                for x, register in enumerate(own):
                    e.store_f32(builder.fmul(register, share), to, 4 * (load.start + x * width))
            return []

        e.loop(rows_, [], row)
        return context.get_dummy_value()

    return types.void(lanes, storage, dim, paired, types.int64, types.float32, types.int64, types.int64), emit


@emitted
def _unpacked(typing: Any, lanes: Any, storage: Any, dim: Any, factor: Any, source: Any, target: Any) -> Any:
    """target = factor * source for one row of `dim` fp32 in the order of `_packed`; dims return to their own order."""
    width = literal(lanes)
    stored = Storage(literal(storage))
    length = literal(dim)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not width:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        factor_, source_, target_ = arguments[3:]
        share = e.spread(factor_)
        for load in row_loads(length, stored, width):
            own = [e.load(e.at(source_, 4 * (load.start + x * width)), e.f32s, 4) for x in range(load.vectors)]
            if load.vectors == 2:
                mixed = [lane // 2 + width * (lane % 2) for lane in range(2 * width)]
                own = [e.shuffle(own[0], own[1], lanes_) for lanes_ in (mixed[:width], mixed[width:])]
            for x, register in enumerate(own):
                e.store(builder.fmul(register, share), e.at(target_, 4 * (load.start + x * width)), 4)
        return context.get_dummy_value()

    return types.void(lanes, storage, dim, types.float32, types.int64, types.int64), emit


@compiled()
def are_bf16(q: Any) -> bool:
    """True if one sequence's queries (H, D), in fp32, are bf16 numbers."""
    bits = np.uint32(0)
    for word in q.reshape(q.size).view(np.uint32):
        bits |= word
    return bool((bits & np.uint32(0xFFFF)) == 0)


@compiled()
def pack(lanes: int, storage: int, dim: int, in_pairs: bool, q: Any, scale: Any, packed: Any) -> None:
    """Scale one sequence's queries (H, D) and store them in the order that the vector code reads.

    Those `in_pairs` stay bf16, unscaled.
    """
    literally(lanes), literally(storage), literally(dim)
    heads, size = q.shape
    if in_pairs:
        _packed(lanes, storage, dim, True, heads, scale, q.ctypes.data, packed.ctypes.data)
    elif lanes:
        _packed(lanes, storage, dim, False, heads, scale, q.ctypes.data, packed.ctypes.data)
    else:
        for h in range(heads):
            for x in range(size):
                packed[h * size + x] = q[h, x] * scale


@compiled()
def clear(top: Any, total: Any, sums: Any) -> None:
    """Set running maxima, sums of weights and weighted sums to their values before the first token."""
    for x in range(top.size):
        top[x] = -np.inf
        total[x] = 0
    for x in range(sums.size):
        sums[x] = 0


@compiled()
def per_head(
    top_registers: Any, total_registers: Any, group: int, heads: int, padded: int, lanes: int, top: Any, total: Any
) -> None:
    """Reduce registers, one per chunk of `heads` heads, to one maximum and one sum per head, in a fixed order."""
    chunks = (group + heads - 1) // heads
    for h in range(top.size):
        chunk = h // group * chunks + h % group // heads
        lane = chunk * lanes + h % group % heads
        top[h] = top_registers[lane]
        found = np.float32(0)
        for x in range(lane, (chunk + 1) * lanes, padded):
            found += total_registers[x]
        total[h] = found


@compiled()
def _finish(
    lanes: int, storage: int, dim: int, sums: Any, top: Any, total: Any, sinks: Any, out: Any
) -> None:  # fmt: skip
    """out[h] = sums[h] / total[h], dims in their own order; a sink adds to the sum of weights and has no value."""
    literally(lanes), literally(storage), literally(dim)
    heads, size = out.shape
    for h in range(heads):
        whole = total[h]
        if sinks.size:
            whole += np.float32(2.0 ** np.float64(sinks[h] - top[h]))
        share = np.float32(1) / whole  # a division per dim took 0.1 ms more over 64 sequences of 32 heads
        if lanes:
            place = 4 * h * size
            _unpacked(lanes, storage, dim, share, sums.ctypes.data + place, out.ctypes.data + place)
        else:
            for x in range(size):
                out[h, x] = sums[h * size + x] * share


@compiled("contract")
def _merge(begin: int, end: int, tops: Any, totals: Any, sums: Any) -> None:
    """Merge partials begin .. end - 1 of one sequence into the first, in order, whichever task ended last."""
    heads = tops.shape[1]
    dim = sums.shape[1] // heads
    for h in range(heads):
        high = tops[begin, h]
        for partial in range(begin + 1, end):
            high = max(high, tops[partial, h])
        for partial in range(begin, end):
            share = np.float32(2.0 ** np.float64(tops[partial, h] - high))
            kept = np.float32(0) if partial == begin else totals[begin, h]
            totals[begin, h] = kept + share * totals[partial, h]
            for x in range(h * dim, (h + 1) * dim):
                before = np.float32(0) if partial == begin else sums[begin, x]
                sums[begin, x] = before + share * sums[partial, x]
        tops[begin, h] = high


@compiled()
def conclude(
    lanes: int, storage: int, dim: int, s: int, place: int, top: Any, total: Any, sums: Any, first: Any, left: Any,
    partial_tops: Any, partial_totals: Any, partial_sums: Any, sinks: Any, out: Any,
) -> None:  # fmt: skip
    """Store the result of a sequence of one task; else store the partial, and merge all if this task ends last."""
    literally(lanes), literally(storage), literally(dim)
    if first[s + 1] - first[s] == 1:
        _finish(lanes, storage, dim, sums, top, total, sinks, out[s])
        return
    for h in range(top.size):
        partial_tops[place, h] = top[h]
        partial_totals[place, h] = total[h]
    for x in range(sums.size):
        partial_sums[place, x] = sums[x]
    if fetch_add(left.ctypes.data + 8 * s, -1) == 1:
        _merge(first[s], first[s + 1], partial_tops, partial_totals, partial_sums)
        _finish(
            lanes, storage, dim, partial_sums[first[s]], partial_tops[first[s]], partial_totals[first[s]], sinks, out[s]
        )
