"""The inner loops of decode attention as intrinsics: scores, softmax and weighted sum of one tile, in registers.

Every address is an integer. A tile is described by the addresses of its rows, one per token, so blocks of any size cost
the same; rows past the last token repeat it. All configuration arrives as literals, so each shape has code of its own.
"""

from __future__ import annotations

import math
from typing import Any

from numba import types
from numba.extending import intrinsic

from .vector_ir import F32, I32, I64, LINE, Emitter, Kind, Piece, pieces

TILE = 64
"""Tokens per tile: 4 registers of scores per head with AVX-512; 128 measured the same."""

_ACCUMULATORS = {16: 16, 8: 8, 4: 16}
"""Registers that hold running sums, by lanes: half of the 32 of AVX-512, of the 16 of AVX2, of the 32 of NEON."""


def tokens_at_once(heads: int, lanes: int) -> int:
    """Tokens whose scores are summed up side by side for so many query heads: a power of two."""
    return 1 << int(math.log2(max(1, min(_ACCUMULATORS[lanes], lanes) // max(1, heads))))


def _literal(value: Any) -> int:
    return int(value.literal_value)


@intrinsic(prefer_literal=True)
def scores(
    typing: Any, lanes: Any, kind: Any, dim: Any, heads: Any, ahead: Any,
    q: Any, rows: Any, offset: Any, count: Any, result: Any, next_rows: Any, next_offset: Any,
) -> Any:  # fmt: skip
    """result[h, t] = q[h] . row[t] for `heads` packed queries and `count` tokens; asks for the next unit's rows."""
    width, form, length, group = _literal(lanes), Kind(_literal(kind)), _literal(dim), _literal(heads)
    fetch, tokens = bool(_literal(ahead)), tokens_at_once(group, width)
    parts = pieces(length, form, width)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not group:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        q_, rows_, offset_, count_, result_, next_, next_offset_ = arguments[5:]

        def body(index: Any, _: list[Any]) -> list[Any]:
            first = builder.mul(index, I64(8 * tokens))
            row = [e.at(e.load(e.at(e.at(rows_, first), 8 * j), I64, 8), offset_) for j in range(tokens)]
            coming = [e.at(e.load(e.at(e.at(next_, first), 8 * j), I64, 8), next_offset_) for j in range(tokens)]
            sums = [[e.zero] * tokens for _ in range(group)]
            for number, piece in enumerate(parts):
                if fetch:
                    _prefetch(e, coming, piece, form)
                place = sum(p.vectors for p in parts[:number])
                for j in range(tokens):
                    for x, register in enumerate(e.widen(piece, row[j], form)):
                        for h in range(group):
                            weight = e.load_f32(q_, 4 * (h * length + (place + x) * width))
                            sums[h][j] = e.fma(register, weight, sums[h][j])
            flat = [sums[h][j] for h in range(group) for j in range(tokens)]
            total = e.sums(flat + [e.zero] * (width - len(flat)))
            for h in range(group):
                own = e.shuffle(total, total, range(h * tokens, (h + 1) * tokens))
                e.store(own, e.at(e.at(result_, builder.mul(index, I64(4 * tokens))), 4 * h * TILE), 4 * tokens)
            return []

        groups = builder.sdiv(builder.add(count_, I64(tokens - 1)), I64(tokens))
        e.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, heads, ahead, *[types.int64] * 7), emit


def _prefetch(e: Emitter, rows: list[Any], piece: Piece, kind: Kind) -> None:
    """Each line of the piece once; pieces start at multiples of 16 bytes, rows at multiples of their length."""
    start = piece.start * kind.itemsize
    end = start + piece.vectors * e.lanes * kind.itemsize
    for line in range(-(-start // LINE) * LINE, end, LINE):
        for row in rows:
            e.prefetch(e.at(row, line))


@intrinsic(prefer_literal=True)
def softmax(typing: Any, lanes: Any, dim: Any, tile: Any, top: Any, total: Any, sums: Any) -> Any:
    """Turn a tile of one head's scores (to the base 2) into weights relative to the largest so far.

    `top` is the largest score, `total` one register of running sums of weights, `sums` the head's weighted values:
    both are scaled down when the largest score grows.
    """
    width, length = _literal(lanes), _literal(dim)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, width)
        tile_, top_, total_, sums_ = arguments[2:]
        found = [e.load_f32(tile_, 4 * at) for at in range(0, TILE, width)]
        high = found
        while len(high) > 1:
            high = [e.larger(a, b) for a, b in zip(high[::2], high[1::2], strict=True)]
        largest = builder.extract_element(e.across(high[0], e.larger), I32(0))
        before = e.load(top_, F32, 4)
        with builder.if_then(builder.fcmp_ordered(">", largest, before), likely=False):
            shrink = e.exp2(e.spread(builder.fsub(before, largest)))
            e.store(largest, top_, 4)
            for address in [total_, *(e.at(sums_, 4 * at) for at in range(0, length, width))]:
                e.store_f32(builder.fmul(shrink, e.load_f32(address)), address)
        reference = e.spread_f32(top_)
        running = e.load_f32(total_)
        for at, score in zip(range(0, TILE, width), found, strict=True):
            weight = e.exp2(builder.fsub(score, reference))
            e.store_f32(weight, tile_, 4 * at)
            running = builder.fadd(running, weight)
        e.store_f32(running, total_)
        return context.get_dummy_value()

    return types.void(lanes, dim, *[types.int64] * 4), emit


@intrinsic(prefer_literal=True)
def weighted(
    typing: Any, lanes: Any, kind: Any, dim: Any, heads: Any, ahead: Any,
    tile: Any, rows: Any, offset: Any, count: Any, sums: Any, next_rows: Any, next_offset: Any,
) -> Any:  # fmt: skip
    """sums[h] += weight[h, t] row[t] for `heads` heads and `count` tokens; asks for the next unit's rows."""
    width, form, length, group = _literal(lanes), Kind(_literal(kind)), _literal(dim), _literal(heads)
    fetch = bool(_literal(ahead))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not group:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        tile_, rows_, offset_, count_, sums_, next_, next_offset_ = arguments[5:]
        for chosen, place in _passes(pieces(length, form, width), _ACCUMULATORS[width] // group):
            held = sum(piece.vectors for piece in chosen)
            where = [4 * (h * length + (place + x) * width) for h in range(group) for x in range(held)]

            def body(index: Any, sums: list[Any], chosen: Any = chosen, held: int = held) -> list[Any]:
                entry = builder.mul(index, I64(8))
                row = e.at(e.load(e.at(rows_, entry), I64, 8), offset_)
                if fetch:
                    coming = e.at(e.load(e.at(next_, entry), I64, 8), next_offset_)
                    for piece in chosen:
                        _prefetch(e, [coming], piece, form)
                registers = [register for piece in chosen for register in e.widen(piece, row, form)]
                sums, weight_ = list(sums), e.at(tile_, builder.mul(index, I64(4)))
                for h in range(group):
                    weight = e.spread_f32(weight_, 4 * h * TILE)
                    for x in range(held):
                        sums[h * held + x] = e.fma(registers[x], weight, sums[h * held + x])
                return sums

            sums = e.loop(count_, [e.load_f32(sums_, at) for at in where], body)
            for at, value in zip(where, sums, strict=True):
                e.store_f32(value, sums_, at)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, heads, ahead, *[types.int64] * 7), emit


def _passes(parts: tuple[Piece, ...], room: int) -> list[tuple[list[Piece], int]]:
    """Pieces that fit in `room` registers together, and how many registers stand before them in a row."""
    found: list[tuple[list[Piece], int]] = []
    place = held = 0
    for piece in parts:
        if not found or held + piece.vectors > max(room, piece.vectors):
            found.append(([], place))
            held = 0
        found[-1][0].append(piece)
        held, place = held + piece.vectors, place + piece.vectors
    return found


@intrinsic
def take(typing: Any, address: Any, amount: Any) -> Any:
    """Atomically add to an int64 and return what it was."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def write_f32(typing: Any, address: Any, value: Any) -> Any:
    """Store an fp32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], F32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit
