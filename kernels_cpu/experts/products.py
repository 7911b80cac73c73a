"""Products of blocks of an expert's weights with the activations of the tokens that chose it.

Each function takes blocks number .. past - 1 of a matrix and activations begin .. end - 1. They are chosen before they
are compiled, so that no other is compiled with them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..codegen.compiled import compiled
from ..codegen.matrix_ir import release
from ..codegen.numerics import aligned_floats
from ..codegen.vector_ir import Storage
from ..machine.parameters import parameters
from .matrices import (
    TOGETHER,
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
from .weights import ROWS, Format

_SETTINGS = parameters().experts
FEW = _SETTINGS.few
SIDE_BY_SIDE = _SETTINGS.streams
_SUMMED_TOKENS = _SETTINGS.summed_tokens
_STORED = int(Storage.BF16)  # of rows in place


@functools.cache
def multiplier(lanes: int, format: int, in_place: bool, rounded: bool, by_matrices: int, columns: int) -> Any:
    """The product for a register width and format.

    More than `FEW` activations are multiplied otherwise if they are `rounded` to bf16 for vectors, or by matrix
    registers: in `by_matrices` bf16 terms each, or in bytes, `columns` of them per instruction. At most one of the
    three holds.
    """
    few = _by_vectors(lanes, format, in_place)
    if rounded:
        many = _rounded(lanes, format)
    elif by_matrices:
        many = _matrices(by_matrices)
    elif columns:
        many = _scaled_matrices(format, columns)
    else:
        return few

    @compiled()
    def multiply(
        words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
    ) -> None:  # fmt: skip
        if end - begin > FEW:
            many(words, scales, expert, number, past, begin, end, x, out)
        else:
            few(words, scales, expert, number, past, begin, end, x, out)

    return multiply


def _by_vectors(lanes: int, format: int, in_place: bool) -> Any:
    """The product for any number of activations."""
    if not lanes:
        return _portable(format)
    if in_place:
        return _rows(lanes)
    return _scaled(lanes, format) if Format(format).scaled else _exact(lanes, format)


@compiled()
def _block_address(words: Any, expert: int, number: int) -> Any:
    """The address of a block."""
    return words.ctypes.data + 4 * ROWS * words.shape[2] * (expert * words.shape[1] + number)


@compiled()
def _scales_address(scales: Any, expert: int, number: int) -> Any:
    """The address of a block's scales."""
    return scales.ctypes.data + scales.itemsize * ROWS * scales.shape[2] * (expert * scales.shape[1] + number)


@functools.cache
def _exact(lanes: int, format: int) -> Any:
    """FP32 or BF16 words and activations in fp32; four at first, maybe more once a block is in a cache."""
    later = _SETTINGS.later_tokens[lanes]
    more = later > 4  # known when this is compiled: else the code for four tokens would be made twice

    @compiled()
    def multiply_exact(
        words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
    ) -> None:  # fmt: skip
        steps = words.shape[2]
        stride = 4 * x.exact.shape[1]
        out_stride = 4 * out.shape[1]
        for b in range(number, past):
            block = _block_address(words, expert, b)
            t = begin
            while t < end:
                at = x.exact.ctypes.data + t * stride
                to = out.ctypes.data + 4 * ROWS * b + t * out_stride
                left = end - t
                taken = 4
                if more and left >= later and t > begin:
                    exact_block(lanes, format, later, 1, block, at, stride, left, steps, to, out_stride)
                    taken = later
                elif left > 2 and t > begin:
                    exact_block(lanes, format, 4, 1, block, at, stride, left, steps, to, out_stride)
                elif left > 2:
                    exact_block(lanes, format, 4, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
                elif left == 2:
                    exact_block(lanes, format, 2, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
                else:
                    exact_block(lanes, format, 1, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
                t += taken

    return multiply_exact


@functools.cache
def _rounded(lanes: int, format: int) -> Any:
    """BF16 words and activations in bf16."""

    @compiled()
    def multiply_rounded(
        words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
    ) -> None:  # fmt: skip
        steps = words.shape[2]
        stride = 4 * x.pairs.shape[1]
        out_stride = 4 * out.shape[1]
        for b in range(number, past):
            block = _block_address(words, expert, b)
            for t in range(begin, end, 6):
                at = x.pairs.ctypes.data + t * stride
                to = out.ctypes.data + 4 * ROWS * b + t * out_stride
                left = end - t
                if left > 4 and t > begin:
                    rounded_block(lanes, format, 6, 1, block, at, stride, left, steps, to, out_stride)
                elif left > 4:
                    rounded_block(lanes, format, 6, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
                elif left > 2:
                    rounded_block(lanes, format, 4, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)
                else:
                    rounded_block(lanes, format, 2, SIDE_BY_SIDE, block, at, stride, left, steps, to, out_stride)

    return multiply_rounded


@functools.cache
def _matrices(terms: int) -> Any:
    """BF16 words and activations in bf16, by matrix registers.

    The blocks are the inner loop, so that the activations stay in a cache.
    """

    @compiled()
    def multiply_matrices(
        words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
    ) -> None:  # fmt: skip
        steps = words.shape[2]
        stride = 4 * x.pairs.shape[1]
        out_stride = 4 * out.shape[1]
        base = x.pairs.ctypes.data
        t = begin
        while t < end:
            count = min(2 * TOGETHER if terms == 1 else TOGETHER, end - t)
            if count > TOGETHER:
                shape_twice(terms, count)
            else:
                shape(terms, count)
            for b in range(number, past):
                at = _block_address(words, expert, b)
                to = out.ctypes.data + 4 * ROWS * b + t * out_stride
                if count > TOGETHER:
                    twice_matrix_block(terms, at, base + t * stride, stride, steps, to, out_stride)
                else:
                    matrix_block(terms, at, base + t * stride, stride, 4 * steps, steps, to, out_stride)
            t += count
        release()

    return multiply_matrices


@functools.cache
def _rows(lanes: int) -> Any:
    """BF16 rows in place and activations in fp32."""

    @compiled()
    def multiply_rows(
        words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
    ) -> None:  # fmt: skip
        steps = words.shape[2] // lanes
        stride = 4 * x.exact.shape[1]
        out_stride = 4 * out.shape[1]
        for b in range(number, past):
            block = _block_address(words, expert, b)
            for t in range(begin, end, TOKENS):
                at = x.exact.ctypes.data + t * stride
                to = out.ctypes.data + 4 * ROWS * b + t * out_stride
                left = end - t
                if left > 2:
                    row_block(lanes, _STORED, 4, block, at, stride, left, ROWS, steps, to, out_stride)
                elif left == 2:
                    row_block(lanes, _STORED, 2, block, at, stride, left, ROWS, steps, to, out_stride)
                else:
                    row_block(lanes, _STORED, 1, block, at, stride, left, ROWS, steps, to, out_stride)

    return multiply_rows


@functools.cache
def _scaled(lanes: int, format: int) -> Any:
    """INT8, INT4, UINT4 or MXFP4 words and activations in bytes.

    The first pass has four tokens. The code for six computes faster, but hardware often fails to prefetch the block for
    it (0.4 of the read rate on Zen 4), so it serves the later passes, when the block is in a cache.
    """

    @compiled()
    def multiply_scaled(
        words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
    ) -> None:  # fmt: skip
        groups = scales.shape[2]
        each = words.shape[2] // groups
        stride = x.numbers.shape[1]
        out_stride = 4 * out.shape[1]
        for b in range(number, past):
            block = _block_address(words, expert, b)
            own = _scales_address(scales, expert, b)
            t = begin
            while t < end:
                at = x.numbers.ctypes.data + t * stride
                to = out.ctypes.data + 4 * ROWS * b + t * out_stride
                left = end - t
                s = x.scales.ctypes.data + 4 * groups * t
                o = x.offsets.ctypes.data + 4 * groups * t
                if left > 4 and t > begin:
                    scaled_block(lanes, format, 6, block, own, at, stride, left, s, o, groups, each, to, out_stride)
                    t += 6
                elif left > 2:
                    scaled_block(lanes, format, 4, block, own, at, stride, left, s, o, groups, each, to, out_stride)
                    t += 4
                elif left == 2:
                    scaled_block(lanes, format, 2, block, own, at, stride, left, s, o, groups, each, to, out_stride)
                    t += 2
                else:
                    scaled_block(lanes, format, 1, block, own, at, stride, left, s, o, groups, each, to, out_stride)
                    t += 1

    return multiply_scaled


@functools.cache
def _scaled_matrices(format: int, columns: int) -> Any:
    """INT8, INT4 or UINT4 words and activations in bytes, group by group, by matrix registers."""
    per_word = Format(format).per_word
    halves = per_word > Format.INT8

    @compiled()
    def multiply_scaled_matrices(
        words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
    ) -> None:  # fmt: skip
        groups = scales.shape[2]
        each = words.shape[2] // groups
        stride = x.numbers.shape[1]
        scale_stride = 4 * groups
        sums = aligned_floats(_SUMMED_TOKENS * ROWS)
        tile = aligned_floats(TOGETHER * ROWS)
        unpacked = aligned_floats(2 * each * ROWS if halves else 0)
        shape_bytes(columns)
        for b in range(number, past):
            block = _block_address(words, expert, b)
            own = _scales_address(scales, expert, b)
            for first in range(begin, end, _SUMMED_TOKENS):
                last = min(first + _SUMMED_TOKENS, end)
                sums[: (last - first) * ROWS] = 0
                for g in range(groups):
                    numbers: Any = block + 4 * ROWS * each * g
                    if halves:
                        unpack(numbers, each, unpacked.ctypes.data)
                        numbers = np.int64(unpacked.ctypes.data)  # Numba would unify int64 and uint64 to float64
                    for t in range(first, last, TOGETHER):
                        scaled_matrix_block(
                            columns, format, numbers, own + 4 * ROWS * g,
                            x.numbers.ctypes.data + t * stride + each * per_word * g, stride, min(TOGETHER, last - t),
                            each * per_word // columns, x.scales.ctypes.data + t * scale_stride + 4 * g,
                            x.offsets.ctypes.data + t * scale_stride + 4 * g, scale_stride, tile.ctypes.data,
                            sums.ctypes.data + 4 * ROWS * (t - first),
                        )  # fmt: skip
                to = out.ctypes.data + 4 * (out.shape[1] * first + ROWS * b)
                store_rows(columns, sums.ctypes.data, last - first, to, 4 * out.shape[1])
        release()

    return multiply_scaled_matrices


@functools.cache
def _portable(format: int) -> Any:
    """Words of any format, on any CPU."""
    if Format(format).scaled:

        @compiled()
        def multiply_portable(
            words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
        ) -> None:  # fmt: skip
            sums = np.empty(ROWS, np.int32)
            for b in range(number, past):
                for t in range(begin, end):
                    to = out[t, ROWS * b : ROWS * (b + 1)]
                    own = scales[expert, b]
                    scaled_rows(words[expert, b], format, own, x.numbers[t], x.scales[t], x.offsets[t], sums, to)

        return multiply_portable

    rows = fp32_rows if Format(format) is Format.FP32 else bf16_rows

    @compiled()
    def multiply_portable_floats(
        words: Any, scales: Any, expert: int, number: int, past: int, begin: int, end: int, x: Any, out: Any
    ) -> None:  # fmt: skip
        for b in range(number, past):
            for t in range(begin, end):
                rows(words[expert, b], x.exact[t], out[t, ROWS * b : ROWS * (b + 1)])

    return multiply_portable_floats
