"""The inner loops of decode attention with matrix registers: scores and weighted sums of 32 tokens at a time.

An fp32 is the sum of three bf16, so that with queries and weights cut into such parts every product with a cache of
bf16 is exact, as in `vectors`, and sums are fp32 as there. What differs: an infinity in the cache gives NaN, and
denormal numbers count as zero. What is multiplied are copies that stay in L1: keys as they lie, values of two tokens
side by side.

The next unit's rows are asked for all the time. Shares of sequential reading with 8 and 16 heads, D 128: 0.88 and
0.78; with a quarter of them in each of the four loops over rows and products 0.84 and 0.71, because memory waited
during the softmax. Where keys are longer than values, `weighted` ends before the ends of its four keys. Each chunk of
queries asks again: asking in the first one alone gave 1.01, all in a burst with the copies 0.77 to 0.97.
"""

from __future__ import annotations

from typing import Any

from numba import types

from ..codegen.compiled import emitted, literal
from ..codegen.matrix_ir import PARTS, ROWS, Matrices
from ..codegen.vector_ir import I64, LINE, Emitter
from .vectors import LEVEL, dealt, slots

STEP = 2 * ROWS
"""bf16 in a row of a register: tokens of a tile, and dims that are multiplied together."""
_SCORES = (0, 1)
_QUERIES = 2
_ROWS = (3, 4)
_SUMS = (5, 6)
_WEIGHTS = 7
_WITH_SCORES = range(16, 24)
_WITH_WEIGHTS = range(24, 28)
_WITH_SUMS = range(28, 32)
"""The next keys that are asked for by `scores`, `cut_weights` and `weighted`; the first ones are by `take_keys`."""
VALUES_FIRST = ROWS // 2
"""The next values that are asked for by `take_values`, one for two pairs; `softmax` asks for `early` ones, which are as
many, `weighted` for the others."""


def _parts(e: Emitter, value: Any) -> list[Any]:
    """Registers whose words have a bf16 in their upper halves, and whose sum is `value`."""
    found = []
    for _ in range(PARTS):
        part = e.floats(e.b.and_(e.bits(value), e.iconst(0xFFFF0000)))
        found.append(e.bits(part))
        value = e.b.fsub(value, part)
    return found


def _side_by_side(e: Emitter, low: Any, high: Any) -> Any:
    """Words of the upper halves of two registers' words."""
    return e.b.or_(e.b.lshr(low, e.iconst(16)), e.b.and_(high, e.iconst(0xFFFF0000)))


def _transposed(e: Emitter, registers: list[Any]) -> list[Any]:
    """As many registers, a power of two: the bits of a register's number and the lowest ones of a lane's change places.

    Of 16 registers the transpose; of fewer, transposes of the squares of lanes that they hold side by side.
    """
    apart = 1
    while apart < len(registers):
        result = list(registers)
        for first in range(len(registers)):
            if not first & apart:
                a = registers[first]
                b = registers[first | apart]
                result[first] = e.shuffle(a, b, [n ^ apart | ROWS if n & apart else n for n in range(ROWS)])
                result[first | apart] = e.shuffle(a, b, [n | ROWS if n & apart else n | apart for n in range(ROWS)])
        registers = result
        apart = 2 * apart
    return registers


def _order(room: int) -> list[int]:
    """Index of the item, of 16 stored in order with `room` words each, in each lane of their transposed registers."""
    return [lane % room * (ROWS // room) + lane // room for lane in range(ROWS)]


def _row(e: Emitter, rows: Any, index: Any, offset: Any) -> Any:
    return e.at(e.load(e.at(rows, e.b.mul(index, I64(8))), I64, 8), offset)


def _ask_lines(e: Emitter, rows: range, number: int, parts: int, asked: Any, index: Any, offset: Any) -> None:
    """Line `index` of each row of one part of these rows."""
    place = e.at(offset, e.b.mul(index, I64(LINE)))
    for row in dealt(rows, number, parts):
        e.prefetch(e.at(e.load(e.at(asked, 8 * row), I64, 8), place), LEVEL)


@emitted
def start(typing: Any, heads: Any) -> Any:
    """Shape the registers for so many heads, once for both kinds of products."""
    group = literal(heads)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Matrices(builder).shape([(ROWS, slots(group))] * 3 + [(ROWS, ROWS)] * 2 + [(group, ROWS)] * 3)
        return context.get_dummy_value()

    return types.void(heads), emit


@emitted
def cut_queries(typing: Any, dim: Any, heads: Any, factor: Any, source: Any, target: Any) -> Any:
    """Queries (heads, dim) in fp32 times `factor` as matrices (dim / 32, PARTS, 16 pairs of dims, room)."""
    length = literal(dim)
    group = literal(heads)
    room = slots(group)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        factor_, source_, target_ = arguments[2:]
        share = e.spread(factor_)
        order = _order(room)

        def block(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(source_, builder.mul(index, I64(4 * STEP)))
            to = e.at(target_, builder.mul(index, I64(PARTS * LINE * room)))
            rows = []
            for h in range(group):
                place = 4 * h * length
                a = builder.fmul(e.load(e.at(here, place), e.f32s, 4), share)
                b = builder.fmul(e.load(e.at(here, place + LINE), e.f32s, 4), share)
                even = _parts(e, e.shuffle(a, b, [2 * pair for pair in order]))
                odd = _parts(e, e.shuffle(a, b, [2 * pair + 1 for pair in order]))
                rows.append([_side_by_side(e, *both) for both in zip(even, odd, strict=True)])
            for part in range(PARTS):
                words = [row[part] for row in rows] + [e.iconst(0)] * (room - group)
                for x, register in enumerate(_transposed(e, words)):
                    e.store(register, e.at(to, LINE * (part * room + x)), LINE)
            return []

        e.loop(I64(length // STEP), [], block)
        return context.get_dummy_value()

    return types.void(dim, heads, types.float32, types.int64, types.int64), emit


@emitted
def take_keys(typing: Any, dim: Any, rows: Any, offset: Any, keys: Any, asked: Any, next_offset: Any) -> Any:
    """Copy the keys of 32 tokens, one behind the other."""
    size = 2 * literal(dim)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        rows_, offset_, keys_, asked_, next_ = arguments[1:]

        def two(index: Any, _: list[Any]) -> list[Any]:
            row = _row(e, asked_, index, next_)
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
def take_values(
    typing: Any, dim: Any, heads: Any, rows: Any, offset: Any, values: Any, asked: Any, next_offset: Any
) -> Any:
    """Copy the values of 32 tokens, those of two that are 16 apart side by side: even dims, then odd ones."""
    size = 2 * literal(dim)
    room = slots(literal(heads))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        rows_, offset_, values_, asked_, next_ = arguments[2:]

        def two(token: Any) -> None:
            from_ = e.at(rows_, builder.mul(token, I64(8)))
            both = [e.at(e.load(e.at(from_, 8 * ROWS * x), I64, 8), offset_) for x in range(2)]
            each = I64(ROWS // room)
            lane = builder.add(builder.udiv(token, each), builder.mul(builder.urem(token, each), I64(room)))
            to = e.at(values_, builder.mul(lane, I64(2 * size)))  # where `_order` puts the weight of this token
            for place in range(0, size, LINE):
                a, b = (e.load(e.at(row, place), e.i32s, 2) for row in both)
                even = builder.or_(builder.and_(a, e.iconst(0xFFFF)), builder.shl(b, e.iconst(16)))
                e.store(even, e.at(to, 2 * place), LINE)
                e.store(_side_by_side(e, a, b), e.at(to, 2 * place + LINE), LINE)

        def four(index: Any, _: list[Any]) -> list[Any]:
            row = _row(e, asked_, index, next_)
            for x in range(2):
                for line in dealt(range(0, size, LINE), x, 2):
                    e.prefetch(e.at(row, line), LEVEL)
                two(builder.add(builder.mul(index, I64(2)), I64(x)))
            return []

        e.loop(I64(VALUES_FIRST), [], four)
        return context.get_dummy_value()

    return types.void(dim, heads, *[types.int64] * 5), emit


@emitted
def scores(typing: Any, dim: Any, heads: Any, keys: Any, queries: Any, tile: Any, asked: Any, next_offset: Any) -> Any:
    """tile[t, h] = queries[h] . keys[t] for 32 tokens."""
    length = literal(dim)
    room = slots(literal(heads))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        m = Matrices(builder)
        keys_, queries_, tile_, asked_, next_ = arguments[2:]
        for register in _SCORES:
            m.clear(register)

        def block(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(keys_, builder.mul(index, I64(LINE)))
            weights = e.at(queries_, builder.mul(index, I64(PARTS * LINE * room)))
            for x, key in enumerate(_ROWS):
                m.load(key, e.at(here, 2 * length * ROWS * x), I64(2 * length))
            for part in range(PARTS):
                m.load(_QUERIES, e.at(weights, part * LINE * room), I64(4 * room))
                for x, key in enumerate(_ROWS):
                    m.multiply(_SCORES[x], key, _QUERIES)
                    _ask_lines(e, _WITH_SCORES, 2 * part + x, 2 * PARTS, asked_, index, next_)
            return []

        e.loop(I64(length // STEP), [], block)
        for x, register in enumerate(_SCORES):
            m.store(register, e.at(tile_, 4 * room * ROWS * x), I64(4 * room))
        return context.get_dummy_value()

    return types.void(dim, heads, *[types.int64] * 5), emit


@emitted
def cut_weights(typing: Any, dim: Any, heads: Any, tile: Any, weights: Any, asked: Any, next_offset: Any) -> Any:
    """A tile of 32 tokens' weights (32, room) in fp32 as matrices (PARTS, heads, 16 pairs of tokens)."""
    length = literal(dim)
    group = literal(heads)
    room = slots(group)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        tile_, weights_, asked_, next_ = arguments[2:]
        rows = [e.at(e.load(e.at(asked_, 8 * row), I64, 8), next_) for row in _WITH_WEIGHTS]
        asked = [e.at(row, line) for row in rows for line in range(0, 2 * length, LINE)]
        low = [e.load_f32(tile_, LINE * x) for x in range(room)]
        high = [e.load_f32(tile_, LINE * (x + room)) for x in range(room)]
        low = _transposed(e, low)
        high = _transposed(e, high)
        for h in range(group):
            pairs = zip(_parts(e, low[h]), _parts(e, high[h]), strict=True)
            for part, words in enumerate(pairs):
                e.store(_side_by_side(e, *words), e.at(weights_, LINE * (part * group + h)), LINE)
                for line in dealt(asked, PARTS * h + part, PARTS * group):
                    e.prefetch(line, LEVEL)
                e.keep_order()
        return context.get_dummy_value()

    return types.void(dim, heads, *[types.int64] * 4), emit


@emitted
def weighted(
    typing: Any, dim: Any, heads: Any, weights: Any, values: Any, sums: Any, asked: Any, soon: Any, later: Any
) -> Any:
    """sums[h] += weights[h, t] values[t] over 32 tokens; sums in the order in which `take_values` leaves the dims."""
    size = literal(dim)
    group = literal(heads)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        m = Matrices(builder)
        weights_, values_, sums_, asked_, soon_, later_ = arguments[2:]

        def block(index: Any, _: list[Any]) -> list[Any]:
            place = builder.mul(index, I64(2 * LINE))
            there = e.at(sums_, place)
            here = e.at(values_, place)
            for x in range(2):
                m.load(_SUMS[x], e.at(there, LINE * x), I64(4 * size))
                m.load(_ROWS[x], e.at(here, LINE * x), I64(4 * size))
            for part in range(PARTS):
                m.load(_WEIGHTS, e.at(weights_, LINE * group * part), I64(LINE))
                for x, value in enumerate(_ROWS):
                    m.multiply(_SUMS[x], _WEIGHTS, value)
                    _ask_lines(e, _WITH_SUMS, 2 * part + x, 2 * PARTS, asked_, index, soon_)
                    _ask_lines(e, range(2 * VALUES_FIRST, STEP), 2 * part + x, 2 * PARTS, asked_, index, later_)
            for x, register in enumerate(_SUMS):
                m.store(register, e.at(there, LINE * x), I64(4 * size))
            return []

        e.loop(I64(size // STEP), [], block)
        return context.get_dummy_value()

    return types.void(dim, heads, *[types.int64] * 6), emit
