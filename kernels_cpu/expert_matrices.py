"""The experts' inner loop with matrix registers: a block of 64 rows of packed BF16 times up to 16 tokens.

Packed words already lie as the right operand of a product: row s of it holds columns 2 s and 2 s + 1 of every row of
the block. Tokens are cut into three bf16 each, so that products are exact as in `expert_vectors`; but an infinity gives
NaN, and denormal parts count as zero.
"""

from __future__ import annotations

from typing import Any

from numba import types

from .compiled import emitted, literal
from .expert_vectors import ahead
from .expert_weights import ROWS as BLOCK
from .matrix_ir import PARTS, ROWS, Matrices
from .vector_ir import I64, LINE, Emitter

COLUMNS = 2 * ROWS
"""Columns that are multiplied together, of which rows must have a multiple."""
TOGETHER = ROWS
"""Most tokens that one reading of a block serves."""
_SUMS, _TOKENS, _WEIGHTS = range(4), range(4, 4 + PARTS), 7


@emitted
def shape(typing: Any, parts: Any, tokens: Any) -> Any:
    """Shape the registers for blocks of so many tokens; nothing without `PARTS` parts."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if literal(parts) == PARTS:
            Matrices(builder).shape([(arguments[1], ROWS)] * (len(_SUMS) + PARTS) + [(ROWS, ROWS)])
        return context.get_dummy_value()

    return types.void(parts, types.int64), emit


@emitted
def matrix_block(
    typing: Any, parts: Any, whole: Any, block: Any, x: Any, stride: Any, part: Any, steps: Any, out: Any, apart: Any
) -> Any:
    """out[t, r] = row[r] . x[t] for the tokens of `shape`, whose rows lie `stride` bytes apart and their parts `part`.

    Nothing without `PARTS` parts.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if literal(parts) != PARTS:
            return context.get_dummy_value()
        e, m = Emitter(builder, ROWS), Matrices(builder)
        block_, x_, stride_, part_, steps_, out_, apart_ = arguments[2:]
        used = _TOKENS[: PARTS if literal(whole) else 1]
        for total in _SUMS:
            m.clear(total)

        def step(index: Any, _: list[Any]) -> list[Any]:
            here = e.at(block_, builder.mul(index, I64(4 * BLOCK * ROWS)))
            at = e.at(x_, builder.mul(index, I64(LINE)))
            for tokens in used:
                m.load(tokens, at, stride_)
                at = e.at(at, part_)
            for x, total in enumerate(_SUMS):
                m.load(_WEIGHTS, e.at(here, LINE * x), I64(4 * BLOCK))
                for y, tokens in enumerate(used):
                    m.multiply(total, tokens, _WEIGHTS)
                    for line in range(ROWS * y // len(used), ROWS * (y + 1) // len(used)):
                        ahead(e, e.at(here, LINE * (ROWS * x + line)))
            return []

        e.loop(builder.sdiv(steps_, I64(ROWS)), [], step)
        for x, total in enumerate(_SUMS):
            m.store(total, e.at(out_, LINE * x), apart_)
        return context.get_dummy_value()

    return types.void(parts, whole, *[types.int64] * 7), emit
