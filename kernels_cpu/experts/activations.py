"""Activations of the experts, one row per token and expert: in fp32, in bf16, or in bytes with scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codegen.compiled import compiled
from ..codegen.numerics import LOG2_E, exp2
from ..codegen.rounding import bfloat16_pairs, bfloat16_terms, widened
from ..codegen.vector_ir import LINE, ROUND
from .matrices import TOGETHER
from .weights import Matrices, aligned

_MOST = 7.0
"""Largest gate, and largest magnitude of an up projection, of GPT-OSS' activation function."""
_STEEPNESS = 1.702
"""Factor of its gate in the logistic function."""


class Activations(NamedTuple):
    """Activations to be multiplied with matrices of one width, in the formats that these need; a tuple for Numba.

    Attributes
    ----------
    exact : (n, width) fp32
    pairs : (n, terms width / 2) uint32
        Two bf16 per word. With one term the numbers are rounded; with three terms the row holds all first terms, then
        all second and all third terms. A cache line of padding follows, so that rows do not all map to the same cache
        set. Empty with no term.
    numbers, scales, offsets : (n + 15, width + a line) int8, (n, groups) fp32, (n, groups) int32
        Bytes and their scales; offsets are the negative of the sum of a group's bytes times the code of 0 in a weight.
        Empty unless the weights have scales. Matrix registers read 16 rows from any row on, hence 15 more; the line is
        padding as of `pairs`.
    split : int
        For weights in place, the lanes of the registers for which the rows of `exact` are reordered: of each two
        registers' columns the even ones, then the odd ones. Else 0.
    terms : int
        bf16 terms per number in `pairs`: 0, 1 or 3.
    """

    exact: NDArray[np.float32]
    pairs: NDArray[np.uint32]
    numbers: NDArray[np.int8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.int32]
    split: int
    terms: int


def empty_activations(count: int, matrices: Matrices, terms: int, lanes: int) -> Activations:
    """Allocate `count` rows for these matrices, with `terms` bf16 terms per number; not cleared."""
    width = matrices.width
    groups = matrices.scales.shape[2]
    words = terms * width // 2 + (LINE // 4 if terms else 0)
    return Activations(
        aligned(np.float32, count, width),
        aligned(np.uint32, count, words),
        aligned(np.int8, count + TOGETHER - 1, width + LINE if groups else 0),
        np.empty((count, groups), np.float32),
        np.empty((count, groups), np.int32),
        lanes if matrices.in_place else 0,
        terms,
    )


@compiled()
def fill(row: Any, t: int, activations: Any, zero: int) -> None:
    """Store row t in all formats, padded with zeros."""
    own = activations.exact[t]
    for m in range(len(row)):  # Numba takes a second to compile the error of slices that do not fit
        own[m] = widened(row[m])
    own[len(row) :] = 0
    convert(t, activations, zero)


@compiled("contract")
def fill_swiglu(both: Any, dim: int, t: int, activations: Any, zero: int) -> None:
    """Store row t as silu(gate) up in all formats; row t of `both` holds `dim` gates, then the up projections."""
    own = activations.exact[t]
    for f in range(dim):
        gate = both[t, f]
        fall = exp2(np.float32(-abs(gate) * np.float32(LOG2_E)))
        share = np.float32(1) / (np.float32(1) + fall)
        own[f] = gate * (share if gate >= 0 else fall * share) * both[t, dim + f]
    own[dim:] = 0
    convert(t, activations, zero)


@compiled("contract")
def fill_clamped(both: Any, dim: int, t: int, activations: Any, zero: int) -> None:
    """Store row t as (up + 1) gate / (1 + exp(-1.702 gate)) in all formats, gates <= 7 and ups within 7 (GPT-OSS).

    Row t of `both` holds `dim` gates and ups in turns.
    """
    own = activations.exact[t]
    most = np.float32(_MOST)
    for f in range(dim):
        gate = both[t, 2 * f]
        gate = most if gate > most else gate  # this order keeps NaN
        up = both[t, 2 * f + 1]
        up = most if up > most else (-most if up < -most else up)
        fall = exp2(np.float32(-abs(gate) * np.float32(_STEEPNESS * LOG2_E)))
        share = np.float32(1) / (np.float32(1) + fall)
        own[f] = (up + np.float32(1)) * gate * (share if gate >= 0 else fall * share)
    own[dim:] = 0
    convert(t, activations, zero)


@compiled()
def add_bias(bias: Any, row: Any) -> None:
    """Add an expert's bias, fp32 or bf16, to the first numbers of a row."""
    for i in range(len(bias)):
        row[i] += widened(bias[i])


@compiled()
def convert(t: int, activations: Any, zero: int) -> None:
    """Convert row t of `exact` to the other formats."""
    if activations.split:
        _split(activations.exact[t], activations.split)
    if activations.terms == 1:
        width = activations.exact.shape[1]
        bfloat16_pairs(activations.exact[t].view(np.uint32), activations.pairs[t, : width // 2])
    elif activations.terms:
        width = activations.exact.shape[1]
        halves = activations.pairs[t].view(np.uint16)
        bfloat16_terms(activations.exact[t], halves[: activations.terms * width].reshape((activations.terms, width)))
    if activations.numbers.shape[1]:
        _numbers(activations.exact[t], zero, activations.numbers[t], activations.scales[t], activations.offsets[t])


@compiled()
def _split(row: Any, lanes: int) -> None:
    """Reorder columns: of each two registers' the even ones, then the odd ones, as `widen` loads a bf16 row."""
    own = np.empty(2 * lanes, np.float32)
    for begin in range(0, len(row), 2 * lanes):
        for i in range(2 * lanes):
            own[i] = row[begin + i]
        for i in range(lanes):
            row[begin + i] = own[2 * i]
            row[begin + lanes + i] = own[2 * i + 1]


@compiled()
def _numbers(x: Any, zero: int, out: Any, scales: Any, offsets: Any) -> None:
    """Round each group to multiples of its largest magnitude over 127; with NaN or infinity its scale is NaN."""
    size = len(x) // len(scales)
    for g in range(len(scales)):
        own = x[g * size : (g + 1) * size]
        to = out[g * size : (g + 1) * size]
        bits = own.view(np.uint32)
        high = np.uint32(0)
        for i in range(size):  # bits without the sign are ordered like magnitudes, and their maximum vectorises
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
