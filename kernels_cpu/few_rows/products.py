"""Products of a few rows with weights as they lie in memory, read once by a thread and its helpers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, literally  # type: ignore[attr-defined]

from ..codegen.compiled import compiled
from ..codegen.numerics import aligned_floats
from ..codegen.rounding import narrowed, widened
from ..codegen.vector_ir import Storage
from ..codegen.views import pointer
from ..experts.products import SIDE_BY_SIDE
from ..experts.rows import pair_block, row_block
from ..experts.vectors import exact_block, scaled_block
from ..experts.weights import ROWS, Format
from ..machine.features import CodePath, has
from ..machine.parameters import parameters
from ..threads.crew import (
    FIRST,
    Crew,
    StandBy,
    close_call,
    compiled_work,
    crew,
    join_call,
    leave_call,
    next_of_call,
    open_call,
)
from ..threads.task_counts import peek

MOST = 4
"""Most rows that are multiplied with one read of the weights, which takes longer than computing."""
_TASK_BYTES = parameters().few_rows.task_bytes
_MANY = parameters().few_rows.most
_AT_ONCE = 6
"""Rows that are multiplied in pairs with one read of the weights."""

# Words of the board that describe a call.
_KIND, _TASKS, _EACH, _STEPS, _WEIGHTS, _X, _X_STRIDE, _OUT, _OUT_STRIDE, _TOKENS = range(FIRST, FIRST + 10)
_ROWS = FIRST + 10
_PARTS, _GROUPS, _X_SCALES, _OFFSETS = range(FIRST + 11, FIRST + 15)
_BIAS, _RESIDUAL = range(FIRST + 15, FIRST + 17)

_BF16_ROWS = 0
_FP32_ROWS = 1
_PAIRS = 2
_IN_BLOCKS = 3
"""Kinds of a call; one of packed experts has its format added."""
_FP32 = int(Storage.FP32)
_BF16 = int(Storage.BF16)
_FP32_BLOCKS = int(Format.FP32)
_BF16_BLOCKS = int(Format.BF16)
_INT8_BLOCKS = int(Format.INT8)
_INT4_BLOCKS = int(Format.INT4)
_MXFP4_BLOCKS = int(Format.MXFP4)
_UINT4_BLOCKS = int(Format.UINT4)


@compiled()
def _serve_rows(lanes: int, storage: int, board: Any) -> None:
    """Take tasks of weights in rows until none is left."""
    literally(lanes), literally(storage)
    at = board.ctypes.data
    each = board[_EACH]
    steps = board[_STEPS]
    stride = board[_X_STRIDE]
    out_stride = board[_OUT_STRIDE]
    task = next_of_call(at)
    while task < board[_TASKS]:
        first = task * each
        count = min(each, board[_ROWS] - first)
        block = board[_WEIGHTS] + first * steps * 4 * lanes
        for t in range(0, board[_TOKENS], MOST):
            left = board[_TOKENS] - t
            x = board[_X] + t * stride
            to = board[_OUT] + 4 * first + t * out_stride
            if left > 2:
                row_block(lanes, storage, 4, block, x, stride, left, count, steps, to, out_stride)
            elif left == 2:
                row_block(lanes, storage, 2, block, x, stride, left, count, steps, to, out_stride)
            else:
                row_block(lanes, storage, 1, block, x, stride, left, count, steps, to, out_stride)
        task = next_of_call(at)


@compiled()
def add_residual(residual: Any, out: Any) -> None:
    """out = round(residual + out), number by number."""
    for r in range(len(out)):
        out[r] = narrowed(widened(residual[r]) + widened(out[r]), out[r])


@compiled()
def _finish(sums: Any, bias: int, residual: int, first: int, rows: int, out: int) -> None:
    """out[t] = round(residual[t] + round(sums[t] + bias)) for rows first .. of a matrix of `rows`, all in bf16.

    An address of 0 is that of no bias, or of no residual.
    """
    tokens, count = sums.shape
    found = carray(pointer(out), (tokens, rows), np.uint16)
    shift = carray(pointer(bias), (rows if bias else 0,), np.uint16)
    added = carray(pointer(residual), (tokens if residual else 0, rows), np.uint16)
    for t in range(tokens):
        own = sums[t]
        to = found[t, first : first + count]
        if bias:
            for r in range(count):
                own[r] += widened(shift[first + r])
        for r in range(count):
            to[r] = narrowed(own[r], to[r])
        if residual:
            add_residual(added[t, first : first + count], to)


@compiled()
def _serve_pairs(lanes: int, board: Any) -> None:
    """Take tasks of weights in rows until none is left, for rows of x in bf16, and round their results."""
    literally(lanes)
    at = board.ctypes.data
    each = board[_EACH]
    steps = board[_STEPS]
    stride = board[_X_STRIDE]
    tokens = board[_TOKENS]
    rows = board[_ROWS]
    memory = aligned_floats(tokens * each)
    task = next_of_call(at)
    while task < board[_TASKS]:
        first = task * each
        count = min(each, rows - first)
        block = board[_WEIGHTS] + first * steps * 4 * lanes
        sums = memory[: tokens * count].reshape((tokens, count))
        for t in range(0, tokens, _AT_ONCE):
            x = board[_X] + t * stride
            to = sums.ctypes.data + 4 * count * t
            left = tokens - t
            if left > 2:
                pair_block(lanes, _AT_ONCE, block, x, stride, left, count, steps, to, 4 * count)
            else:
                pair_block(lanes, 2, block, x, stride, left, count, steps, to, 4 * count)
        _finish(sums, board[_BIAS], board[_RESIDUAL], first, rows, board[_OUT])
        task = next_of_call(at)


@compiled()
def _serve_blocks(lanes: int, format: int, board: Any) -> None:
    """Take tasks of packed weights until none is left: one block of one expert each."""
    literally(lanes), literally(format)
    at = board.ctypes.data
    each = board[_EACH]
    steps = board[_STEPS]
    groups = board[_GROUPS]
    stride = board[_X_STRIDE]
    out_stride = board[_OUT_STRIDE]
    task = next_of_call(at)
    while task < board[_TASKS]:
        part = board[_PARTS] + 32 * (task // each)
        number = task % each
        block = peek(part) + 4 * ROWS * steps * number
        scales = peek(part + 8) + (1 if format == _MXFP4_BLOCKS else 4) * ROWS * groups * number
        begin = peek(part + 16)
        end = peek(part + 24)
        for t in range(begin, end, MOST):
            left = end - t
            x = board[_X] + t * stride
            to = board[_OUT] + 4 * ROWS * number + t * out_stride
            factors = board[_X_SCALES] + 4 * groups * t
            offsets = board[_OFFSETS] + 4 * groups * t
            if left > 2:
                _block(
                    lanes, format, 4, block, scales, x, stride, left, factors, offsets, groups, steps, to, out_stride
                )
            elif left == 2:
                _block(
                    lanes, format, 2, block, scales, x, stride, left, factors, offsets, groups, steps, to, out_stride
                )
            else:
                _block(
                    lanes, format, 1, block, scales, x, stride, left, factors, offsets, groups, steps, to, out_stride
                )
        task = next_of_call(at)


@compiled()
def _block(
    lanes: int, format: int, tokens: int, block: int, scales: int, x: int, stride: int, left: int, factors: int,
    offsets: int, groups: int, steps: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """Multiply a block with one to four rows."""
    literally(lanes), literally(format), literally(tokens)
    if groups:
        each = steps // groups
        scaled_block(
            lanes, format, tokens, block, scales, x, stride, left, factors, offsets, groups, each, out, out_stride
        )
    else:
        exact_block(lanes, format, tokens, SIDE_BY_SIDE, block, x, stride, left, steps, out, out_stride)


@compiled()
def multiply_rows(
    lanes: int, storage: int, board: Any, weights: int, rows: int, x: Any, tokens: int, out: Any
) -> None:  # fmt: skip
    """out[t, r] = weights[r] . x[t] for `tokens` rows of x (T, width) fp32, in the order of `lay`, with helpers."""
    literally(lanes), literally(storage)
    row_bytes = x.shape[1] * (2 if storage == _BF16 else 4)
    each = max(1, _TASK_BYTES // (4 * row_bytes)) * 4
    board[_KIND] = _BF16_ROWS if storage == _BF16 else _FP32_ROWS
    board[_TASKS] = -(-rows // each)
    board[_EACH] = each
    board[_ROWS] = rows
    board[_STEPS] = row_bytes // (4 * lanes)
    board[_WEIGHTS] = weights
    board[_X] = x.ctypes.data
    board[_X_STRIDE] = 4 * x.shape[1]
    board[_OUT] = out.ctypes.data
    board[_OUT_STRIDE] = 4 * out.shape[1]
    board[_TOKENS] = tokens
    at = board.ctypes.data
    open_call(at)
    _serve_rows(lanes, storage, board)
    close_call(at)


@compiled()
def multiply_pairs(
    lanes: int, board: Any, weights: int, rows: int, x: int, width: int, tokens: int, bias: int, residual: int, out: int
) -> None:
    """out[t] = round(residual[t] + round(weights x[t] + bias)), all in bf16 at these addresses, with helpers.

    An address of 0 is that of no bias, or of no residual. For CPUs with AVX512_BF16.
    """
    literally(lanes)
    row_bytes = 2 * width
    each = max(1, _TASK_BYTES // (4 * row_bytes)) * 4
    board[_KIND] = _PAIRS
    board[_TASKS] = -(-rows // each)
    board[_EACH] = each
    board[_ROWS] = rows
    board[_STEPS] = row_bytes // (4 * lanes)
    board[_WEIGHTS] = weights
    board[_X] = x
    board[_X_STRIDE] = row_bytes
    board[_OUT] = out
    board[_TOKENS] = tokens
    board[_BIAS] = bias
    board[_RESIDUAL] = residual
    at = board.ctypes.data
    open_call(at)
    _serve_pairs(lanes, board)
    close_call(at)


@compiled()
def no_pairs(
    lanes: int, board: Any, weights: int, rows: int, x: int, width: int, tokens: int, bias: int, residual: int, out: int
) -> None:
    """Stand in for `multiply_pairs` where it is never called, so that it is not compiled."""


@compiled()
def multiply_blocks(
    lanes: int, format: int, board: Any, parts: Any, count: int, blocks: int, steps: int, x: Any, out: Any
) -> None:
    """Multiply packed experts with activations x, with helpers.

    parts (count, 4) int64 holds for each expert the addresses of its words and its scales, and its first activation and
    the one behind its last.
    """
    literally(lanes), literally(format)
    groups = x.scales.shape[1]
    board[_KIND] = _IN_BLOCKS + format
    board[_TASKS] = count * blocks
    board[_EACH] = blocks
    board[_STEPS] = steps
    board[_GROUPS] = groups
    board[_PARTS] = parts.ctypes.data
    board[_X] = x.numbers.ctypes.data if groups else x.exact.ctypes.data
    board[_X_STRIDE] = x.numbers.shape[1] if groups else 4 * x.exact.shape[1]
    board[_X_SCALES] = x.scales.ctypes.data
    board[_OFFSETS] = x.offsets.ctypes.data
    board[_OUT] = out.ctypes.data
    board[_OUT_STRIDE] = 4 * out.shape[1]
    at = board.ctypes.data
    open_call(at)
    _serve_blocks(lanes, format, board)
    close_call(at)


@functools.cache
def _helper(lanes: int) -> StandBy:
    """The work of a helper, which takes tasks of every kind."""

    @compiled()
    def stand_by(board: Any) -> None:
        at = board.ctypes.data
        call = join_call(at, -1)
        while call >= 0:
            kind = board[_KIND]
            if kind == _BF16_ROWS:
                _serve_rows(lanes, _BF16, board)
            elif kind == _FP32_ROWS:
                _serve_rows(lanes, _FP32, board)
            elif kind == _PAIRS:
                _serve_pairs(lanes, board)
            elif kind == _IN_BLOCKS + _FP32_BLOCKS:
                _serve_blocks(lanes, _FP32_BLOCKS, board)
            elif kind == _IN_BLOCKS + _BF16_BLOCKS:
                _serve_blocks(lanes, _BF16_BLOCKS, board)
            elif kind == _IN_BLOCKS + _INT8_BLOCKS:
                _serve_blocks(lanes, _INT8_BLOCKS, board)
            elif kind == _IN_BLOCKS + _INT4_BLOCKS:
                _serve_blocks(lanes, _INT4_BLOCKS, board)
            elif kind == _IN_BLOCKS + _UINT4_BLOCKS:
                _serve_blocks(lanes, _UINT4_BLOCKS, board)
            else:
                _serve_blocks(lanes, _MXFP4_BLOCKS, board)
            leave_call(at)
            call = join_call(at, call)

    return compiled_work(stand_by)


def most_rows(lanes: int) -> int:
    """Most rows of a call of a stage, on a path with so many lanes."""
    return max(MOST, _MANY if lanes == CodePath.AVX512.value else 0)


def most_pairs(lanes: int, storage: Storage) -> int:
    """As `most_rows`, where AVX512_BF16 multiplies weights of a format in pairs; else `MOST`."""
    return most_rows(lanes) if storage is Storage.BF16 and has("avx512bf16") else MOST


def gathered(lanes: int, threads: int) -> Crew:
    """The calling thread with helpers for the next calls, `threads` together."""
    found = crew(lanes)
    found.gather(functools.partial(_helper, lanes), threads)
    return found


@compiled()
def lay(lanes: int, storage: int, row: Any, out: Any) -> None:
    """Copy a row to fp32 in the order in which `row_block` reads it: for bf16 even columns apart from odd ones."""
    if storage == _BF16:
        for begin in range(0, len(row), 2 * lanes):
            for i in range(lanes):
                out[begin + i] = widened(row[begin + 2 * i])
                out[begin + lanes + i] = widened(row[begin + 2 * i + 1])
    else:
        for m in range(len(row)):
            out[m] = widened(row[m])
