"""Activations of the experts: rows of tokens in fp32, in bf16, or in bytes with scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codegen.compiled import compiled
from ..codegen.numerics import LOG2_E, exp2
from ..codegen.rounding import bfloat16_pairs, bfloat16_parts
from ..codegen.vector_ir import LINE, ROUND
from .matrices import TOGETHER
from .weights import Matrices, aligned


class Rows(NamedTuple):
    """Rows that matrices of one width are multiplied with, in the forms that those need; a tuple, which Numba takes.

    Attributes
    ----------
    exact : (n, width) fp32
    pairs : (n, width / 2) uint32
        Two bf16 per word, rounded; or three times as many words and a line, the three parts of each number one behind
        the other, and rows that do not all begin in the same place of a cache; empty unless asked for.
    numbers, scales, offsets : (n + 15, width + a line) int8, (n, groups) fp32, (n, groups) int32
        Bytes, what they are multiples of, and the negative of their sum times what stands for 0 in a weight; empty
        unless the weights have scales. Matrix registers read 16 rows wherever one begins; as of `pairs`, rows do not
        all begin in the same place of a cache.
    split : int
        Lanes of the registers for which the exact form has its even columns apart from the odd ones, which it has for
        rows in place; else 0.
    parts : int
        bf16 per number in `pairs`: 0, 1 or 3.
    """

    exact: NDArray[np.float32]
    pairs: NDArray[np.uint32]
    numbers: NDArray[np.int8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.int32]
    split: int
    parts: int


def room(count: int, matrices: Matrices, parts: int, lanes: int) -> Rows:
    """Memory for rows that the matrices take, in so many `parts` of bf16 too; not cleared."""
    width = matrices.width
    groups = matrices.scales.shape[2]
    words = parts * width // 2 + (LINE // 4 if parts > 1 else 0)
    return Rows(
        aligned(np.float32, count, width),
        aligned(np.uint32, count, words),
        aligned(np.int8, count + TOGETHER - 1, width + LINE if groups else 0),
        np.empty((count, groups), np.float32),
        np.empty((count, groups), np.int32),
        lanes if matrices.in_place else 0,
        parts,
    )


@compiled()
def fill(row: Any, t: int, rows: Any, zero: int) -> None:
    """Row t in all its forms, filled up with zeros."""
    rows.exact[t, : len(row)] = row
    rows.exact[t, len(row) :] = 0
    form(t, rows, zero)


@compiled("contract")
def fill_swiglu(both: Any, dim: int, t: int, rows: Any, zero: int) -> None:
    """Row t in all its forms: silu(gate) up, where `both` holds `dim` gates and then the ups."""
    own = rows.exact[t]
    for f in range(dim):
        gate = both[t, f]
        fall = exp2(np.float32(-abs(gate) * np.float32(LOG2_E)))
        share = np.float32(1) / (np.float32(1) + fall)
        own[f] = gate * (share if gate >= 0 else fall * share) * both[t, dim + f]
    own[dim:] = 0
    form(t, rows, zero)


@compiled()
def form(t: int, rows: Any, zero: int) -> None:
    """The other forms of row t from the exact one."""
    if rows.split:
        _split(rows.exact[t], rows.split)
    if rows.parts == 1:
        bfloat16_pairs(rows.exact[t].view(np.uint32), rows.pairs[t])
    elif rows.parts:
        width = rows.exact.shape[1]
        halves = rows.pairs[t].view(np.uint16)
        bfloat16_parts(rows.exact[t], halves[: rows.parts * width].reshape((rows.parts, width)))
    if rows.numbers.shape[1]:
        _numbers(rows.exact[t], zero, rows.numbers[t], rows.scales[t], rows.offsets[t])


@compiled()
def _split(row: Any, lanes: int) -> None:
    """Of each two registers' columns the even ones, then the odd ones: as a register of bf16 pairs is taken apart."""
    own = np.empty(2 * lanes, np.float32)
    for begin in range(0, len(row), 2 * lanes):
        own[:] = row[begin : begin + 2 * lanes]
        row[begin : begin + lanes] = own[::2]
        row[begin + lanes : begin + 2 * lanes] = own[1::2]


@compiled()
def _numbers(x: Any, zero: int, out: Any, scales: Any, offsets: Any) -> None:
    """Each group in multiples of its largest magnitude over 127; a group with NaN or infinity has the scale NaN."""
    size = len(x) // len(scales)
    for g in range(len(scales)):
        own = x[g * size : (g + 1) * size]
        to = out[g * size : (g + 1) * size]
        bits = own.view(np.uint32)
        high = np.uint32(0)
        for i in range(size):  # bits without a sign are ordered as the fp32 are, and vectors find their maximum
            high = np.uint32(max(high, np.uint32(bits[i] & np.uint32(0x7FFFFFFF))))
        finite = high < np.uint32(0x7F800000)
        scale = np.uint32(high).view(np.float32) / np.float32(127)
        factor = np.float32(1) / scale if finite and scale > 0 else np.float32(0)
        total = np.int32(0)
        for i in range(size):
            number = np.int8(np.float32(own[i] * factor + np.float32(ROUND)).view(np.int32))
            to[i] = number
            total = np.int32(total + number)
        scales[g] = scale if finite else np.float32(np.nan)
        offsets[g] = -zero * total
