"""The inner loop on weights in place, with rows one after the other: a few rows times a few tokens."""

from __future__ import annotations

from typing import Any

from numba import types

from ..codegen.compiled import emitted, literal
from ..codegen.vector_ir import I64, Emitter, Load, Storage
from ..machine.features import has
from ..machine.parameters import parameters
from .vectors import SUMS, rows_of

_AHEAD = parameters().few_rows.ahead
TOKENS = 4
"""Most tokens that are computed with one read of a row."""
TOGETHER = 4
"""Number of rows is a multiple of this."""


def _together(lanes: int, tokens: int) -> int:
    """Rows that are read side by side: several streams are faster than one, and rows share the tokens' loads."""
    return 4 if 4 * tokens <= SUMS[lanes] else 2


def _following(e: Emitter, place: Any, row_bytes: Any, several: int) -> Any:
    """The offset from a row's begin that is prefetched while the row is read at offset `place` [byte].

    It is the prefetch distance away; past the row's end it lies in the row that is read next, `several` rows further.
    """
    there = e.at(place, _AHEAD)
    next_row = e.at(there, e.b.mul(row_bytes, I64(several - 1)))
    return e.b.select(e.b.icmp_signed("<", there, row_bytes), there, next_row)


@emitted
def row_block(
    typing: Any, lanes: Any, storage: Any, tokens: Any,
    block: Any, x: Any, stride: Any, left: Any, rows: Any, steps: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[t, r] = row[r] . x[t] in fp32 over `rows` rows of fp32 or bf16, `steps` registers each.

    Tokens are fp32, for bf16 with even and odd columns separated (`Activations.split`); rows of x are `stride` bytes
    apart, rows of out `out_stride`. Compiled for `tokens` tokens, of which `left` exist.
    """
    width = literal(lanes)
    stored = Storage(literal(storage))
    count = literal(tokens)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not width:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        line = 4 * width
        block_, x_, stride_, left_, rows_, steps_, out_, out_stride_ = arguments[3:]
        token = rows_of(e, x_, stride_, count, left_)
        result = rows_of(e, out_, out_stride_, count, left_)
        row_bytes = builder.mul(steps_, I64(line))
        several = _together(width, count)
        loaded = 4 // stored.itemsize  # registers of fp32 from one of a row
        halves = loaded if loaded * several * count <= SUMS[width] else 1  # or even and odd columns share their sums

        def step(index: Any, sums: list[Any], rows: list[Any]) -> list[Any]:
            place = builder.mul(index, I64(line))
            there = _following(e, place, row_bytes, several)
            weights = []
            for row in rows:
                if _AHEAD:
                    e.prefetch(e.at(row, there), level=1)
                weights.append(e.widen(Load(0, loaded), e.at(row, place), stored))
            for t in range(count):
                at = e.at(token[t], builder.mul(index, I64(loaded * line)))
                for half in range(loaded):
                    number = e.load_f32(at, half * line)
                    for r in range(several):
                        own = (r * count + t) * halves + half % halves
                        sums[own] = e.fma(weights[r][half], number, sums[own])
            return sums

        def group(number: Any, _: list[Any]) -> list[Any]:
            first = builder.mul(number, I64(several))
            rows = [e.at(block_, builder.mul(builder.add(first, I64(r)), row_bytes)) for r in range(several)]
            start = [e.zero] * (several * count * halves)
            sums = e.loop(steps_, start, lambda index, carried: step(index, list(carried), rows))
            for r in range(several):
                for t in range(count):
                    own = sums[(r * count + t) * halves : (r * count + t + 1) * halves]
                    total = e.across(own[0] if halves == 1 else builder.fadd(*own), builder.fadd)
                    place = builder.mul(builder.add(first, I64(r)), I64(4))
                    e.store(builder.extract_element(total, I64(0)), e.at(result[t], place), 4)
            return []

        e.loop(builder.sdiv(rows_, I64(several)), [], group)
        return context.get_dummy_value()

    return types.void(lanes, storage, tokens, *[types.int64] * 8), emit


@emitted
def pair_block(
    typing: Any, lanes: Any, tokens: Any,
    block: Any, x: Any, stride: Any, left: Any, rows: Any, steps: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """As `row_block` for rows and tokens of bf16: products of pairs, which are exact, summed in fp32 by AVX512_BF16.

    Tokens are bf16 in order of columns; rows of x are `stride` bytes apart. Subnormal numbers count as 0. Emits nothing
    where the CPU lacks it.
    """
    width = literal(lanes)
    count = literal(tokens)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if width != 16 or not has("avx512bf16"):
            return context.get_dummy_value()
        e = Emitter(builder, width)
        line = 4 * width
        block_, x_, stride_, left_, rows_, steps_, out_, out_stride_ = arguments[2:]
        token = rows_of(e, x_, stride_, count, left_)
        result = rows_of(e, out_, out_stride_, count, left_)
        row_bytes = builder.mul(steps_, I64(line))

        def group(number: Any, _: list[Any]) -> list[Any]:
            first = builder.mul(number, I64(TOGETHER))
            rows = [e.at(block_, builder.mul(builder.add(first, I64(r)), row_bytes)) for r in range(TOGETHER)]

            def step(index: Any, carried: list[Any]) -> list[Any]:
                place = builder.mul(index, I64(line))
                weights = [e.load(e.at(row, place), e.i32s, Storage.BF16.itemsize) for row in rows]
                sums = list(carried)
                for t in range(count):
                    numbers = e.load(e.at(token[t], place), e.i32s, Storage.BF16.itemsize)
                    for r in range(TOGETHER):
                        sums[t * TOGETHER + r] = e.dot_bf16(sums[t * TOGETHER + r], weights[r], numbers)
                return sums

            sums = e.loop(steps_, [e.zero] * (TOGETHER * count), step)
            sums += [e.zero] * (-len(sums) % width)
            quarters = width // TOGETHER
            for begin in range(0, count, quarters):
                found = e.sums(sums[begin * TOGETHER : begin * TOGETHER + width])
                for t in range(begin, min(count, begin + quarters)):
                    place = (t - begin) * TOGETHER
                    own = e.shuffle(found, found, range(place, place + TOGETHER))
                    e.store(own, e.at(result[t], builder.mul(first, I64(4))), 4)
            return []

        e.loop(builder.sdiv(rows_, I64(TOGETHER)), [], group)
        return context.get_dummy_value()

    return types.void(lanes, tokens, *[types.int64] * 8), emit
