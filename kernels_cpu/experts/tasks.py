"""The work of a thread for the experts: five phases, each with a queue from which free threads take tasks.

The phases are: convert activations, gate and up projections (in blocks of 64 rows), activation function, down
projections, weighted sums. A phase begins when all tasks of the previous one are done. A call therefore starts its
threads only once, and a thread that starts late, or not at all, delays no other.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import literally  # type: ignore[attr-defined]

from ..codegen.compiled import compiled
from ..codegen.matrix_ir import TERMS, release
from ..codegen.numerics import aligned_floats
from ..codegen.rounding import widened
from ..codegen.vector_ir import Storage
from ..machine.features import CodePath, has, has_matrices
from ..machine.parameters import parameters
from ..threads.task_counts import next_task, task_done, tasks_done
from .activations import add_bias, fill, fill_clamped, fill_swiglu
from .matrices import (
    COLUMNS,
    TOGETHER,
    columns_together,
    matrix_block,
    scaled_matrix_block,
    shape,
    shape_bytes,
    shape_twice,
    store_rows,
    twice_matrix_block,
    unpack,
)
from .portable import bf16_rows, fp32_rows, scaled_rows
from .rows import TOKENS, row_block
from .vectors import exact_block, rounded_block, scaled_block
from .weights import ROWS, Format, Matrices, PackedExperts

_SETTINGS = parameters().experts
FEW = _SETTINGS.few
SIDE_BY_SIDE = _SETTINGS.streams
_FP32 = int(Format.FP32)
_BF16 = int(Format.BF16)
_INT4 = int(Format.INT4)
_STORED = int(Storage.BF16)  # of rows in place
PHASES = 5
_SUMMED_TOKENS = _SETTINGS.summed_tokens


def _packed_bf16(experts: PackedExperts, path: CodePath) -> bool:
    """True for packed BF16 weights on the path whose CPUs may have products of bf16."""
    return experts.format is Format.BF16 and path is CodePath.AVX512 and not experts.gate_up.in_place


def by_matrices(experts: PackedExperts, path: CodePath) -> bool:
    """True if matrix registers multiply BF16 weights with the activations of experts with many tokens."""
    whole = not any(matrices.width % COLUMNS for matrices in (experts.gate_up, experts.down))
    return _packed_bf16(experts, path) and has_matrices() and whole


def terms_of(experts: PackedExperts, path: CodePath, exact: bool) -> int:
    """Number of bf16 terms per activation for experts with many tokens: 0 for fp32, 1 rounded, 3 for an exact sum.

    Speed of matrix registers with rounded relative to exact activations on a Xeon with AMX, at 16, 32, 64, 128 and 512
    tokens: 1.1, 1.1, 1.3, 1.4, 1.5.
    """
    if by_matrices(experts, path):
        return TERMS if exact else 1
    return 1 if _packed_bf16(experts, path) and _SETTINGS.bf16_products and has("avx512bf16") and not exact else 0


def columns_of(experts: PackedExperts, path: CodePath) -> int:
    """Columns of INT8 or INT4 that one matrix instruction multiplies, for experts with many tokens; 0 without."""
    bytes_ = experts.format in (Format.INT8, Format.INT4)
    if not bytes_ or path is not CodePath.AVX512 or not has_matrices():
        return 0
    return columns_together(math.gcd(experts.gate_up.group, experts.down.group))


def blocks_of(matrices: Matrices, terms: int, most: int) -> int:
    """Blocks per task of matrix registers; several if `most` tokens would not stay in L2 from block to block.

    `terms` are those of their activations, 0 where vectors multiply.
    """
    fits = 2 * terms * matrices.width * most <= _SETTINGS.kept
    return 1 if fits else max(1, _SETTINGS.kept // (2 * ROWS * matrices.width))


@compiled()
def _floats(
    lanes: int, format: int, terms: int, block: int, steps: int, begin: int, end: int, x: Any, out: Any, number: int
) -> None:
    """Multiply a block of FP32 or BF16 words with activations begin .. end - 1."""
    literally(lanes), literally(format), literally(terms)
    stride = 4 * x.exact.shape[1]
    out_stride = 4 * out.shape[1]
    base = x.exact.ctypes.data
    result = out.ctypes.data + 4 * ROWS * number
    if terms == 1 and end - begin > FEW:
        stride = 4 * x.pairs.shape[1]
        base = x.pairs.ctypes.data
        for t in range(begin, end, 6):
            at = base + t * stride
            to = result + t * out_stride
            left = end - t
            if left > 4 and t > begin:
                rounded_block(lanes, format, 6, 1, block, at, stride, left, steps, to, out_stride)
            elif left > 4:
                rounded_block(lanes, format, 6, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
            elif left > 2:
                rounded_block(lanes, format, 4, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
            else:
                rounded_block(lanes, format, 2, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
        return
    for t in range(begin, end, 4):
        at = base + t * stride
        to = result + t * out_stride
        left = end - t
        if left > 2 and t > begin:
            exact_block(lanes, format, 4, 1, block, at, stride, left, steps, to, out_stride)
        elif left > 2:
            exact_block(lanes, format, 4, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
        elif left == 2:
            exact_block(lanes, format, 2, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
        else:
            exact_block(lanes, format, 1, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)


@compiled()
def _matrices(
    terms: int, block: int, steps: int, blocks: int, begin: int, end: int, x: Any, out: Any, number: int
) -> None:  # fmt: skip
    """Multiply `blocks` blocks of BF16 words with activations begin .. end - 1 by matrix registers.

    The blocks are the inner loop, so that the activations stay in a cache.
    """
    literally(terms)
    stride = 4 * x.pairs.shape[1]
    out_stride = 4 * out.shape[1]
    base = x.pairs.ctypes.data
    result = out.ctypes.data + 4 * ROWS * number
    t = begin
    while t < end:
        count = min(2 * TOGETHER if terms == 1 else TOGETHER, end - t)
        if count > TOGETHER:
            shape_twice(terms, count)
        else:
            shape(terms, count)
        for b in range(blocks):
            at = block + 4 * ROWS * steps * b
            to = result + t * out_stride + 4 * ROWS * b
            if count > TOGETHER:
                twice_matrix_block(terms, at, base + t * stride, stride, steps, to, out_stride)
            else:
                matrix_block(terms, at, base + t * stride, stride, 4 * steps, steps, to, out_stride)
        t += count
    release()


@compiled()
def _in_place(lanes: int, block: int, steps: int, begin: int, end: int, x: Any, out: Any, number: int) -> None:
    """Multiply a block of BF16 rows in place with activations begin .. end - 1."""
    literally(lanes)
    stride = 4 * x.exact.shape[1]
    out_stride = 4 * out.shape[1]
    base = x.exact.ctypes.data
    result = out.ctypes.data + 4 * ROWS * number
    for t in range(begin, end, TOKENS):
        at = base + t * stride
        to = result + t * out_stride
        left = end - t
        if left > 2:
            row_block(lanes, _STORED, 4, block, at, stride, left, ROWS, steps, to, out_stride)
        elif left == 2:
            row_block(lanes, _STORED, 2, block, at, stride, left, ROWS, steps, to, out_stride)
        else:
            row_block(lanes, _STORED, 1, block, at, stride, left, ROWS, steps, to, out_stride)


@compiled()
def _scaled(
    lanes: int, format: int, block: int, steps: int, scales: int, groups: int, begin: int, end: int, x: Any, out: Any,
    number: int,
) -> None:  # fmt: skip
    """Multiply a block of INT8, INT4 or MXFP4 words with activations begin .. end - 1.

    The first pass has four tokens. The code for six computes faster, but hardware often fails to prefetch the block for
    it (0.4 of the read rate on Zen 4), so it serves the later passes, when the block is in a cache.
    """
    literally(lanes), literally(format)
    stride = x.numbers.shape[1]
    out_stride = 4 * out.shape[1]
    each = steps // groups
    base = x.numbers.ctypes.data
    result = out.ctypes.data + 4 * ROWS * number
    t = begin
    while t < end:
        at = base + t * stride
        to = result + t * out_stride
        left = end - t
        own = x.scales.ctypes.data + 4 * groups * t
        start = x.offsets.ctypes.data + 4 * groups * t
        if left > 4 and t > begin:
            scaled_block(lanes, format, 6, block, scales, at, stride, left, own, start, groups, each, to, out_stride)
            t += 6
        elif left > 2:
            scaled_block(lanes, format, 4, block, scales, at, stride, left, own, start, groups, each, to, out_stride)
            t += 4
        elif left == 2:
            scaled_block(lanes, format, 2, block, scales, at, stride, left, own, start, groups, each, to, out_stride)
            t += 2
        else:
            scaled_block(lanes, format, 1, block, scales, at, stride, left, own, start, groups, each, to, out_stride)
            t += 1


@compiled()
def _scaled_matrices(
    format: int, columns: int, block: int, steps: int, scales: int, groups: int, begin: int, end: int, x: Any, out: Any,
    number: int,
) -> None:  # fmt: skip
    """Multiply a block of INT8 or INT4 words with activations begin .. end - 1, group by group, by matrix registers."""
    literally(format), literally(columns)
    stride = x.numbers.shape[1]
    scale_stride = 4 * groups
    each = steps // groups
    sums = aligned_floats(_SUMMED_TOKENS * ROWS)
    tile = aligned_floats(TOGETHER * ROWS)
    unpacked = aligned_floats(2 * each * ROWS if format == _INT4 else 0)
    shape_bytes(columns)
    for first in range(begin, end, _SUMMED_TOKENS):
        past = min(first + _SUMMED_TOKENS, end)
        sums[: (past - first) * ROWS] = 0
        for g in range(groups):
            numbers: Any = block + 4 * ROWS * each * g
            if format == _INT4:
                unpack(numbers, each, unpacked.ctypes.data)
                numbers = np.int64(unpacked.ctypes.data)  # Numba would unify int64 and uint64 to float64
            for t in range(first, past, TOGETHER):
                scaled_matrix_block(
                    columns, format, numbers, scales + 4 * ROWS * g,
                    x.numbers.ctypes.data + t * stride + each * format * g, stride, min(TOGETHER, past - t),
                    each * format // columns, x.scales.ctypes.data + t * scale_stride + 4 * g,
                    x.offsets.ctypes.data + t * scale_stride + 4 * g, scale_stride, tile.ctypes.data,
                    sums.ctypes.data + 4 * ROWS * (t - first),
                )  # fmt: skip
        to = out.ctypes.data + 4 * (out.shape[1] * first + ROWS * number)
        store_rows(columns, sums.ctypes.data, past - first, to, 4 * out.shape[1])
    release()


@compiled()
def _portable(format: int, words: Any, scales: Any, begin: int, end: int, x: Any, out: Any, number: int) -> None:
    """Multiply a block of any format with activations begin .. end - 1, on any CPU."""
    sums = np.empty(ROWS, np.int32)
    for t in range(begin, end):
        to = out[t, ROWS * number : ROWS * (number + 1)]
        if format == _FP32:
            fp32_rows(words, x.exact[t], to)
        elif format == _BF16:
            bf16_rows(words, x.exact[t], to)
        else:
            scaled_rows(words, format, scales, x.numbers[t], x.scales[t], x.offsets[t], sums, to)


@compiled()
def _multiply(
    lanes: int, format: int, in_place: bool, terms: int, by_matrices: int, columns: int, words: Any, scales: Any,
    first: Any, expert: int, number: int, past: int, x: Any, out: Any,
) -> None:  # fmt: skip
    """Multiply blocks number .. past - 1 of an expert's matrix with the activations of the tokens that chose it."""
    literally(lanes), literally(format), literally(terms), literally(by_matrices), literally(columns)
    begin = first[expert]
    end = first[expert + 1]
    steps = words.shape[2]
    groups = scales.shape[2]
    size = 4 * ROWS * steps
    block = words.ctypes.data + (expert * words.shape[1] + number) * size
    if by_matrices and end - begin > FEW:
        _matrices(by_matrices, block, steps, past - number, begin, end, x, out, number)
        return
    for b in range(number, past):
        if lanes == 0:
            _portable(format, words[expert, b], scales[expert, b], begin, end, x, out, b)
        elif in_place:
            _in_place(lanes, block, steps // lanes, begin, end, x, out, b)
        elif groups:
            factors = scales.ctypes.data + scales.itemsize * ROWS * groups * (expert * words.shape[1] + b)
            if columns and end - begin > FEW:
                _scaled_matrices(format, columns, block, steps, factors, groups, begin, end, x, out, b)
            else:
                _scaled(lanes, format, block, steps, factors, groups, begin, end, x, out, b)
        else:
            _floats(lanes, format, terms, block, steps, begin, end, x, out, b)
        block += size


@compiled("contract")
def weighted_sum(answers: Any, places: Any, weights: Any, ids: Any, bias: Any, out: Any) -> None:
    """out = sum over j of weights[j] (answers[places[j]] + bias[ids[j]]), in order of j; `bias` may be empty."""
    out[:] = 0
    for j in range(len(weights)):
        answer = answers[places[j]]
        weight = weights[j]
        for m in range(len(out)):
            out[m] += weight * answer[m]
        if len(bias):
            own = bias[ids[j]]
            for m in range(len(out)):
                out[m] += weight * widened(own[m])


@compiled()
def _next(counter: int, phase: int, tasks: int) -> Any:
    """Take the next task of a phase; when none is left, wait until all are done and return -1."""
    index = next_task(counter, phase)
    if index < tasks:
        return index
    while tasks_done(counter, phase) < tasks:
        pass
    return -1


@functools.cache
def server(
    lanes: int, format: int, in_place: bool, by_vectors: int, by_matrices: int, columns: int, clamped: bool
) -> Any:
    """Compile one thread's work for a register width and format; it closes over numbers only, for the disk cache.

    Vectors multiply `by_vectors` bf16 terms of an activation, or matrix registers `by_matrices`; the other is 0.
    `clamped` chooses GPT-OSS' activation function, else it is SwiGLU.
    """

    @compiled()
    def serve(
        counter: int, h: Any, tokens: Any, first: Any, zero: int,
        touched: Any, up_words: Any, up_scales: Any, up_blocks: int, x: Any, both: Any, dim: int,
        down_words: Any, down_scales: Any, down_blocks: int, inner: Any, answers: Any,
        experts: Any, up_bias: Any, every: Any, places: Any, weights: Any, ids: Any, down_bias: Any, out: Any,
    ) -> None:  # fmt: skip
        i = _next(counter, 0, len(tokens))
        while i >= 0:
            fill(h[tokens[i]], i, x, zero)
            task_done(counter, 0)
            i = _next(counter, 0, len(tokens))
        blocks = up_words.shape[1]
        tasks_each = -(-blocks // up_blocks)
        i = _next(counter, 1, len(touched) * tasks_each)
        while i >= 0:
            expert = touched[i // tasks_each]
            number = i % tasks_each * up_blocks
            past = min(blocks, number + up_blocks)
            _multiply(
                lanes, format, in_place, by_vectors, by_matrices, columns, up_words, up_scales, first, expert, number,
                past, x, both,
            )  # fmt: skip
            task_done(counter, 1)
            i = _next(counter, 1, len(touched) * tasks_each)
        i = _next(counter, 2, len(tokens))
        while i >= 0:
            if len(up_bias):
                add_bias(up_bias[experts[i]], both[i])
            if clamped:
                fill_clamped(both, dim, i, inner, zero)
            else:
                fill_swiglu(both, dim, i, inner, zero)
            task_done(counter, 2)
            i = _next(counter, 2, len(tokens))
        blocks = down_words.shape[1]
        tasks_each = -(-blocks // down_blocks)
        i = _next(counter, 3, len(touched) * tasks_each)
        while i >= 0:
            expert = touched[i // tasks_each]
            number = i % tasks_each * down_blocks
            past = min(blocks, number + down_blocks)
            _multiply(
                lanes, format, in_place, by_vectors, by_matrices, columns, down_words, down_scales, first, expert,
                number, past, inner, answers,
            )  # fmt: skip
            task_done(counter, 3)
            i = _next(counter, 3, len(touched) * tasks_each)
        i = _next(counter, 4, len(out))
        while i >= 0:
            weighted_sum(every, places[i], weights[i], ids[i], down_bias, out[i])
            task_done(counter, 4)
            i = _next(counter, 4, len(out))

    return serve
