"""The inner loops of decode attention with matrix registers: scores and weighted sums of tiles of 32 tokens.

Queries and weights are split into three bf16 terms whose sum is the fp32. Their products with a bf16 cache are
therefore exact and their sums fp32, as in `vectors`, with two differences: an infinity in the cache gives NaN, and
denormal numbers count as zero. The operands are copies that stay in L1: keys unchanged, values with two tokens
interleaved.

Every loop, the softmax included, prefetches rows of the next tile. Fractions of the sequential read rate with 8 and 16
heads, D 128: 0.88 and 0.78; with a quarter of the prefetches in each of the four loops over rows and products, 0.84
and 0.71, because memory was idle during the softmax. Where keys are longer than values, `weighted` does not reach the
ends of its four keys. Each chunk of queries repeats the prefetches: with those of the first chunk alone the speed was
1.01 times as high, with all in a burst beside the copies 0.77 to 0.97 times.
"""

from __future__ import annotations

from typing import Any

from numba import types

from ..codegen.compiled import emitted, literal
from ..codegen.matrix_ir import ROWS, TERMS, Matrices
from ..codegen.vector_ir import I64, LINE, Emitter
from .vectors import LEVEL, lines_due, padded_heads

STEP = 2 * ROWS
"""bf16 per row of a register: the tokens of a tile, and the dims that one instruction multiplies."""
_SCORES = (0, 1)
_QUERIES = 2
_ROWS = (3, 4)
_SUMS = (5, 6)
_WEIGHTS = 7
_WITH_SCORES = range(16, 24)
_WITH_WEIGHTS = range(24, 28)
_WITH_SUMS = range(28, 32)
"""Keys of the next tile that `scores`, `weight_terms` and `weighted` prefetch; `copy_keys` prefetches those before."""
VALUES_FIRST = ROWS // 2
"""Values of the next tile that `copy_values` prefetches, one for every four tokens that it copies. `softmax` prefetches
as many (`early`), `weighted` the others."""


def _terms(e: Emitter, value: Any) -> list[Any]:
    """Registers whose words have a bf16 in their upper halves, and whose sum is `value`."""
    found = []
    for _ in range(TERMS):
        term = e.floats(e.b.and_(e.bits(value), e.iconst(0xFFFF0000)))
        found.append(e.bits(term))
        value = e.b.fsub(value, term)
    return found


def _transposed(e: Emitter, registers: list[Any]) -> list[Any]:
    """Transpose the square blocks of lanes that the registers, a power of two of them, hold side by side.

    The bits of the register's number change places with the lowest bits of the lane's. With 16 registers there is one
    block.
    """
    distance = 1
    while distance < len(registers):
        result = list(registers)
        for first in range(len(registers)):
            if not first & distance:
                a = registers[first]
                b = registers[first | distance]
                result[first] = e.shuffle(a, b, [n ^ distance | ROWS if n & distance else n for n in range(ROWS)])
                second = [n | ROWS if n & distance else n | distance for n in range(ROWS)]
                result[first | distance] = e.shuffle(a, b, second)
        registers = result
        distance = 2 * distance
    return registers


def _order(padded: int) -> list[int]:
    """Index of the item in each lane of transposed registers, where 16 items of `padded` words were stored in order."""
    return [lane % padded * (ROWS // padded) + lane // padded for lane in range(ROWS)]


def _row(e: Emitter, rows: Any, index: Any, offset: Any) -> Any:
    """The address at `rows[index]` plus an offset."""
    return e.at(e.load(e.at(rows, e.b.mul(index, I64(8))), I64, 8), offset)


def _prefetch_lines(e: Emitter, rows: range, step: int, steps: int, next_rows: Any, index: Any, offset: Any) -> None:
    """Prefetch line `index` of the rows that are due at step `step` of `steps`."""
    place = e.at(offset, e.b.mul(index, I64(LINE)))
    for row in lines_due(rows, step, steps):
        e.prefetch(e.at(e.load(e.at(next_rows, 8 * row), I64, 8), place), LEVEL)


@emitted
def start(typing: Any, heads: Any) -> Any:
    """Set the registers' shapes for `heads` query heads; scores and weighted sums use the same ones."""
    group = literal(heads)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Matrices(builder).shape([(ROWS, padded_heads(group))] * 3 + [(ROWS, ROWS)] * 2 + [(group, ROWS)] * 3)
        return context.get_dummy_value()

    return types.void(heads), emit


@emitted
def query_terms(typing: Any, dim: Any, heads: Any, factor: Any, source: Any, target: Any) -> Any:
    """Split fp32 queries (heads, dim) times `factor` into bf16 terms (dim / 32, TERMS, 16 pairs of dims, padded)."""
    length = literal(dim)
    group = literal(heads)
    padded = padded_heads(group)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        factor_, source_, target_ = arguments[2:]
        share = e.spread(factor_)
        order = _order(padded)

        def block(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(source_, builder.mul(index, I64(4 * STEP)))
            to = e.at(target_, builder.mul(index, I64(TERMS * LINE * padded)))
            rows = []
            for h in range(group):
                place = 4 * h * length
                a = builder.fmul(e.load(e.at(here, place), e.f32s, 4), share)
                b = builder.fmul(e.load(e.at(here, place + LINE), e.f32s, 4), share)
                even = _terms(e, e.shuffle(a, b, [2 * pair for pair in order]))
                odd = _terms(e, e.shuffle(a, b, [2 * pair + 1 for pair in order]))
                rows.append([e.upper_halves(*both) for both in zip(even, odd, strict=True)])
            for term in range(TERMS):
                words = [row[term] for row in rows] + [e.iconst(0)] * (padded - group)
                for x, register in enumerate(_transposed(e, words)):
                    e.store(register, e.at(to, LINE * (term * padded + x)), LINE)
            return []

        e.loop(I64(length // STEP), [], block)
        return context.get_dummy_value()

    return types.void(dim, heads, types.float32, types.int64, types.int64), emit


@emitted
def copy_keys(typing: Any, dim: Any, rows: Any, offset: Any, keys: Any, next_rows: Any, next_offset: Any) -> Any:
    """Copy the keys of 32 tokens into contiguous rows; prefetch half of the next tile's keys."""
    size = 2 * literal(dim)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        rows_, offset_, keys_, next_rows_, next_offset_ = arguments[1:]

        def two(index: Any, _: list[Any]) -> list[Any]:
            row = _row(e, next_rows_, index, next_offset_)
            for line in range(0, size, LINE):
                e.prefetch(e.at(row, line), LEVEL)
            from_ = e.at(rows_, builder.mul(index, I64(16)))
            to = e.at(keys_, builder.mul(index, I64(2 * size)))
            for x in range(2):
                row = e.at(e.load(e.at(from_, 8 * x), I64, 8), offset_)
                for place in range(0, size, LINE):
                    e.store(e.load(e.at(row, place), e.i32s, 2), e.at(to, x * size + place), LINE)
            return []

        e.loop(I64(ROWS), [], two)
        return context.get_dummy_value()

    return types.void(dim, *[types.int64] * 5), emit


@emitted
def copy_values(
    typing: Any, dim: Any, heads: Any, rows: Any, offset: Any, values: Any, next_rows: Any, next_offset: Any
) -> Any:
    """Copy the values of 32 tokens with tokens t and t + 16 interleaved: per 32 dims the even ones, then the odd ones.

    Prefetches the first of the next tile's values.
    """
    size = 2 * literal(dim)
    padded = padded_heads(literal(heads))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        rows_, offset_, values_, next_rows_, next_offset_ = arguments[2:]

        def two(token: Any) -> None:
            from_ = e.at(rows_, builder.mul(token, I64(8)))
            both = [e.at(e.load(e.at(from_, 8 * ROWS * x), I64, 8), offset_) for x in range(2)]
            each = I64(ROWS // padded)
            lane = builder.add(builder.udiv(token, each), builder.mul(builder.urem(token, each), I64(padded)))
            to = e.at(values_, builder.mul(lane, I64(2 * size)))  # where `_order` puts the weight of this token
            for place in range(0, size, LINE):
                a = e.load(e.at(both[0], place), e.i32s, 2)
                b = e.load(e.at(both[1], place), e.i32s, 2)
                even = builder.or_(builder.and_(a, e.iconst(0xFFFF)), builder.shl(b, e.iconst(16)))
                e.store(even, e.at(to, 2 * place), LINE)
                e.store(e.upper_halves(a, b), e.at(to, 2 * place + LINE), LINE)

        def four(index: Any, _: list[Any]) -> list[Any]:
            row = _row(e, next_rows_, index, next_offset_)
            for x in range(2):
                for line in lines_due(range(0, size, LINE), x, 2):
                    e.prefetch(e.at(row, line), LEVEL)
                two(builder.add(builder.mul(index, I64(2)), I64(x)))
            return []

        e.loop(I64(VALUES_FIRST), [], four)
        return context.get_dummy_value()

    return types.void(dim, heads, *[types.int64] * 5), emit


@emitted
def scores(
    typing: Any, dim: Any, heads: Any, keys: Any, queries: Any, tile: Any, next_rows: Any, next_offset: Any
) -> Any:
    """tile[t, h] = queries[h] . keys[t] for 32 tokens; prefetches keys of the next tile."""
    length = literal(dim)
    padded = padded_heads(literal(heads))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        m = Matrices(builder)
        keys_, queries_, tile_, next_rows_, next_offset_ = arguments[2:]
        for register in _SCORES:
            m.clear(register)

        def block(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(keys_, builder.mul(index, I64(LINE)))
            weights = e.at(queries_, builder.mul(index, I64(TERMS * LINE * padded)))
            for x, key in enumerate(_ROWS):
                m.load(key, e.at(here, 2 * length * ROWS * x), I64(2 * length))
            for term in range(TERMS):
                m.load(_QUERIES, e.at(weights, term * LINE * padded), I64(4 * padded))
                for x, key in enumerate(_ROWS):
                    m.multiply(_SCORES[x], key, _QUERIES)
                    _prefetch_lines(e, _WITH_SCORES, 2 * term + x, 2 * TERMS, next_rows_, index, next_offset_)
            return []

        e.loop(I64(length // STEP), [], block)
        for x, register in enumerate(_SCORES):
            m.store(register, e.at(tile_, 4 * padded * ROWS * x), I64(4 * padded))
        return context.get_dummy_value()

    return types.void(dim, heads, *[types.int64] * 5), emit


@emitted
def weight_terms(typing: Any, dim: Any, heads: Any, tile: Any, weights: Any, next_rows: Any, next_offset: Any) -> Any:
    """Split 32 tokens' fp32 weights (32, padded) into bf16 terms (TERMS, heads, 16 pairs of tokens).

    Prefetches keys of the next tile.
    """
    length = literal(dim)
    group = literal(heads)
    padded = padded_heads(group)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        tile_, weights_, next_rows_, next_offset_ = arguments[2:]
        rows = [e.at(e.load(e.at(next_rows_, 8 * row), I64, 8), next_offset_) for row in _WITH_WEIGHTS]
        lines = [e.at(row, line) for row in rows for line in range(0, 2 * length, LINE)]
        low = [e.load_f32(tile_, LINE * x) for x in range(padded)]
        high = [e.load_f32(tile_, LINE * (x + padded)) for x in range(padded)]
        low = _transposed(e, low)
        high = _transposed(e, high)
        for h in range(group):
            pairs = zip(_terms(e, low[h]), _terms(e, high[h]), strict=True)
            for term, words in enumerate(pairs):
                e.store(e.upper_halves(*words), e.at(weights_, LINE * (term * group + h)), LINE)
                for line in lines_due(lines, TERMS * h + term, TERMS * group):
                    e.prefetch(line, LEVEL)
                e.keep_order()
        return context.get_dummy_value()

    return types.void(dim, heads, *[types.int64] * 4), emit


@emitted
def weighted(
    typing: Any, dim: Any, heads: Any, weights: Any, values: Any, sums: Any, next_rows: Any, soon: Any, later: Any
) -> Any:
    """sums[h] += weights[h, t] values[t] over 32 tokens; the sums have the dims in the order of `copy_values`.

    Prefetches keys of the next tile at the offset `soon` and values at the offset `later`.
    """
    size = literal(dim)
    group = literal(heads)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        m = Matrices(builder)
        weights_, values_, sums_, next_rows_, soon_, later_ = arguments[2:]

        def block(index: Any, _: list[Any]) -> list[Any]:
            place = builder.mul(index, I64(2 * LINE))
            there = e.at(sums_, place)
            here = e.at(values_, place)
            for x in range(2):
                m.load(_SUMS[x], e.at(there, LINE * x), I64(4 * size))
                m.load(_ROWS[x], e.at(here, LINE * x), I64(4 * size))
            for term in range(TERMS):
                m.load(_WEIGHTS, e.at(weights_, LINE * group * term), I64(LINE))
                for x, value in enumerate(_ROWS):
                    m.multiply(_SUMS[x], _WEIGHTS, value)
                    _prefetch_lines(e, _WITH_SUMS, 2 * term + x, 2 * TERMS, next_rows_, index, soon_)
                    values_left = range(2 * VALUES_FIRST, STEP)
                    _prefetch_lines(e, values_left, 2 * term + x, 2 * TERMS, next_rows_, index, later_)
            for x, register in enumerate(_SUMS):
                m.store(register, e.at(there, LINE * x), I64(4 * size))
            return []

        e.loop(I64(size // STEP), [], block)
        return context.get_dummy_value()

    return types.void(dim, heads, *[types.int64] * 6), emit
