"""The inner loops of the experts as intrinsics: a block of 64 rows of weights times a few tokens, in registers.

Lanes are rows of weights, so each number of a token is broadcast to a register, and no sum is taken across lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from ..codegen.compiled import emitted, literal
from ..codegen.vector_ir import I8, I32, I64, Emitter
from ..machine.features import has
from ..machine.parameters import parameters
from .weights import MXFP4_BYTES, ROWS, Format

SUMS = parameters().experts.sums
"""Registers used for running sums, by lanes."""
_AHEAD = parameters().experts.ahead
_CHUNK = 64
"""Steps that every pass takes before any pass goes on: 16 KiB of weights, which stay in L1 meanwhile."""


def _passes(lanes: int, tokens: int) -> list[range]:
    """The registers of a block's rows, by number, divided into passes whose running sums fit in registers."""
    several = 1
    while 2 * several * tokens <= SUMS[lanes] and several * lanes < ROWS:
        several *= 2
    return [range(first, first + several) for first in range(0, ROWS // lanes, several)]


def rows_of(e: Emitter, address: Any, stride: Any, count: int, left: Any) -> list[Any]:
    """Addresses of `count` rows, of which `left` exist; those past the last repeat it."""
    last = e.b.sub(left, I64(1))
    past = [e.b.icmp_signed(">", I64(t), last) for t in range(count)]
    return [e.at(address, e.b.mul(stride, e.b.select(past[t], last, I64(t)))) for t in range(count)]


def ahead(e: Emitter, address: Any) -> None:
    """Prefetch the cache line at the prefetch distance from an address, if there is one."""
    if _AHEAD:
        e.prefetch(e.at(address, _AHEAD), level=1)


def _words(e: Emitter, block: Any, step: Any, registers: Sequence[int]) -> list[Any]:
    """Load the words of one step for the rows of these registers, with their prefetch."""
    at = e.at(block, e.b.mul(step, I64(4 * ROWS)))
    for v in registers:
        ahead(e, e.at(at, 4 * e.lanes * v))
    return [e.load(e.at(at, 4 * e.lanes * v), e.i32s, 4 * e.lanes) for v in registers]


def _widened(e: Emitter, words: Any, stored: Format) -> list[Any]:
    """The elements of FP32 or BF16 words as registers of fp32, in order of columns."""
    if stored is Format.FP32:
        return [e.floats(words)]
    return [e.floats(e.b.shl(words, e.iconst(16))), e.floats(e.b.and_(words, e.iconst(0xFFFF0000)))]


@emitted
def exact_block(
    typing: Any, lanes: Any, format: Any, tokens: Any, streams: Any,
    block: Any, x: Any, stride: Any, left: Any, steps: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[t, r] = row[r] . x[t] in fp32, for a block of FP32 or BF16 words and fp32 tokens.

    Rows of x are `stride` bytes apart, rows of out `out_stride`. Compiled for `tokens` tokens, of which `left` exist.
    Where one pass takes all rows of the block, it is read in `streams` streams side by side.
    """
    width = literal(lanes)
    stored = Format(literal(format))
    count = literal(tokens)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not width or stored.scaled:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        block_, x_, stride_, left_, steps_, out_, out_stride_ = arguments[4:]
        token = rows_of(e, x_, stride_, count, left_)
        result = rows_of(e, out_, out_stride_, count, left_)

        def step(index: Any, sums: list[Any], registers: Sequence[int]) -> list[Any]:
            place = builder.mul(index, I64(4 * stored))
            here = [e.at(address, place) for address in token]
            for v, words in enumerate(_words(e, block_, index, registers)):
                for j, weights in enumerate(_widened(e, words, stored)):
                    for t in range(count):
                        at = (v * count + t) * stored + (j if _separate_sums(width, registers, count, stored) else 0)
                        sums[at] = e.fma(weights, e.spread_f32(here[t], 4 * j), sums[at])
            return sums

        def store(sums: list[Any], registers: Sequence[int]) -> None:
            for v, register in enumerate(registers):
                for t in range(count):
                    own = sums[(v * count + t) * stored : (v * count + t + 1) * stored]
                    total = builder.fadd(own[0], own[1]) if _separate_sums(width, registers, count, stored) else own[0]
                    e.store_f32(total, result[t], 4 * width * register)

        def go_on(registers: Sequence[int], first: Any, many: Any, begun: Any) -> None:
            """Take `many` steps of one pass; if the pass has begun, its sums so far stand in `out`."""
            sums = [e.zero] * (len(registers) * count * stored)
            for v, register in enumerate(registers):
                for t in range(count):
                    before = e.load_f32(result[t], 4 * width * register)
                    sums[(v * count + t) * stored] = builder.select(begun, before, e.zero)

            def next_step(index: Any, carried: list[Any]) -> list[Any]:
                return step(builder.add(first, index), list(carried), registers)

            store(e.loop(many, sums, next_step), registers)

        def chunk(number: Any, _: list[Any]) -> list[Any]:
            """Take the same steps in every pass."""
            first = builder.mul(number, I64(_CHUNK))
            rest = builder.sub(steps_, first)
            many = builder.select(builder.icmp_signed("<", rest, I64(_CHUNK)), rest, I64(_CHUNK))
            for registers in passes:
                go_on(registers, first, many, builder.icmp_signed(">", number, I64(0)))
            return []

        passes = _passes(width, count)
        if len(passes) == 1:
            store(_through(e, steps_, literal(streams), passes[0], len(passes[0]) * count * stored, step), passes[0])
        else:
            e.loop(builder.sdiv(builder.add(steps_, I64(_CHUNK - 1)), I64(_CHUNK)), [], chunk)
        return context.get_dummy_value()

    return types.void(lanes, format, tokens, streams, *[types.int64] * 7), emit


def _separate_sums(lanes: int, registers: Sequence[int], tokens: int, stored: Format) -> bool:
    """True if each element of a word gets a running sum of its own, so that no multiply-add waits for the last."""
    return stored > 1 and len(registers) * tokens * stored <= SUMS[lanes] // 2


def _through(
    e: Emitter,
    steps: Any,
    streams: int,
    registers: Sequence[int],
    sums: int,
    step: Callable[[Any, list[Any], Sequence[int]], list[Any]],
) -> list[Any]:
    """The sums of one pass after all steps, which are read in `streams` sections side by side."""
    each = e.b.sdiv(steps, I64(streams))

    def side_by_side(index: Any, carried: list[Any]) -> list[Any]:
        for stream in range(streams):
            carried = step(e.b.add(index, e.b.mul(each, I64(stream))), list(carried), registers)
        return carried

    return e.loop(each, [e.zero] * sums, side_by_side)


@emitted
def rounded_block(
    typing: Any, lanes: Any, format: Any, tokens: Any, streams: Any,
    block: Any, x: Any, stride: Any, left: Any, steps: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """As `exact_block` for BF16 words and bf16 tokens: products of pairs, summed in fp32, by AVX512_BF16.

    Emits nothing where the CPU lacks it.
    """
    width = literal(lanes)
    stored = Format(literal(format))
    count = literal(tokens)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if width != 16 or stored is not Format.BF16 or not has("avx512bf16"):
            return context.get_dummy_value()
        e = Emitter(builder, width)
        block_, x_, stride_, left_, steps_, out_, out_stride_ = arguments[4:]
        token = rows_of(e, x_, stride_, count, left_)
        result = rows_of(e, out_, out_stride_, count, left_)

        def step(index: Any, sums: list[Any], registers: Sequence[int]) -> list[Any]:
            words = _words(e, block_, index, registers)
            for t in range(count):
                pair = e.spread_i32(e.at(token[t], builder.mul(index, I64(4))))
                for v in range(len(registers)):
                    sums[v * count + t] = e.dot_bf16(sums[v * count + t], words[v], pair)
            return sums

        for registers in _passes(width, count):
            sums = _through(e, steps_, literal(streams), registers, len(registers) * count, step)
            for v, register in enumerate(registers):
                for t in range(count):
                    e.store_f32(sums[v * count + t], result[t], 4 * width * register)
        return context.get_dummy_value()

    return types.void(lanes, format, tokens, streams, *[types.int64] * 7), emit


@emitted
def scaled_block(
    typing: Any, lanes: Any, format: Any, tokens: Any,
    block: Any, scales: Any, x: Any, stride: Any, left: Any, x_scales: Any, offsets: Any, groups: Any, steps: Any,
    out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[t, r] = sum over groups of scale[r] x_scale[t] (offset[t] + row[r] . x[t]), with dot products of integers.

    For a block of INT8, INT4 or MXFP4 words and tokens of signed bytes, with `steps` words per row and scale group.
    `x_scales` and `offsets` (T, groups) are contiguous. Four bytes are multiplied at once where the CPU has
    AVX512_VNNI.
    """
    width = literal(lanes)
    stored = Format(literal(format))
    count = literal(tokens)
    fours = stored.per_word // 4  # words of a token per word of weights
    vnni = width == 16 and has("avx512vnni")

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not width or not stored.scaled:
            return context.get_dummy_value()
        e = Emitter(builder, width)
        block_, scales_, x_, stride_, left_, x_scales_, offsets_, groups_, steps_, out_, out_stride_ = arguments[3:]
        token = rows_of(e, x_, stride_, count, left_)
        result = rows_of(e, out_, out_stride_, count, left_)
        factors = rows_of(e, x_scales_, builder.mul(groups_, I64(4)), count, left_)
        starts = rows_of(e, offsets_, builder.mul(groups_, I64(4)), count, left_)

        def step(index: Any, sums: list[Any], registers: Sequence[int]) -> list[Any]:
            place = builder.mul(index, I64(4 * fours))
            for v, words in enumerate(_words(e, block_, index, registers)):
                for half in range(fours):
                    bytes_ = nibbles(e, words, half) if fours == 2 else words
                    if stored is Format.MXFP4:
                        bytes_ = e.looked_up(MXFP4_BYTES, bytes_)
                    for t in range(count):
                        here = e.at(e.at(token[t], place), 4 * half)
                        at = v * count + t
                        sums[at] = _dot(e, sums[at], bytes_, here, stored, vnni)
            return sums

        def group(number: Any, registers: Sequence[int]) -> None:
            first = builder.mul(number, steps_)
            place = builder.mul(number, I64(4))
            begin = [e.spread_i32(e.at(start, place)) for _ in registers for start in starts]
            sums = e.loop(steps_, begin, lambda index, own: step(builder.add(first, index), list(own), registers))
            begun = builder.icmp_signed(">", number, I64(0))
            totals = []
            for v, register in enumerate(registers):
                own = _scales(e, scales_, number, register, stored)
                for t in range(count):
                    scale = builder.fmul(own, e.spread_f32(e.at(factors[t], place)))
                    before = builder.select(begun, e.load_f32(result[t], 4 * width * register), e.zero)
                    totals.append(e.fma(builder.sitofp(sums[v * count + t], e.f32s), scale, before))
            for v, register in enumerate(registers):  # after all loads, since rows past the last share its memory
                for t in range(count):
                    e.store_f32(totals[v * count + t], result[t], 4 * width * register)

        def every_pass(number: Any, _: list[Any]) -> list[Any]:
            for registers in _passes(width, count):
                group(number, registers)
            return []

        e.loop(groups_, [], every_pass)
        return context.get_dummy_value()

    return types.void(lanes, format, tokens, *[types.int64] * 11), emit


def _scales(e: Emitter, scales: Any, group: Any, register: int, stored: Format) -> Any:
    """A group's scales of a register's rows, as fp32."""
    if stored is not Format.MXFP4:
        return e.load_f32(e.at(scales, e.b.mul(group, I64(4 * ROWS))), 4 * e.lanes * register)
    here = e.at(e.at(scales, e.b.mul(group, I64(ROWS))), e.lanes * register)
    exponents = e.b.zext(e.load(here, ir.VectorType(I8, e.lanes), e.lanes), e.i32s)
    return e.floats(e.b.shl(exponents, e.iconst(23)))


def nibbles(e: Emitter, words: Any, half: int) -> Any:
    """The low (half 0) or high (half 1) four bits of each byte."""
    return e.b.and_(e.b.lshr(words, e.iconst(4)) if half else words, e.iconst(0x0F0F0F0F))


def _dot(e: Emitter, total: Any, words: Any, x: Any, stored: Format, vnni: bool) -> Any:
    """total + the dot product of the four unsigned bytes of each word and four signed bytes at `x`."""
    if vnni:
        return e.dot_bytes(total, words, e.spread_i32(x))
    if e.lanes == 8:
        return e.b.add(total, _dot_avx2(e, words, e.spread_i32(x), stored))
    for j in range(4):
        number = e.b.sext(e.load(e.at(x, j), I8, 1), I32)
        weight = e.b.and_(e.b.lshr(words, e.iconst(8 * j)) if j else words, e.iconst(0xFF))
        total = e.b.add(total, e.b.mul(weight, e.spread(number)))
    return total


def _dot_avx2(e: Emitter, words: Any, x: Any, stored: Format) -> Any:
    """Dot products of four unsigned and four signed bytes per word.

    INT4, MXFP4: two products of a small number and a byte add up within 16 bits. INT8: even and odd bytes are widened
    to 16 bits.
    """
    if stored.per_word == 8:
        return e.dot_pairs(e.dot_small_bytes(words, x), e.iconst(0x00010001))
    even = e.dot_pairs(e.b.and_(words, e.iconst(0x00FF00FF)), e.shifted_pairs(e.shifted_pairs(x, 8), -8))
    odd = e.dot_pairs(e.b.and_(e.b.lshr(words, e.iconst(8)), e.iconst(0x00FF00FF)), e.shifted_pairs(x, -8))
    return e.b.add(even, odd)
