"""The inner loops of decode attention as intrinsics: scores, softmax and weighted sum of one tile, in registers.

A tile is the keys and values of one KV head for some tokens. It is given by the addresses of its rows, one per token,
so that blocks of any size cost the same; rows past the last token repeat it. Addresses are integers. All configuration
is passed as literals, so that each shape has code of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from ..codegen.compiled import compiled, emitted, literal
from ..codegen.vector_ir import I64, LINE, Emitter, Load, Storage, row_loads
from ..machine.parameters import parameters

_SETTINGS = parameters().attention


def tile_tokens(row: int) -> int:
    """Tokens per tile for rows of `row` bytes."""
    return 128 if 128 * row <= _SETTINGS.tile_bytes else 64


def lines_ahead(group: int) -> int:
    """Distance from one prefetched cache line of the next tile to the next, with `group` query heads per KV head."""
    return _SETTINGS.few_heads_ahead if group <= 2 else _SETTINGS.ahead


LEVEL = _SETTINGS.level
_STREAMS = _SETTINGS.streams


def early(tokens: int, padded: int) -> int:
    """Rows of the next tile that `softmax` prefetches: the first values, or the last keys where it `fetches_keys`.

    If `weighted` prefetches all, memory is idle during the softmax. Fractions of the sequential read rate on a Xeon
    with AMX, with prefetches in the order that LLVM chose: 0.88 instead of 0.90 with 4 heads, 0.79 instead of 0.81 with
    8. With 7 heads a quarter of the rows gives 0.82, an eighth 0.84.
    """
    return max(8, tokens // (4 if padded <= 4 else 8))


def fetches_keys(padded: int, paired: bool) -> bool:
    """True if `softmax` prefetches the last quarter of the next tile's keys, and `weighted` all values.

    With three or four heads in pairs, scores take two thirds of the time of the weighted sum. If they prefetch all
    keys, they wait for memory: with four heads one thread of a Zen 4 reaches 0.70 of reading, instead of 0.78.
    """
    return paired and padded == 4


def padded_heads(heads: int) -> int:
    """Number of heads rounded up to a power of two: the lanes that a token takes in a register of scores."""
    return 1 << (heads - 1).bit_length()


@emitted
def scores(
    typing: Any, lanes: Any, storage: Any, dim: Any, heads: Any, padded: Any, ahead: Any, paired: Any, scale: Any,
    q: Any, rows: Any, offset: Any, count: Any, tile: Any, next_rows: Any, next_offset: Any,
) -> Any:  # fmt: skip
    """tile[t, h] = q[h] . row[t] for `heads` packed queries and `count` tokens; prefetches keys of the next tile.

    A row of the tile has `padded` lanes; those past `heads` become 0. Where queries are `paired`, products of bf16 are
    exact and added in fp32 by AVX512_BF16, and their sums are multiplied by `scale`.
    """
    width = literal(lanes)
    stored = Storage(literal(storage))
    length = literal(dim)
    group = literal(heads)
    space = literal(padded)
    fetch = literal(ahead)
    in_pairs = bool(literal(paired))
    loads = row_loads(length, stored, width)
    tokens = width // space
    lines = _lines(length * stored.itemsize, fetch)
    # As many tokens as have sums that fit in registers. Where computing takes longer than reading, they share the load
    # of a query: with four heads, four tokens gave 1.05 times the rate of two on two Zen 4 cores. With one or two heads
    # rows are read one by one, an order that the hardware prefetcher recognises.
    together = 1 if space < 4 else max(1, min(tokens, _SETTINGS.sums[width] // space))
    memory_bound = _memory_bound(group, space, width, stored, fetch, in_pairs)
    sharing = 1 if memory_bound else together
    steps = len(loads) * together // sharing
    coming_rows = tokens * 3 // 4 if fetches_keys(space, in_pairs) else tokens

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not group:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        scale_, q_, rows_, offset_, count_, tile_, next_, next_offset_ = arguments[7:]

        def registers_of(load: Load, row: Any) -> list[Any]:
            return [e.pairs(load, row)] if in_pairs else e.widen(load, row, stored)

        def multiplied(total: Any, register: Any, weight: Any) -> Any:
            return e.dot_bf16(total, register, weight) if in_pairs else e.fma(register, weight, total)

        def products(row: list[Any], coming: list[Any]) -> list[Any]:
            sums = [[e.zero] * space for _ in row]
            place = step = 0
            wanted = [e.at(at, line) for at in coming for line in lines]
            for load in loads:
                for first in range(0, len(row), sharing):
                    for line in lines_due(wanted, step, steps):
                        e.prefetch(line, LEVEL)
                    if memory_bound:
                        e.keep_order()
                    step += 1
                    loaded = [registers_of(load, address) for address in row[first : first + sharing]]
                    for x in range(len(loaded[0])):
                        for h in range(group):
                            weight = e.load_f32(q_, 4 * (h * length + (place + x) * width))
                            for j, registers in enumerate(loaded, first):
                                sums[j][h] = multiplied(sums[j][h], registers[x], weight)
                    if memory_bound:
                        e.keep_order()
                place += len(loaded[0])
            return [total for own in sums for total in own]

        def body(index: Any, _: list[Any]) -> list[Any]:
            first = builder.mul(index, I64(8 * tokens))
            here = e.at(rows_, first)
            there = e.at(next_, builder.mul(index, I64(8 * coming_rows)))

            def all_products() -> Iterator[Any]:
                for start in range(0, tokens, together):
                    own = range(start, start + together)
                    row = [e.at(e.load(e.at(here, 8 * x), I64, 8), offset_) for x in own]
                    wanted = own[: max(0, coming_rows - start)]
                    coming = [e.at(e.load(e.at(there, 8 * x), I64, 8), next_offset_) for x in wanted]
                    yield from products(row, coming)

            found = e.sums(all_products())
            if in_pairs:
                found = builder.fmul(found, e.spread(scale_))
            e.store_f32(found, e.at(tile_, builder.mul(index, I64(4 * width))))
            return []

        groups = builder.sdiv(builder.add(count_, I64(tokens - 1)), I64(tokens))
        e.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(lanes, storage, dim, heads, padded, ahead, paired, types.float32, *[types.int64] * 7), emit


@compiled()
def in_streams(rows: Any, count: int, ordered: Any) -> None:
    """Store the addresses of a tile's `count` rows in the order in which they are prefetched.

    `rows` and `ordered` have the same length, a multiple of `_STREAMS`.
    """
    each = -(-count // _STREAMS)
    for x in range(len(rows) // _STREAMS):
        for stream in range(_STREAMS):
            ordered[x * _STREAMS + stream] = rows[stream * each + x]


def _lines(size: int, ahead: int) -> range:
    """Offsets in a row of `size` bytes whose cache lines are prefetched; rows need not be aligned to lines."""
    return range(0, size, ahead * LINE) if ahead else range(0)


def _memory_bound(group: int, padded: int, width: int, stored: Storage, ahead: int, paired: bool) -> bool:
    """True if reading takes longer than computing, so that loads and prefetches are spread evenly between products.

    It is true where `softmax` `fetches_keys`: LLVM's order makes four heads on two threads of a Zen 4 0.96 times as
    fast. LLVM puts them in a burst before the products of several rows. It is left to that for chunks of heads that
    prefetch nothing because a later chunk reads the same rows (12 heads in fp16 would take 1.06 times as long), and for
    INT8, which has to be converted: 1.04, 0.99 and 0.98 times as fast with 1 to 3 heads on a Xeon with AMX.
    """
    if not ahead or stored is Storage.INT8:
        return False
    if fetches_keys(padded, paired):
        return True
    return group * LINE // (width * stored.itemsize) <= _SETTINGS.ordered_products[width]


def lines_due(lines: Sequence[Any], step: int, steps: int) -> Sequence[Any]:
    """The lines to prefetch before step `step` of `steps`: spread evenly, each as early as that allows.

    With one line per row, prefetching it at the row's end instead of its beginning cost 12 % with one query head per KV
    head.
    """
    first = -(-step * len(lines) // steps)
    end = -(-(step + 1) * len(lines) // steps)
    return lines[first:end]


@emitted
def softmax(
    typing: Any, lanes: Any, storage: Any, dim: Any, heads: Any, padded: Any, ahead: Any, tokens: Any,
    tile: Any, top: Any, total: Any, sums: Any, next_rows: Any, next_offset: Any,
) -> Any:  # fmt: skip
    """Turn a tile of `tokens` scores (to the base 2) into weights relative to each head's largest score so far.

    `top` and `total` are one register each, laid out like the scores: running maxima, and running sums of weights.
    `sums` are the heads' weighted sums of values; they and `total` are scaled down when a maximum grows. Prefetches as
    many rows of the next tile as `early` says, from `next_rows` on.
    """
    width = literal(lanes)
    length = literal(dim)
    group = literal(heads)
    space = literal(padded)
    count = literal(tokens)
    lines = _lines(length * Storage(literal(storage)).itemsize, literal(ahead))
    times = count * space // (4 * width)
    rows_each = early(count, space) // times

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not group:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        tile_, top_, total_, sums_, next_, next_offset_ = arguments[7:]
        places = range(0, 16 * width, 4 * width)  # of four registers; a tile has a multiple of four

        def higher(index: Any, high: list[Any]) -> list[Any]:
            here = e.at(tile_, builder.mul(index, I64(len(places) * places.step)))
            return [e.larger(e.load_f32(here, place), own) for place, own in zip(places, high, strict=True)]

        high = e.loop(I64(times), [e.const(-math.inf)] * len(places), higher)
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
            here = e.at(tile_, builder.mul(index, I64(len(places) * places.step)))
            total = running[0]
            coming = e.at(next_, builder.mul(index, I64(8 * rows_each)))
            rows = [e.at(e.load(e.at(coming, place), I64, 8), next_offset_) for place in range(0, 8 * rows_each, 8)]
            wanted = [e.at(row, line) for row in rows for line in lines]
            for step, place in enumerate(places):
                for line in lines_due(wanted, step, len(places)):
                    e.prefetch(line, LEVEL)
                weight = e.exp2(builder.fsub(e.load_f32(here, place), reference))
                e.store_f32(weight, here, place)
                total = builder.fadd(total, weight)
            return [total]

        e.store_f32(e.loop(I64(times), [e.load_f32(total_)], weigh)[0], total_)
        return context.get_dummy_value()

    return types.void(lanes, storage, dim, heads, padded, ahead, tokens, *[types.int64] * 6), emit


@emitted
def weighted(
    typing: Any, lanes: Any, storage: Any, dim: Any, heads: Any, padded: Any, ahead: Any, tokens: Any, paired: Any,
    tile: Any, rows: Any, offset: Any, count: Any, sums: Any, next_rows: Any, next_offset: Any,
) -> Any:  # fmt: skip
    """sums[h] += tile[t, h] row[t] for `heads` heads and `count` tokens; prefetches values of the next tile."""
    width = literal(lanes)
    stored = Storage(literal(storage))
    length = literal(dim)
    group = literal(heads)
    space = literal(padded)
    fetch = literal(ahead)
    in_pairs = bool(literal(paired))
    memory_bound = _memory_bound(group, space, width, stored, fetch, in_pairs)
    early_rows = 0 if fetches_keys(space, in_pairs) else early(literal(tokens), space)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not group:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        tile_, rows_, offset_, count_, sums_, next_, next_offset_ = arguments[8:]
        passes = _passes(row_loads(length, stored, width), _SETTINGS.sums[width] // group)
        together = max(x for x in range(1, _SETTINGS.tokens_together + 1) if len(passes) % x == 0)
        portions = len(passes) // together
        lines = _lines(length * stored.itemsize, fetch)
        portion = lines[: -(-len(lines) // portions)]
        several = builder.sdiv(count_, I64(together))

        def one_pass(number: int, loads: list[Load], place: int) -> None:
            held = sum(load.vectors for load in loads)
            where = [4 * (h * length + (place + x) * width) for h in range(group) for x in range(held)]
            steps = [[load] for load in loads] if memory_bound else [loads]

            def token(t: Any, sums: list[Any], wanted: Sequence[Any] = ()) -> list[Any]:
                row = e.at(e.load(e.at(rows_, builder.mul(t, I64(8))), I64, 8), offset_)
                weight_ = e.at(tile_, builder.mul(t, I64(4 * space)))
                weights: list[Any] = []
                before = 0
                for step, some in enumerate(steps):
                    for line in lines_due(wanted, step, len(steps)):
                        e.prefetch(line, LEVEL)
                    if memory_bound:
                        e.keep_order()
                    registers = [register for load in some for register in e.widen(load, row, stored)]
                    for h in range(group):
                        if not step:
                            weights.append(e.spread_f32(weight_, 4 * h))
                        for x, register in enumerate(registers, h * held + before):
                            sums[x] = e.fma(register, weights[h], sums[x])
                    before += len(registers)
                    if memory_bound:
                        e.keep_order()
                return sums

            def side_by_side(index: Any, carried: list[Any]) -> list[Any]:
                """Add `together` tokens and prefetch one portion of a row of the next tile.

                The iterations of all passes prefetch row after row, in order within a row. They have time for as many
                rows as a tile has, of which `softmax` has prefetched `early_rows`; so as many are prefetched twice,
                which spreads the others evenly.
                """
                sums = list(carried)
                first = builder.mul(index, I64(together))
                iteration = builder.add(builder.mul(several, I64(number)), index)
                turn = builder.udiv(iteration, I64(portions))
                entry = turn
                if early_rows:
                    before = builder.udiv(builder.add(turn, I64(1)), I64(literal(tokens) // early_rows))
                    entry = builder.sub(builder.add(turn, I64(early_rows)), before)
                row = e.at(e.load(e.at(next_, builder.mul(entry, I64(8))), I64, 8), next_offset_)
                begin = e.at(row, builder.mul(builder.urem(iteration, I64(portions)), I64(len(portion) * lines.step)))
                for x in range(together):
                    wanted = [e.at(begin, line) for line in lines_due(portion, x, together)]
                    sums = token(builder.add(first, I64(x)), sums, wanted)
                return sums

            def rest(index: Any, carried: list[Any]) -> list[Any]:
                return token(builder.add(builder.mul(several, I64(together)), index), list(carried))

            for count, each in ((several, side_by_side), (builder.srem(count_, I64(together)), rest)):
                with builder.if_then(builder.icmp_signed(">", count, I64(0))):
                    sums = e.loop(count, [e.load_f32(sums_, at) for at in where], each)
                    for at, value in zip(where, sums, strict=True):
                        e.store_f32(value, sums_, at)

        for number, (loads, place) in enumerate(passes):
            one_pass(number, loads, place)
        return context.get_dummy_value()

    return types.void(lanes, storage, dim, heads, padded, ahead, tokens, paired, *[types.int64] * 7), emit


def _passes(loads: tuple[Load, ...], most: int) -> list[tuple[list[Load], int]]:
    """Group a row's loads into passes of at most `most` registers, each with the number of registers before it."""
    found: list[tuple[list[Load], int]] = []
    place = held = 0
    for load in loads:
        if not found or held + load.vectors > max(most, load.vectors):
            found.append(([], place))
            held = 0
        found[-1][0].append(load)
        held = held + load.vectors
        place = place + load.vectors
    return found
