"""The inner loops of decode attention as intrinsics: scores, softmax and weighted sum of one tile, in registers.

Every address is an integer. A tile is described by the addresses of its rows, one per token, so blocks of any size cost
the same; rows past the last token repeat it. All configuration arrives as literals, so each shape has code of its own.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from ..codegen.compiled import compiled, emitted, literal
from ..codegen.vector_ir import I64, LINE, Emitter, Kind, Piece, pieces
from ..machine.features import is_zen

_NEAR = 32 << 10
"""Bytes of keys, or of values, in a tile that stay in L1 while they are read again and again."""


def tile_tokens(row: int) -> int:
    """Tokens per tile, whose rows have so many bytes.

    128 against 64 on Ice Lake, from memory, with 1 and 4 heads: 1.12 and 1.14 times as fast with D 64, where 256 are no
    faster, 1.07 and 1.12 with 96, 0.99 and 1.02 with 128; on two Zen 4 cores the same with 128.
    """
    return 128 if 128 * row <= _NEAR else 64


_ACCUMULATORS = {16: 16, 8: 8}
"""Registers that hold running sums, by lanes: half of the 32 of AVX-512, of the 16 of AVX2."""


class Ahead(enum.IntEnum):
    """Cache lines of the next unit, the rows of one head and tile, that are prefetched while this one is computed.

    Into L2. Shares of sequential reading on 1 and 2 threads, D 128, medians, the next rows in one stream:

                   Zen 4                      Ice Lake (Xeon, 2.8 GHz)
                   1 head      4 heads        1 head      2 heads     4 heads
        NOTHING    0.73 0.87   0.42 0.53      0.82 0.80        -      0.67 0.61
        FOURTH     0.78 0.91   0.44 0.55      0.81 0.80   0.74 0.79   0.69 0.66
        EACH       0.60 0.82   0.73 0.86      0.90 0.89   0.92 0.87   0.82 0.78

    Into L1, with one head: 0.93 and 0.93 on Ice Lake. In four streams (see `_STREAMS`) on a Xeon with AMX: NOTHING
    0.78, EACH 0.96, every second line 0.80, EACH into L1 0.93; with four heads 0.56, 0.95, 0.64 and 0.95.
    """

    NOTHING = 0
    EACH = 1
    FOURTH = 4

    @property
    def lines(self) -> int:
        """From one line that is asked for to the next."""
        return 4 if self is Ahead.FOURTH else 1

    @staticmethod
    def of(group: int) -> Ahead:
        """The fastest settings for `group` query heads per KV head on this computer's make of CPU."""
        return Ahead.FOURTH if is_zen() and group <= 2 else Ahead.EACH


_STREAMS = 1 if is_zen() else 4
"""Parts of the next unit whose rows are asked for in turn: the hardware fetches more for several streams than for one.

Shares of sequential reading, itself one stream, on Ice Lake with 1, 4 and 8 heads, one thread: 1 stream 0.93, 0.81 and
0.70, 4 streams 1.12, 0.96 and 0.71, 8 streams 1.03, 0.86 and 0.66. On a Xeon with AMX with 1 and 4 heads: 1 stream 0.93
and 0.86, 2 streams 0.95 and 0.95, 4 streams 0.96 and 0.95, 8 streams 0.97 and 0.93.
"""


_TOGETHER = 4
"""Most tokens whose values are weighted in one go, with one address of what is asked for.

With the order of asking found once per tile, not for each row: 1.06 to 1.11 times as fast with 4 to 16 heads on Ice
Lake where all rows are in a cache; from memory 1.02 to 1.03 with 4, 1.07 to 1.12 with 8.
"""


LEVEL = 2
"""The cache that rows are asked into."""

_MOST_PRODUCTS = {16: 12, 8: 8}
"""Multiply-adds per line of the cache up to which reading sets the pace, by lanes."""


def early(tokens: int, room: int) -> int:
    """Rows of the next unit's values that `softmax` asks for, while `weighted` asks for the others.

    With all of them asked for by `weighted`, reading pauses during the softmax: on a Xeon with AMX, as long as LLVM had
    the order of requests, 0.88 of sequential reading with 4 heads against 0.90, 0.79 with 8 heads against 0.81. With 7
    heads a quarter of the rows is 0.82, an eighth 0.84.
    """
    return max(8, tokens // (4 if room <= 4 else 8))


def slots(heads: int) -> int:
    """Lanes that a token takes in a register of scores: one per query head, filled up to a power of two."""
    return 1 << (heads - 1).bit_length()


@emitted
def scores(
    typing: Any, lanes: Any, kind: Any, dim: Any, heads: Any, room: Any, ahead: Any,
    q: Any, rows: Any, offset: Any, count: Any, tile: Any, next_rows: Any, next_offset: Any,
) -> Any:  # fmt: skip
    """tile[t, h] = q[h] . row[t] for `heads` packed queries and `count` tokens; asks for the next unit's rows.

    A row of the tile has `room` lanes; those past `heads` become 0.
    """
    width = literal(lanes)
    form = Kind(literal(kind))
    length = literal(dim)
    group = literal(heads)
    space = literal(room)
    fetch = Ahead(literal(ahead))
    parts = pieces(length, form, width)
    tokens = width // space
    lines = _lines(length * form.itemsize, fetch)
    # The sums of as many tokens as have room. Where multiplying sets the pace these share a query's load: of four heads
    # four rather than two gave 1.05 times the rate on two Zen 4 cores. One or two heads read row by row, which the
    # hardware foresees.
    together = 1 if space < 4 else max(1, min(tokens, _ACCUMULATORS[width] // space))
    evenly = _evenly(group, width, form, fetch)
    sharing = 1 if evenly else together
    goes = len(parts) * together // sharing

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not group:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        q_, rows_, offset_, count_, tile_, next_, next_offset_ = arguments[6:]

        def products(row: list[Any], coming: list[Any]) -> list[Any]:
            sums = [[e.zero] * space for _ in row]
            place = go = 0
            wanted = [e.at(at, line) for at in coming for line in lines]
            for piece in parts:
                for first in range(0, len(row), sharing):
                    for line in dealt(wanted, go, goes):
                        e.prefetch(line, LEVEL)
                    if evenly:
                        e.keep_order()
                    go += 1
                    widened = [e.widen(piece, address, form) for address in row[first : first + sharing]]
                    for x in range(piece.vectors):
                        for h in range(group):
                            weight = e.load_f32(q_, 4 * (h * length + (place + x) * width))
                            for j, registers in enumerate(widened, first):
                                sums[j][h] = e.fma(registers[x], weight, sums[j][h])
                    if evenly:
                        e.keep_order()
                place += piece.vectors
            return [total for own in sums for total in own]

        def body(index: Any, _: list[Any]) -> list[Any]:
            first = builder.mul(index, I64(8 * tokens))
            here = e.at(rows_, first)
            there = e.at(next_, first)

            def all_products() -> Iterator[Any]:
                for start in range(0, tokens, together):
                    places = range(8 * start, 8 * (start + together), 8)
                    row = [e.at(e.load(e.at(here, place), I64, 8), offset_) for place in places]
                    coming = [e.at(e.load(e.at(there, place), I64, 8), next_offset_) for place in places]
                    yield from products(row, coming)

            e.store_f32(e.sums(all_products()), e.at(tile_, builder.mul(index, I64(4 * width))))
            return []

        groups = builder.sdiv(builder.add(count_, I64(tokens - 1)), I64(tokens))
        e.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, heads, room, ahead, *[types.int64] * 7), emit


@compiled()
def in_streams(rows: Any, count: int, asked: Any) -> None:
    """The addresses of a tile's `count` rows in the order in which they are asked for.

    `rows` and `asked` have room for as many, a multiple of `_STREAMS`.
    """
    each = -(-count // _STREAMS)
    for x in range(len(rows) // _STREAMS):
        for stream in range(_STREAMS):
            asked[x * _STREAMS + stream] = rows[stream * each + x]


def _lines(size: int, ahead: Ahead) -> range:
    """Offsets in a row of `size` bytes at which lines are prefetched; a row need not begin with a line."""
    return range(0, size if ahead else 0, ahead.lines * LINE)


def _evenly(group: int, width: int, form: Kind, ahead: Ahead) -> bool:
    """True if reading limits, not multiplying, so that lines should be loaded and prefetched as evenly as can be.

    Shares of sequential reading on one core of a Xeon with AMX, D 128 in bf16, loads and requests where LLVM puts them,
    which is in a burst before several rows' products, and between the products of one row and the next:

                   1 head     2 heads    3 heads    4 heads    6 heads    7 heads
        AVX-512   0.96 0.96  0.92 0.93  0.90 0.93  0.90 0.96  0.87 0.88  0.84 0.82
        AVX2      0.92 0.93  0.91 0.94  0.89 0.88  0.88 0.86

    Left out: heads that do not ask for rows, others reading the same ones after them (12 heads in fp16 would take 1.06
    times as long); INT8, which must be converted, with 1.04, 0.99 and 0.98 of its speed with 1 to 3 heads; and Zen,
    where it was not measured.
    """
    if not ahead or is_zen() or form is Kind.INT8:
        return False
    return group * LINE // (width * form.itemsize) <= _MOST_PRODUCTS[width]


def dealt(lines: Sequence[Any], number: int, parts: int) -> Sequence[Any]:
    """The lines that are asked for before part `number`: as evenly as can be, and rather sooner than later.

    A line per row asked for at the row's end in place of its beginning cost 12 % with one query head per KV head.
    """
    first, end = (-(-x * len(lines) // parts) for x in (number, number + 1))
    return lines[first:end]


@emitted
def softmax(
    typing: Any, lanes: Any, kind: Any, dim: Any, heads: Any, room: Any, ahead: Any, tokens: Any,
    tile: Any, top: Any, total: Any, sums: Any, next_rows: Any, next_offset: Any,
) -> Any:  # fmt: skip
    """Turn a tile of `tokens` scores (to the base 2) into weights relative to each head's largest so far.

    Asks for the first rows of the next unit's values.

    `top` and `total` are a register each, laid out like a row of tokens: the largest scores, and running sums of
    weights. `sums` are the heads' weighted values; they and `total` are scaled down when a largest score grows.
    """
    width = literal(lanes)
    length = literal(dim)
    group = literal(heads)
    space = literal(room)
    count = literal(tokens)
    lines = _lines(length * Kind(literal(kind)).itemsize, Ahead(literal(ahead)))
    times = count * space // (4 * width)
    wanted = early(count, space) // times

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not group:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        tile_, top_, total_, sums_, next_, next_offset_ = arguments[7:]
        some = range(0, 16 * width, 4 * width)  # four registers, of which a tile has a multiple

        def higher(index: Any, high: list[Any]) -> list[Any]:
            here = e.at(tile_, builder.mul(index, I64(len(some) * some.step)))
            return [e.larger(e.load_f32(here, place), own) for place, own in zip(some, high, strict=True)]

        high = e.loop(I64(times), [e.const(-math.inf)] * len(some), higher)
        largest = e.across(functools.reduce(e.larger, high), e.larger, space)
        before = e.load_f32(top_)
        grown = builder.fcmp_ordered(">", largest, before)
        any_grown = builder.icmp_unsigned("!=", builder.bitcast(grown, ir.IntType(width)), ir.IntType(width)(0))
        with builder.if_then(any_grown, likely=False):
            now = builder.select(grown, largest, before)
            shrink = e.exp2(builder.fsub(before, now))
            e.store_f32(now, top_)
            e.store_f32(builder.fmul(shrink, e.load_f32(total_)), total_)
            for h in range(group):
                factor = e.shuffle(shrink, shrink, [h] * width)
                for place in range(4 * h * length, 4 * (h + 1) * length, 4 * width):
                    e.store_f32(builder.fmul(factor, e.load_f32(sums_, place)), sums_, place)
        reference = e.load_f32(top_)

        def weigh(index: Any, running: list[Any]) -> list[Any]:
            here = e.at(tile_, builder.mul(index, I64(len(some) * some.step)))
            total = running[0]
            coming = e.at(next_, builder.mul(index, I64(8 * wanted)))
            rows = [e.at(e.load(e.at(coming, place), I64, 8), next_offset_) for place in range(0, 8 * wanted, 8)]
            asked = [e.at(row, line) for row in rows for line in lines]
            for number, place in enumerate(some):
                for line in dealt(asked, number, len(some)):
                    e.prefetch(line, LEVEL)
                weight = e.exp2(builder.fsub(e.load_f32(here, place), reference))
                e.store_f32(weight, here, place)
                total = builder.fadd(total, weight)
            return [total]

        e.store_f32(e.loop(I64(times), [e.load_f32(total_)], weigh)[0], total_)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, heads, room, ahead, tokens, *[types.int64] * 6), emit


@emitted
def weighted(
    typing: Any, lanes: Any, kind: Any, dim: Any, heads: Any, room: Any, ahead: Any, tokens: Any,
    tile: Any, rows: Any, offset: Any, count: Any, sums: Any, next_rows: Any, next_offset: Any,
) -> Any:  # fmt: skip
    """sums[h] += tile[t, h] row[t] for `heads` heads and `count` tokens; asks for the next unit's rows."""
    width = literal(lanes)
    form = Kind(literal(kind))
    length = literal(dim)
    group = literal(heads)
    space = literal(room)
    fetch = Ahead(literal(ahead))
    evenly = _evenly(group, width, form, fetch)
    asked = early(literal(tokens), space)
    again = literal(tokens) // asked

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not group:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        tile_, rows_, offset_, count_, sums_, next_, next_offset_ = arguments[7:]
        passes = _passes(pieces(length, form, width), _ACCUMULATORS[width] // group)
        together = max(x for x in range(1, _TOGETHER + 1) if len(passes) % x == 0)
        parts = len(passes) // together
        lines = _lines(length * form.itemsize, fetch)
        share = lines[: -(-len(lines) // parts)]
        several = builder.sdiv(count_, I64(together))

        def go(number: int, chosen: list[Piece], place: int) -> None:
            held = sum(piece.vectors for piece in chosen)
            where = [4 * (h * length + (place + x) * width) for h in range(group) for x in range(held)]
            shares = [[piece] for piece in chosen] if evenly else [chosen]

            def token(t: Any, sums: list[Any], wanted: Sequence[Any] = ()) -> list[Any]:
                row = e.at(e.load(e.at(rows_, builder.mul(t, I64(8))), I64, 8), offset_)
                weight_ = e.at(tile_, builder.mul(t, I64(4 * space)))
                weights: list[Any] = []
                before = 0
                for turn, some in enumerate(shares):
                    for line in dealt(wanted, turn, len(shares)):
                        e.prefetch(line, LEVEL)
                    if evenly:
                        e.keep_order()
                    registers = [register for piece in some for register in e.widen(piece, row, form)]
                    for h in range(group):
                        if not turn:
                            weights.append(e.spread_f32(weight_, 4 * h))
                        for x, register in enumerate(registers, h * held + before):
                            sums[x] = e.fma(register, weights[h], sums[x])
                    before += len(registers)
                    if evenly:
                        e.keep_order()
                return sums

            def side_by_side(index: Any, carried: list[Any]) -> list[Any]:
                """Some tokens; those of all passes ask for the next rows, part by part as they lie in memory.

                Of the turns of as many rows as a tile has, those of rows asked for before are dealt out evenly: every
                so often a row is asked for twice.
                """
                sums = list(carried)
                first = builder.mul(index, I64(together))
                part = builder.add(builder.mul(several, I64(number)), index)
                turn = builder.udiv(part, I64(parts))
                before = builder.udiv(builder.add(turn, I64(1)), I64(again))
                entry = builder.sub(builder.add(turn, I64(asked)), before)
                row = e.at(e.load(e.at(next_, builder.mul(entry, I64(8))), I64, 8), next_offset_)
                begin = e.at(row, builder.mul(builder.urem(part, I64(parts)), I64(len(share) * lines.step)))
                for x in range(together):
                    wanted = [e.at(begin, line) for line in dealt(share, x, together)]
                    sums = token(builder.add(first, I64(x)), sums, wanted)
                return sums

            def rest(index: Any, carried: list[Any]) -> list[Any]:
                return token(builder.add(builder.mul(several, I64(together)), index), list(carried))

            for count, each in ((several, side_by_side), (builder.srem(count_, I64(together)), rest)):
                with builder.if_then(builder.icmp_signed(">", count, I64(0))):
                    sums = e.loop(count, [e.load_f32(sums_, at) for at in where], each)
                    for at, value in zip(where, sums, strict=True):
                        e.store_f32(value, sums_, at)

        for number, (chosen, place) in enumerate(passes):
            go(number, chosen, place)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, heads, room, ahead, tokens, *[types.int64] * 7), emit


def _passes(parts: tuple[Piece, ...], room: int) -> list[tuple[list[Piece], int]]:
    """Pieces that fit in `room` registers together, and how many registers stand before them in a row."""
    found: list[tuple[list[Piece], int]] = []
    place = held = 0
    for piece in parts:
        if not found or held + piece.vectors > max(room, piece.vectors):
            found.append(([], place))
            held = 0
        found[-1][0].append(piece)
        held = held + piece.vectors
        place = place + piece.vectors
    return found
