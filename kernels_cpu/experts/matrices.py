"""The experts' inner loops with matrix registers: a block of 64 rows of packed weights times up to 32 tokens.

Packed words have the layout of the right operand of a product: its row s holds word s of every row of the block. With
BF16 weights each number of a token is rounded to bf16, or split into three bf16 terms, so that products are exact, as
in `vectors`; but an infinity then gives NaN. Denormal terms count as zero. INT8 is computed in integers until the sums
of a group are scaled, and INT4 and UINT4 are unpacked to bytes first, so that results are equal to those of `vectors`
bit by bit.
"""

from __future__ import annotations

from typing import Any

from numba import types

from ..codegen.compiled import emitted, literal
from ..codegen.matrix_ir import ROWS, TERMS, Matrices
from ..codegen.vector_ir import I64, LINE, Emitter
from .vectors import ahead, nibbles, scales_without_zeros, times_zeros
from .weights import ROWS as BLOCK
from .weights import Format

COLUMNS = 2 * ROWS
"""Columns that one instruction multiplies; the number of columns must be a multiple of it."""
TOGETHER = ROWS
"""Tokens of a register."""
_SUMS = range(4)
_TOKENS = range(4, 4 + TERMS)
_WEIGHTS = 7


@emitted
def shape(typing: Any, terms: Any, tokens: Any) -> Any:
    """Set the registers' shapes for `tokens` tokens; emits nothing for no terms."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if literal(terms):
            Matrices(builder).shape([(arguments[1], ROWS)] * (len(_SUMS) + TERMS) + [(ROWS, ROWS)])
        return context.get_dummy_value()

    return types.void(terms, types.int64), emit


@emitted
def matrix_block(
    typing: Any, terms: Any,
    block: Any, x: Any, stride: Any, term_stride: Any, steps: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[t, r] = row[r] . x[t] for the tokens of `shape`.

    Rows of x are `stride` bytes apart, the terms of a row `term_stride`, rows of out `out_stride`. Emits nothing for no
    terms.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not literal(terms):
            return context.get_dummy_value()
        e = Emitter(builder, ROWS)
        m = Matrices(builder)
        block_, x_, stride_, term_stride_, steps_, out_, out_stride_ = arguments[1:]
        used = _TOKENS[: literal(terms)]
        for total in _SUMS:
            m.clear(total)

        def step(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(block_, builder.mul(index, I64(4 * BLOCK * ROWS)))
            at = e.at(x_, builder.mul(index, I64(LINE)))
            for tokens in used:
                m.load(tokens, at, stride_)
                at = e.at(at, term_stride_)
            for x, total in enumerate(_SUMS):
                m.load(_WEIGHTS, e.at(here, LINE * x), I64(4 * BLOCK))
                for y, tokens in enumerate(used):
                    m.multiply(total, tokens, _WEIGHTS)
                    for line in range(ROWS * y // len(used), ROWS * (y + 1) // len(used)):
                        ahead(e, e.at(here, LINE * (ROWS * x + line)))
            return []

        e.loop(builder.sdiv(steps_, I64(ROWS)), [], step)
        for x, total in enumerate(_SUMS):
            m.store(total, e.at(out_, LINE * x), out_stride_)
        return context.get_dummy_value()

    return types.void(terms, *[types.int64] * 7), emit


_SECOND = 5
_HALVES = (6, 7)
"""Registers of tokens 17 to 32, and of half a block of weights. Sums of the first 16 tokens are in the first two."""


@emitted
def shape_twice(typing: Any, terms: Any, tokens: Any) -> Any:
    """Set the registers' shapes for 17 to 32 tokens of one term; emits nothing for another number of terms."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if literal(terms) == 1:
            rest = builder.sub(arguments[1], I64(ROWS))
            Matrices(builder).shape([(count, ROWS) for count in (ROWS, ROWS, rest, rest, ROWS, rest, ROWS, ROWS)])
        return context.get_dummy_value()

    return types.void(terms, types.int64), emit


@emitted
def twice_matrix_block(
    typing: Any, terms: Any, block: Any, x: Any, stride: Any, steps: Any, out: Any, out_stride: Any
) -> Any:
    """`matrix_block` of one term for the tokens of `shape_twice`, with one read of the block.

    Emits nothing for another number of terms.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if literal(terms) != 1:
            return context.get_dummy_value()
        e = Emitter(builder, ROWS)
        m = Matrices(builder)
        block_, x_, stride_, steps_, out_, out_stride_ = arguments[1:]
        later = builder.mul(stride_, I64(ROWS))
        for half in range(2):
            first = e.at(block_, 2 * LINE * half)
            for total in _SUMS:
                m.clear(total)

            def step(index: Any, _: list[Any], first: Any = first) -> list[Any]:
                here = e.at(first, builder.mul(index, I64(4 * BLOCK * ROWS)))
                at = e.at(x_, builder.mul(index, I64(LINE)))
                m.load(_TOKENS[0], at, stride_)
                m.load(_SECOND, e.at(at, later), stride_)
                for place, weights in enumerate(_HALVES):
                    m.load(weights, e.at(here, LINE * place), I64(4 * BLOCK))
                    for row in range(ROWS):
                        ahead(e, e.at(here, LINE * place + 4 * BLOCK * row))
                    m.multiply(place, _TOKENS[0], weights)
                    m.multiply(2 + place, _SECOND, weights)
                return []

            e.loop(builder.sdiv(steps_, I64(ROWS)), [], step)
            to = e.at(out_, 2 * LINE * half)
            for place in range(2):
                m.store(place, e.at(to, LINE * place), out_stride_)
                m.store(2 + place, e.at(e.at(to, LINE * place), builder.mul(out_stride_, I64(ROWS))), out_stride_)
        return context.get_dummy_value()

    return types.void(terms, *[types.int64] * 6), emit


_BYTES = 4
_NUMBERS = 5
"""Registers of the tokens' bytes and of the weights; sums are in the registers of `matrix_block`."""


def columns_together(group: int) -> int:
    """Columns of INT8, INT4 or UINT4 that one instruction multiplies, a divisor of the scale group; 0 for none."""
    return next((columns for columns in (64, 32) if group % columns == 0), 0)


@emitted
def shape_bytes(typing: Any, columns: Any) -> Any:
    """Set the registers' shapes for `columns` columns of 16 tokens and 64 rows; emits nothing for 0 columns."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = literal(columns) // 4
        if words:
            Matrices(builder).shape([(ROWS, ROWS)] * len(_SUMS) + [(ROWS, words), (words, ROWS)])
        return context.get_dummy_value()

    return types.void(columns), emit


@emitted
def unpack(typing: Any, words: Any, steps: Any, target: Any) -> Any:
    """Unpack INT4 or UINT4 words (steps, 64) into INT8 words (2 steps, 64)."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, ROWS)
        words_, steps_, target_ = arguments

        def step(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(words_, builder.mul(index, I64(4 * BLOCK)))
            to = e.at(target_, builder.mul(index, I64(8 * BLOCK)))
            for place in range(0, 4 * BLOCK, LINE):
                ahead(e, e.at(here, place))
                both = e.load(e.at(here, place), e.i32s, LINE)
                for half in range(2):
                    e.store(nibbles(e, both, half), e.at(to, 4 * BLOCK * half + place), LINE)
            return []

        e.loop(steps_, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@emitted
def scaled_matrix_block(
    typing: Any, columns: Any, format: Any,
    numbers: Any, scales: Any, x: Any, stride: Any, left: Any, products: Any, x_scales: Any, offsets: Any,
    scale_stride: Any, tile: Any, sums: Any,
) -> Any:  # fmt: skip
    """sums[t, r] += scale[r] x_scale[t] (offset[t] + row[r] . x[t]) over the columns of one group.

    `numbers` are the group's words, INT4 and UINT4 after `unpack`; in UINT4 an offset is multiplied by the group's zero
    point. There are 16 tokens, of which `left` count; they are `stride` bytes apart, their scales and offsets
    `scale_stride`. `tile` (16, 64) int32 is scratch. Emits nothing for 0 columns.
    """
    words = literal(columns) // 4
    stored = Format(literal(format))
    from_memory = stored is Format.INT8

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not words:
            return context.get_dummy_value()
        e = Emitter(builder, ROWS)
        m = Matrices(builder)
        (
            numbers_, scales_, x_, stride_, left_, products_, x_scales_, offsets_, scale_stride_, tile_, sums_
        ) = arguments[2:]  # fmt: skip
        for total in _SUMS:
            m.clear(total)

        def product(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(numbers_, builder.mul(index, I64(4 * BLOCK * words)))
            m.load(_BYTES, e.at(x_, builder.mul(index, I64(4 * words))), stride_)
            for x, total in enumerate(_SUMS):
                m.load(_NUMBERS, e.at(here, LINE * x), I64(4 * BLOCK))
                m.multiply_bytes(total, _BYTES, _NUMBERS)
                for line in range(words if from_memory else 0):
                    ahead(e, e.at(here, LINE * (words * x + line)))
            return []

        e.loop(products_, [], product)
        for x, total in enumerate(_SUMS):
            m.store(total, e.at(tile_, LINE * x), I64(4 * BLOCK))
        places = range(0, 4 * BLOCK, LINE)
        held = [e.load(e.at(scales_, place), e.i32s, LINE) for place in places]
        own = [scales_without_zeros(e, words) if stored is Format.UINT4 else e.floats(words) for words in held]

        def token(index: Any, _: list[Any]) -> list[Any]:
            behind = builder.mul(index, scale_stride_)
            start = e.spread_i32(e.at(offsets_, behind))
            factor = e.spread_f32(e.at(x_scales_, behind))
            row = builder.mul(index, I64(4 * BLOCK))
            here = e.at(tile_, row)
            to = e.at(sums_, row)
            for place, scale, words in zip(places, own, held, strict=True):
                begin = times_zeros(e, words, start) if stored is Format.UINT4 else start
                total = builder.sitofp(builder.add(e.load(e.at(here, place), e.i32s, LINE), begin), e.f32s)
                e.store_f32(e.fma(total, builder.fmul(scale, factor), e.load_f32(to, place)), to, place)
            return []

        e.loop(left_, [], token)
        return context.get_dummy_value()

    return types.void(columns, format, *[types.int64] * 11), emit


@emitted
def store_rows(typing: Any, columns: Any, sums: Any, count: Any, out: Any, out_stride: Any) -> Any:
    """Store contiguous rows of 64 fp32 to rows `out_stride` bytes apart; emits nothing for 0 columns."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not literal(columns):
            return context.get_dummy_value()
        e = Emitter(builder, ROWS)
        sums_, count_, out_, out_stride_ = arguments[1:]

        def row(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(sums_, builder.mul(index, I64(4 * BLOCK)))
            to = e.at(out_, builder.mul(index, out_stride_))
            for place in range(0, 4 * BLOCK, LINE):
                e.store_f32(e.load_f32(here, place), to, place)
            return []

        e.loop(count_, [], row)
        return context.get_dummy_value()

    return types.void(columns, *[types.int64] * 4), emit
