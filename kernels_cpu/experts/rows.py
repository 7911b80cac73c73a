"""The inner loop on weights in place, with rows one after the other: a few rows times a few tokens."""

from __future__ import annotations

from typing import Any

from numba import types

from ..codegen.compiled import emitted, literal
from ..codegen.vector_ir import I64, Emitter, Load, Storage
from ..machine.features import has
from ..machine.parameters import parameters
from .vectors import SUMS, rows_of

_SETTINGS = parameters().few_rows
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
    there = e.at(place, _SETTINGS.ahead)
    next_row = e.at(there, e.b.mul(row_bytes, I64(several - 1)))
    return e.b.select(e.b.icmp_signed("<", there, row_bytes), there, next_row)


def _behind(e: Emitter, block: Any, first: Any, rows: Any, row_bytes: Any, several: int) -> Any:
    """The begin of the rows behind `several` rows; of these themselves if they are the last."""
    next_one = e.b.add(first, I64(several))
    some_left = e.b.icmp_signed("<", next_one, rows)
    return e.at(block, e.b.mul(e.b.select(some_left, next_one, first), row_bytes))


def _fetch_next(e: Emitter, place: Any, there: Any, several: int) -> None:
    """Prefetch of the rows that begin at `there` as many registers as are read of `several` rows at offset `place`.

    These registers follow each other in memory, so that hardware prefetches what is behind them. They go into L2,
    because L1 holds what is read now.
    """
    begin = e.at(there, e.b.mul(place, I64(several)))
    for line in range(several):
        e.prefetch(e.at(begin, line * 4 * e.lanes), level=2)


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
        loaded = 4 // stored.itemsize  # registers of fp32 from one of a row

        def step(index: Any, sums: list[Any], rows: list[Any], halves: int, behind: Any) -> list[Any]:
            several = len(rows)
            place = builder.mul(index, I64(line))
            if behind is not None:
                _fetch_next(e, place, behind, several)
            weights = []
            for row in rows:
                if _SETTINGS.ahead:
                    e.prefetch(e.at(row, _following(e, place, row_bytes, several)), level=1)
                weights.append(e.widen(Load(0, loaded), e.at(row, place), stored))
            for t in range(count):
                at = e.at(token[t], builder.mul(index, I64(loaded * line)))
                for half in range(loaded):
                    number = e.load_f32(at, half * line)
                    for r in range(several):
                        own = (r * count + t) * halves + half % halves
                        sums[own] = e.fma(weights[r][half], number, sums[own])
            return sums

        def group(number: Any, several: int) -> list[Any]:
            first = builder.mul(number, I64(several))
            rows = [e.at(block_, builder.mul(builder.add(first, I64(r)), row_bytes)) for r in range(several)]
            apart = loaded * several * count <= SUMS[width]
            halves = loaded if apart else 1  # or even and odd columns share their sums
            fetched = _SETTINGS.next_rows and several > 1  # hardware prefetches a single stream
            behind = _behind(e, block_, first, rows_, row_bytes, several) if fetched else None
            start = [e.zero] * (several * count * halves)
            sums = e.loop(steps_, start, lambda index, carried: step(index, list(carried), rows, halves, behind))
            for r in range(several):
                for t in range(count):
                    own = sums[(r * count + t) * halves : (r * count + t + 1) * halves]
                    total = e.across(own[0] if halves == 1 else builder.fadd(*own), builder.fadd)
                    place = builder.mul(builder.add(first, I64(r)), I64(4))
                    e.store(builder.extract_element(total, I64(0)), e.at(result[t], place), 4)
            return []

        def every(several: int) -> None:
            e.loop(builder.sdiv(rows_, I64(several)), [], lambda number, _: group(number, several))

        if count == 1 and _SETTINGS.one_stream:
            token_bytes = builder.mul(steps_, I64(loaded * line))
            with builder.if_else(builder.icmp_signed("<=", token_bytes, I64(_SETTINGS.one_stream))) as (one, more):
                with one:
                    every(1)
                with more:
                    every(_together(width, count))
        else:
            every(_together(width, count))
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
            behind = _behind(e, block_, first, rows_, row_bytes, TOGETHER) if _SETTINGS.next_rows else None

            def step(index: Any, carried: list[Any]) -> list[Any]:
                place = builder.mul(index, I64(line))
                if behind is not None:
                    _fetch_next(e, place, behind, TOGETHER)
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
