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

from ..codegen.compiled import compiled
from ..codegen.matrix_ir import TERMS
from ..codegen.rounding import narrowed, widened
from ..machine.features import CodePath, has, has_matrices
from ..machine.parameters import parameters
from ..threads.task_counts import next_task, task_done, tasks_done
from ..threads.waiting import pause
from .activations import add_bias, fill, fill_clamped, fill_swiglu
from .matrices import COLUMNS, columns_together
from .products import multiplier
from .weights import ROWS, Format, Matrices, PackedExperts

_SETTINGS = parameters().experts
_KEPT = _SETTINGS.kept


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
    """Columns of INT8, INT4 or UINT4 that a matrix instruction multiplies, for experts with many tokens; 0 without."""
    bytes_ = experts.format in (Format.INT8, Format.INT4, Format.UINT4)
    if not bytes_ or path is not CodePath.AVX512 or not has_matrices():
        return 0
    return columns_together(math.gcd(experts.gate_up.group, experts.down.group))


def blocks_of(matrices: Matrices, terms: int, most: int) -> int:
    """Blocks per task of matrix registers; several if `most` tokens would not stay in L2 from block to block.

    `terms` are those of their activations, 0 where vectors multiply.
    """
    fits = 2 * terms * matrices.width * most <= _KEPT
    return 1 if fits else max(1, _KEPT // (2 * ROWS * matrices.width))


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
    looks = 0
    while tasks_done(counter, phase) < tasks:
        pause(looks)
        looks += 1
    return -1


@functools.cache
def server(
    lanes: int, format: int, in_place: bool, rounded: bool, by_matrices: int, columns: int, clamped: bool
) -> Any:
    """Compile one thread's work with the products of `multiplier`.

    `clamped` chooses GPT-OSS' activation function, else it is SwiGLU.
    """
    multiply = multiplier(lanes, format, in_place, rounded, by_matrices, columns)
    activate = fill_clamped if clamped else fill_swiglu

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
            multiply(up_words, up_scales, expert, number, past, first[expert], first[expert + 1], x, both)
            task_done(counter, 1)
            i = _next(counter, 1, len(touched) * tasks_each)
        i = _next(counter, 2, len(tokens))
        while i >= 0:
            if len(up_bias):
                add_bias(up_bias[experts[i]], both[i])
            activate(both, dim, i, inner, zero)
            task_done(counter, 2)
            i = _next(counter, 2, len(tokens))
        blocks = down_words.shape[1]
        tasks_each = -(-blocks // down_blocks)
        i = _next(counter, 3, len(touched) * tasks_each)
        while i >= 0:
            expert = touched[i // tasks_each]
            number = i % tasks_each * down_blocks
            past = min(blocks, number + down_blocks)
            multiply(down_words, down_scales, expert, number, past, first[expert], first[expert + 1], inner, answers)
            task_done(counter, 3)
            i = _next(counter, 3, len(touched) * tasks_each)
        total = np.empty(out.shape[1], np.float32)
        i = _next(counter, 4, len(out))
        while i >= 0:
            weighted_sum(every, places[i], weights[i], ids[i], down_bias, total)
            row = out[i]
            for m in range(len(row)):
                row[m] = narrowed(total[m], row[m])
            task_done(counter, 4)
            i = _next(counter, 4, len(out))

    return serve
