"""The beginning and the end of a task: queries in, running values out, the parts of a sequence merged."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import literally, types  # type: ignore[attr-defined]

from ..codegen.compiled import compiled, emitted, literal
from ..codegen.vector_ir import I64, Emitter, Kind, pieces
from ..threads.task_counts import take


@emitted
def _packed(typing: Any, lanes: Any, kind: Any, dim: Any, rows: Any, factor: Any, source: Any, target: Any) -> Any:
    """target = factor * source over rows of `dim` fp32, in the order in which `widen` takes a cached row apart."""
    width = literal(lanes)
    form = Kind(literal(kind))
    length = literal(dim)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not width:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        rows_, factor_, source_, target_ = arguments[3:]
        share = e.spread(factor_)

        def row(index: Any, _: list[Any]) -> list[Any]:
            place = builder.mul(index, I64(4 * length))
            here = e.at(source_, place)
            to = e.at(target_, place)
            for piece in pieces(length, form, width):
                own = [e.load(e.at(here, 4 * (piece.start + x * width)), e.f32s, 4) for x in range(piece.vectors)]
                if piece.vectors == 2:
                    own = [e.shuffle(own[0], own[1], range(half, 2 * width, 2)) for half in range(2)]
                for x, register in enumerate(own):
                    e.store_f32(builder.fmul(register, share), to, 4 * (piece.start + x * width))
            return []

        e.loop(rows_, [], row)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, types.int64, types.float32, types.int64, types.int64), emit


@emitted
def _unpacked(typing: Any, lanes: Any, kind: Any, dim: Any, factor: Any, source: Any, target: Any) -> Any:
    """target = factor * source, a row that lies as `_packed` leaves it back in its own order."""
    width = literal(lanes)
    form = Kind(literal(kind))
    length = literal(dim)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not width:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        factor_, source_, target_ = arguments[3:]
        share = e.spread(factor_)
        for piece in pieces(length, form, width):
            own = [e.load(e.at(source_, 4 * (piece.start + x * width)), e.f32s, 4) for x in range(piece.vectors)]
            if piece.vectors == 2:
                mixed = [lane // 2 + width * (lane % 2) for lane in range(2 * width)]
                own = [e.shuffle(own[0], own[1], lanes_) for lanes_ in (mixed[:width], mixed[width:])]
            for x, register in enumerate(own):
                e.store(builder.fmul(register, share), e.at(target_, 4 * (piece.start + x * width)), 4)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, types.float32, types.int64, types.int64), emit


@compiled()
def pack(lanes: int, form: int, dim: int, q: Any, scale: Any, packed: Any) -> None:
    """One sequence's queries (H, D) as the lanes take them, scaled."""
    literally(lanes), literally(form), literally(dim)
    heads, size = q.shape
    if lanes:
        _packed(lanes, form, dim, heads, scale, q.ctypes.data, packed.ctypes.data)
    else:
        for h in range(heads):
            for x in range(size):
                packed[h * size + x] = q[h, x] * scale


@compiled()
def clear(top: Any, total: Any, sums: Any) -> None:
    """Running values before the first token."""
    for x in range(top.size):
        top[x] = -np.inf
        total[x] = 0
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
def _finish(
    lanes: int, form: int, dim: int, sums: Any, top: Any, total: Any, sinks: Any, out: Any
) -> None:  # fmt: skip
    """out[h] = sums[h] / total[h], dims back in order; a sink takes its share of the weight and has no value."""
    literally(lanes), literally(form), literally(dim)
    heads, size = out.shape
    for h in range(heads):
        whole = total[h]
        if sinks.size:
            whole += np.float32(2.0 ** np.float64(sinks[h] - top[h]))
        share = np.float32(1) / whole  # a division per dim took 0.1 ms more over 64 sequences of 32 heads
        if lanes:
            place = 4 * h * size
            _unpacked(lanes, form, dim, share, sums.ctypes.data + place, out.ctypes.data + place)
        else:
            for x in range(size):
                out[h, x] = sums[h * size + x] * share


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
    lanes: int, form: int, dim: int, s: int, place: int, top: Any, total: Any, sums: Any, first: Any, left: Any,
    tops: Any, totals: Any, parts: Any, sinks: Any, out: Any,
) -> None:  # fmt: skip
    """Store a task's values, or the result if it was its sequence's only one or its last one to end."""
    literally(lanes), literally(form), literally(dim)
    if first[s + 1] - first[s] == 1:
        _finish(lanes, form, dim, sums, top, total, sinks, out[s])
        return
    for h in range(top.size):
        tops[place, h] = top[h]
        totals[place, h] = total[h]
    for x in range(sums.size):
        parts[place, x] = sums[x]
    if take(left.ctypes.data + 8 * s, -1) == 1:
        _merge(first[s], first[s + 1], tops, totals, parts)
        _finish(lanes, form, dim, parts[first[s]], tops[first[s]], totals[first[s]], sinks, out[s])
