"""The inner loops of the experts as intrinsics: a block of 64 rows of weights times a few tokens, in registers.

Lanes are rows of weights, so each number of a token is broadcast to a register, and no sum is taken across lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from ..codegen.compiled import emitted, literal
from ..codegen.vector_ir import I8, I32, I64, LINE, Emitter
from ..machine.features import has
from ..machine.parameters import parameters
from .weights import MXFP4_BYTES, ROWS, ZERO_BITS, Format

SUMS = parameters().experts.sums
"""Registers used for running sums, by lanes."""
_AHEAD = parameters().experts.ahead
_SHORT_STEPS = {Format.INT4: 4, Format.UINT4: 4, Format.MXFP4: 2}
"""Words per row whose products with bytes add up within 16 bits: 16 of at most 15 x 127, and 8 of at most 24 x 127."""
_SCALES_AHEAD = parameters().experts.scales_ahead
_CHUNK = 32
"""Steps that every pass takes before any pass goes on: 8 KiB of weights, which stay in L1 meanwhile."""


class _Pass(NamedTuple):
    """The rows of a block that one pass over its columns takes, in as many registers as their running sums fit in.

    Attributes
    ----------
    registers : int
    place : value of LLVM
        Offset of its first row in the words of a step, and in the fp32 results and scales of a block [byte].
    """

    registers: int
    place: Any


def _registers(lanes: int, tokens: int) -> int:
    """Registers of rows per pass."""
    several = 1
    while 2 * several * tokens <= SUMS[lanes] and several * lanes < ROWS:
        several *= 2
    return several


def _each_pass(e: Emitter, tokens: int, take: Callable[[_Pass], None]) -> None:
    """Take all rows of a block, pass after pass."""
    several = _registers(e.lanes, tokens)
    passes = ROWS // (e.lanes * several)

    def one(number: Any, _: list[Any]) -> list[Any]:
        take(_Pass(several, e.b.mul(number, I64(4 * e.lanes * several))))
        return []

    if passes == 1:
        take(_Pass(several, I64(0)))
    else:
        e.loop(I64(passes), [], one)


def rows_of(e: Emitter, address: Any, stride: Any, count: int, left: Any) -> list[Any]:
    """Addresses of `count` rows, of which `left` exist; those past the last repeat it."""
    last = e.b.sub(left, I64(1))
    past = [e.b.icmp_signed(">", I64(t), last) for t in range(count)]
    return [e.at(address, e.b.mul(stride, e.b.select(past[t], last, I64(t)))) for t in range(count)]


def ahead(e: Emitter, address: Any) -> None:
    """Prefetch the cache line at the prefetch distance from an address, if there is one."""
    if _AHEAD:
        e.prefetch(e.at(address, _AHEAD), level=1)


class _Prefetch(NamedTuple):
    """The bytes that a pass prefetches: those from `base` + s `stride` on at step s, counted from the block's begin."""

    base: Any
    stride: Any


def _prefetch(e: Emitter, block: Any, first: Any, steps: Any, rows: _Pass) -> _Prefetch:
    """The prefetch of a pass that takes `steps` steps from step `first` on.

    A pass over all rows prefetches its own bytes, at the prefetch distance. One over some of them prefetches a share of
    the `steps` steps that follow, at that distance from them, so that all passes together prefetch in the order of
    memory: hardware prefetches only then. Where these steps would not stay in L1, it prefetches its own bytes too.
    """
    own = _Prefetch(e.at(e.at(block, rows.place), _AHEAD), I64(4 * ROWS))
    bytes_ = 4 * e.lanes * rows.registers
    if bytes_ == 4 * ROWS:
        return own
    following = e.at(block, e.b.mul(e.b.add(first, steps), I64(4 * ROWS)))
    begin = e.at(e.at(following, e.b.mul(steps, rows.place)), _AHEAD)
    share = _Prefetch(e.b.sub(begin, e.b.mul(first, I64(bytes_))), I64(bytes_))
    fits = e.b.icmp_signed("<=", steps, I64(_CHUNK))
    return _Prefetch(*(e.b.select(fits, one, other) for one, other in zip(share, own, strict=True)))


def _words(e: Emitter, block: Any, step: Any, rows: _Pass, prefetch: _Prefetch) -> list[Any]:
    """Load the words of one step of a pass, with its prefetch."""
    at = e.at(e.at(block, e.b.mul(step, I64(4 * ROWS))), rows.place)
    there = e.at(prefetch.base, e.b.mul(step, prefetch.stride))
    words = []
    for v in range(rows.registers):
        if _AHEAD and 4 * e.lanes * v % LINE == 0:
            e.prefetch(e.at(there, 4 * e.lanes * v), level=1)
        words.append(e.load(e.at(at, 4 * e.lanes * v), e.i32s, 4 * e.lanes))
        if e.lanes == 8:  # LLVM reorders half lines, and then hardware prefetches less: 0.58 to 0.76 of reading (Zen 2)
            e.keep_order()
    return words


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

        def step(index: Any, sums: list[Any], rows: _Pass, prefetch: _Prefetch) -> list[Any]:
            place = builder.mul(index, I64(4 * stored))
            here = [e.at(address, place) for address in token]
            widened = [_widened(e, words, stored) for words in _words(e, block_, index, rows, prefetch)]
            for j in range(stored):
                for t in range(count):
                    number = e.spread_f32(here[t], 4 * j)
                    for v in range(rows.registers):
                        at = (v * count + t) * stored + (j if separate else 0)
                        sums[at] = e.fma(widened[v][j], number, sums[at])
            return sums

        def store(sums: list[Any], rows: _Pass) -> None:
            for v in range(rows.registers):
                for t in range(count):
                    own = sums[(v * count + t) * stored : (v * count + t + 1) * stored]
                    total = builder.fadd(own[0], own[1]) if separate else own[0]
                    e.store_f32(total, e.at(result[t], rows.place), 4 * width * v)

        def go_on(rows: _Pass, first: Any, many: Any, begun: Any) -> None:
            """Take `many` steps of one pass; if the pass has begun, its sums so far stand in `out`."""
            sums = [e.zero] * (rows.registers * count * stored)
            for v in range(rows.registers):
                for t in range(count):
                    before = e.load_f32(e.at(result[t], rows.place), 4 * width * v)
                    sums[(v * count + t) * stored] = builder.select(begun, before, e.zero)

            prefetch = _prefetch(e, block_, first, many, rows)

            def next_step(index: Any, carried: list[Any]) -> list[Any]:
                return step(builder.add(first, index), list(carried), rows, prefetch)

            store(e.loop(many, sums, next_step), rows)

        def chunk(number: Any, _: list[Any]) -> list[Any]:
            """Take the same steps in every pass."""
            first = builder.mul(number, I64(_CHUNK))
            rest = builder.sub(steps_, first)
            many = builder.select(builder.icmp_signed("<", rest, I64(_CHUNK)), rest, I64(_CHUNK))
            _each_pass(e, count, lambda rows: go_on(rows, first, many, builder.icmp_signed(">", number, I64(0))))
            return []

        several = _registers(width, count)
        separate = stored > 1 and several * count * stored <= SUMS[width] // 2  # no multiply-add waits for the last
        if several * width == ROWS:
            every = _Pass(several, I64(0))
            prefetch = _prefetch(e, block_, I64(0), steps_, every)
            sums = [e.zero] * (several * count * stored)
            store(_through(e, steps_, literal(streams), sums, lambda i, own: step(i, own, every, prefetch)), every)
        else:
            e.loop(builder.sdiv(builder.add(steps_, I64(_CHUNK - 1)), I64(_CHUNK)), [], chunk)
        return context.get_dummy_value()

    return types.void(lanes, format, tokens, streams, *[types.int64] * 7), emit


def _through(
    e: Emitter, steps: Any, streams: int, sums: list[Any], step: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """The sums of one pass after all steps, which are read in `streams` sections side by side."""
    each = e.b.sdiv(steps, I64(streams))

    def side_by_side(index: Any, carried: list[Any]) -> list[Any]:
        for stream in range(streams):
            carried = step(e.b.add(index, e.b.mul(each, I64(stream))), list(carried))
        return carried

    return e.loop(each, sums, side_by_side)


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

        def step(index: Any, sums: list[Any], rows: _Pass, prefetch: _Prefetch) -> list[Any]:
            words = _words(e, block_, index, rows, prefetch)
            for t in range(count):
                pair = e.spread_i32(e.at(token[t], builder.mul(index, I64(4))))
                for v in range(rows.registers):
                    sums[v * count + t] = e.dot_bf16(sums[v * count + t], words[v], pair)
            return sums

        def take(rows: _Pass) -> None:
            prefetch = _prefetch(e, block_, I64(0), steps_, rows)
            none = [e.zero] * (rows.registers * count)
            sums = _through(e, steps_, literal(streams), none, lambda i, own: step(i, own, rows, prefetch))
            for v in range(rows.registers):
                for t in range(count):
                    e.store_f32(sums[v * count + t], e.at(result[t], rows.place), 4 * width * v)

        _each_pass(e, count, take)
        return context.get_dummy_value()

    return types.void(lanes, format, tokens, streams, *[types.int64] * 7), emit


@emitted
def scaled_block(
    typing: Any, lanes: Any, format: Any, tokens: Any,
    block: Any, scales: Any, x: Any, stride: Any, left: Any, x_scales: Any, offsets: Any, groups: Any, steps: Any,
    out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[t, r] = sum over groups of scale[r] x_scale[t] (offset[t] + row[r] . x[t]), with dot products of integers.

    For a block of INT8, INT4, UINT4 or MXFP4 words and tokens of signed bytes, with `steps` words per row and scale
    group. `x_scales` and `offsets` (T, groups) are contiguous; in UINT4 an offset is multiplied by the group's zero
    point, and INT8 needs none with AVX2. Four bytes are multiplied at once where the CPU has AVX512_VNNI.
    """
    width = literal(lanes)
    stored = Format(literal(format))
    count = literal(tokens)
    fours = stored.per_word // 4  # words of a token per word of weights
    scale_bytes = ROWS * stored.scale_type().itemsize
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

        def step(index: Any, sums: list[Any], rows: _Pass, prefetch: _Prefetch) -> list[Any]:
            place = builder.mul(index, I64(4 * fours))
            for v, words in enumerate(_words(e, block_, index, rows, prefetch)):
                for half, bytes_ in enumerate(_bytes(e, words, stored)):
                    for t in range(count):
                        here = e.at(e.at(token[t], place), 4 * half)
                        at = v * count + t
                        sums[at] = _dot(e, sums[at], bytes_, here, vnni)
            return sums

        def short_steps(index: Any, sums: list[Any], rows: _Pass, prefetch: _Prefetch, many: int) -> list[Any]:
            """Take `many` steps of four bits, whose products add up within 16 bits."""
            pairs: list[Any] = [None] * len(sums)
            for s in range(many):
                here = builder.add(index, I64(s))
                place = builder.mul(here, I64(4 * fours))
                for v, words in enumerate(_words(e, block_, here, rows, prefetch)):
                    for half, bytes_ in enumerate(_bytes(e, words, stored)):
                        for t in range(count):
                            number = e.spread_i32(e.at(e.at(token[t], place), 4 * half))
                            product = e.dot_small_bytes(bytes_, number)
                            at = v * count + t
                            pairs[at] = product if pairs[at] is None else builder.add(pairs[at], product)
            ones = e.iconst(0x00010001)
            return [builder.add(total, e.dot_pairs(both, ones)) for total, both in zip(sums, pairs, strict=True)]

        def steps_of(first: Any, sums: list[Any], rows: _Pass) -> list[Any]:
            """Take all steps of a group."""
            prefetch = _prefetch(e, block_, first, steps_, rows)
            if width != 8 or stored.per_word != 8:
                return e.loop(steps_, sums, lambda i, own: step(builder.add(first, i), list(own), rows, prefetch))
            many = _SHORT_STEPS[stored]
            whole = builder.sdiv(steps_, I64(many))
            done = builder.mul(whole, I64(many))

            def next_steps(number: Any, own: list[Any]) -> list[Any]:
                begin = builder.add(first, builder.mul(number, I64(many)))
                return short_steps(begin, list(own), rows, prefetch, many)

            def last_step(number: Any, own: list[Any]) -> list[Any]:
                return short_steps(builder.add(builder.add(first, done), number), list(own), rows, prefetch, 1)

            sums = e.loop(whole, sums, next_steps, may_be_empty=True)
            return e.loop(builder.sub(steps_, done), sums, last_step, may_be_empty=True)

        def group(number: Any, rows: _Pass) -> None:
            first = builder.mul(number, steps_)
            place = builder.mul(number, I64(4))
            own_scales = e.at(scales_, builder.mul(number, I64(scale_bytes)))
            begin = [
                _offset(e, own_scales, rows.place, v, e.spread_i32(e.at(start, place)), stored)
                for v in range(rows.registers)
                for start in starts
            ]
            sums = steps_of(first, begin, rows)
            begun = builder.icmp_signed(">", number, I64(0))
            totals = []
            for v in range(rows.registers):
                own = _scales(e, own_scales, rows.place, v, stored)
                for t in range(count):
                    scale = builder.fmul(own, e.spread_f32(e.at(factors[t], place)))
                    before = e.load_f32(e.at(result[t], rows.place), 4 * width * v)
                    before = builder.select(begun, before, e.zero)
                    totals.append(e.fma(builder.sitofp(sums[v * count + t], e.f32s), scale, before))
            for v in range(rows.registers):  # after all loads, since rows past the last share its memory
                for t in range(count):
                    e.store_f32(totals[v * count + t], e.at(result[t], rows.place), 4 * width * v)

        def whole_group(number: Any, _: list[Any]) -> list[Any]:
            here = e.at(scales_, builder.mul(number, I64(scale_bytes)))
            for line in range(0, scale_bytes if _SCALES_AHEAD else 0, LINE):
                e.prefetch(e.at(here, _SCALES_AHEAD + line), level=1)
            _each_pass(e, count, lambda rows: group(number, rows))
            return []

        e.loop(groups_, [], whole_group)
        return context.get_dummy_value()

    return types.void(lanes, format, tokens, *[types.int64] * 11), emit


def _scales(e: Emitter, scales: Any, place: Any, register: int, stored: Format) -> Any:
    """The scales of a register of a pass as fp32, of those of a group; `place` is that of the pass."""
    if stored is Format.UINT4:
        return scales_without_zeros(e, _scale_words(e, scales, place, register))
    if stored is not Format.MXFP4:
        return e.load_f32(e.at(scales, place), 4 * e.lanes * register)
    here = e.at(e.at(scales, e.b.udiv(place, I64(4))), e.lanes * register)
    exponents = e.b.zext(e.load(here, ir.VectorType(I8, e.lanes), e.lanes), e.i32s)
    return e.floats(e.b.shl(exponents, e.iconst(23)))


def _scale_words(e: Emitter, scales: Any, place: Any, register: int) -> Any:
    """The words of UINT4 that hold the scales and the zero points of a register of a pass."""
    return e.load(e.at(e.at(scales, place), 4 * e.lanes * register), e.i32s, 4 * e.lanes)


def scales_without_zeros(e: Emitter, words: Any) -> Any:
    """The scales in words of UINT4 as fp32."""
    return e.floats(e.b.and_(words, e.iconst(0xFFFFFFFF & ~ZERO_BITS)))


def times_zeros(e: Emitter, words: Any, offset: Any) -> Any:
    """The zero points in words of scales of UINT4, times a token's offset."""
    return e.b.mul(e.b.and_(words, e.iconst(ZERO_BITS)), offset)


def _offset(e: Emitter, scales: Any, place: Any, register: int, offset: Any, stored: Format) -> Any:
    """The number at which the sums of a register of a pass begin, of a token's offset."""
    if stored is Format.INT8 and e.lanes == 8:  # see `_dot_avx2`
        return e.iconst(0)
    if stored is not Format.UINT4:
        return offset
    return times_zeros(e, _scale_words(e, scales, place, register), offset)


def nibbles(e: Emitter, words: Any, half: int) -> Any:
    """The low (half 0) or high (half 1) four bits of each byte."""
    return e.b.and_(e.b.lshr(words, e.iconst(4)) if half else words, e.iconst(0x0F0F0F0F))


def _bytes(e: Emitter, words: Any, stored: Format) -> list[Any]:
    """The unsigned bytes of INT8, INT4, UINT4 or MXFP4 words, four columns per word of a register."""
    if stored is Format.INT8:
        return [words]
    codes = [nibbles(e, words, half) for half in (0, 1)]
    return [e.looked_up(MXFP4_BYTES, each) for each in codes] if stored is Format.MXFP4 else codes


def _dot(e: Emitter, total: Any, words: Any, x: Any, vnni: bool) -> Any:
    """total + the dot product of the four unsigned bytes of each word and four signed bytes at `x`.

    With AVX2 the words are codes of INT8, and total + that of the weights is returned (`_dot_avx2`).
    """
    if vnni:
        return e.dot_bytes(total, words, e.spread_i32(x))
    if e.lanes == 8:
        return e.b.add(total, _dot_avx2(e, words, e.spread_i32(x)))
    for j in range(4):
        number = e.b.sext(e.load(e.at(x, j), I8, 1), I32)
        weight = e.b.and_(e.b.lshr(words, e.iconst(8 * j)) if j else words, e.iconst(0xFF))
        total = e.b.add(total, e.b.mul(weight, e.spread(number)))
    return total


def _dot_avx2(e: Emitter, words: Any, x: Any) -> Any:
    """Dot products of four weights and four numbers per word, of the codes of INT8: 128 more than the weights.

    Magnitudes of weights times numbers with the weights' signs: two of at most 128 x 127 add up within 16 bits.
    """
    weights = e.b.xor(words, e.iconst(0x80808080 - 2**32))
    pairs = e.dot_small_bytes(e.magnitudes(weights), e.with_signs(x, weights))
    return e.dot_pairs(pairs, e.iconst(0x00010001))
