"""Experts given in floating point, rounded to the format that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arguments import Operand, checked, whole
from ...codegen.compiled import compiled
from ...codegen.rounding import bfloat16_pairs
from ...declarations import public
from ...machine.huge_pages import empty_in_huge_pages
from ..weights import GROUP, LINE, MXFP4_GROUP, ROWS, ZERO_BITS, Format, Matrices, PackedExperts, check_layer
from .words import PACKED_FROM, fp32, reorder_int4, reorder_mxfp4

_STREAMS = 4
"""Streams in which a block may be read side by side; without groups the number of steps is a multiple of it."""
_LINE_WORDS = LINE // 4
_MXFP4_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
"""Largest magnitude that is rounded to each code but the last."""
_MXFP4_BOUNDS[1::2] = np.nextafter(_MXFP4_BOUNDS[1::2], np.float32(0))  # a tie goes to the code that is even


@public
def pack_experts(
    gate_up: Operand | Sequence[Operand],
    down: Operand | Sequence[Operand],
    *,
    format: Format | str | None = None,
    group: int = GROUP,
) -> PackedExperts:
    """Copy the weights of a layer's experts into the layout that `fused_moe` reads.

    Parameters
    ----------
    gate_up : (E, 2 F, M), or E matrices (2 F, M); fp32, fp16, torch.bfloat16, or uint16 that holds bfloat16 bits
        Per expert the rows of the gate, then those of the up projection; in turns for "swiglu-clamped". The matrices of
        a list may be anywhere; each is asked for once, and may be gone when the next one is.
    down : (E, M, F), or E matrices (M, F); as gate_up
    format : Format or its name, optional
        "fp32", "bf16" (rounded to nearest even), "int8" or "int4" (rounded to the nearest multiple of the group's
        largest magnitude over 127 or 7), "uint4" (to the nearest of 16 numbers from the group's least to its largest,
        0 among them), or "mxfp4" (as OCP Microscaling Formats 1.0, section 6.3); by default bf16 for bf16 weights, else
        fp32.
    group : int
        Columns that share a scale in INT8, INT4 and UINT4, a multiple of 8; 32 do in MXFP4.

    Returns
    -------
    PackedExperts
        A copy; the original weights are no longer needed.

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes disagree, the format is unknown, or a weight that shares a scale is not finite.

    Examples
    --------
    >>> experts = pack_experts(np.ones((2, 6, 4), np.float32), np.ones((2, 4, 3), np.float32), format="int8")
    >>> len(experts), experts.format.name
    (2, 'INT8')
    """
    first = _Given("gate_up", gate_up)
    second = _Given("down", down)
    check_layer(first.shape, second.shape)
    if whole("group", group) < 8 or group % 8:
        raise ValueError(f"group must be a multiple of 8 columns, not {group}: leave it out for {GROUP}.")
    chosen = _format(format, first.dtype)
    group = MXFP4_GROUP if chosen is Format.MXFP4 else group
    return PackedExperts(_packed("gate_up", first, chosen, group), _packed("down", second, chosen, group))


class _Given:
    """The matrices (R, C) of a layer's experts as they were given, each checked when its turn comes."""

    def __init__(self, name: str, operands: Operand | Sequence[Operand]) -> None:
        self._name = name
        self._operands: Any = operands
        if not isinstance(operands, Sequence):
            self._operands = checked(name, operands, "E R C", *PACKED_FROM)
        self._first = self._matrix(0) if len(self._operands) else np.empty((0, 0), np.float32)
        if 0 in self._first.shape:
            raise ValueError(f"{name} must have an expert with rows and columns at least: pass (E, R, C).")
        self.dtype = self._first.dtype
        self.shape = (len(self._operands), *self._first.shape)

    def _matrix(self, expert: int) -> NDArray[Any]:
        return checked(f"{self._name}[{expert}]", self._operands[expert], "R C", *PACKED_FROM)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        yield self._first
        for expert in range(1, len(self._operands)):
            matrix = self._matrix(expert)
            if (matrix.shape, matrix.dtype) != (self._first.shape, self.dtype):
                raise ValueError(
                    f"{self._name}[{expert}] must be {self._first.shape} {self.dtype} as {self._name}[0], not "
                    f"{matrix.shape} {matrix.dtype}: pass experts of one layer."
                )
            yield matrix


def _format(name: Format | str | None, dtype: Any) -> Format:
    if name is None:
        return Format.BF16 if dtype == np.uint16 else Format.FP32
    if isinstance(name, Format):
        return name
    try:
        return Format[str(name).upper()]
    except KeyError:
        known = ", ".join(known.name.lower() for known in Format)
        raise ValueError(f"format must be one of {known}, not {name!r}: leave it out for the weights' own.") from None


def _packed(name: str, matrices: _Given, format: Format, group: int) -> Matrices:
    """Pack one matrix per expert."""
    count, rows, dim = matrices.shape
    unit = group if format.scaled else _STREAMS * format
    width = -(-dim // unit) * unit
    blocks = -(-rows // ROWS)
    words = empty_in_huge_pages((count, blocks, width // format.per_word, ROWS), np.uint32)
    groups = width // group if format.scaled else 0
    scales = empty_in_huge_pages((count, blocks, groups, ROWS), format.scale_type)
    kept = format is _format(None, matrices.dtype) and matrices.dtype != np.float16
    for e, matrix in enumerate(matrices):
        if kept and (rows, dim) == (blocks * ROWS, width):
            _reorder(np.ascontiguousarray(matrix).view(np.uint32).reshape(blocks, ROWS, -1), words[e])
            continue
        for b in range(blocks):  # one block at a time keeps the scratch memory small
            own = matrix[b * ROWS : (b + 1) * ROWS]
            full = np.zeros((ROWS, width), np.float32)
            full[: len(own), :dim] = fp32(own)
            words[e, b], scales[e, b] = _block(f"{name}[{e}]", full, format, group)
    return Matrices(words, scales, rows, dim, format, group)


@compiled()
def _reorder(rows: Any, words: Any) -> None:
    """Copy rows of words (blocks, 64, steps) to blocks (blocks, steps, 64), a line of every row after the other."""
    blocks, _, steps = rows.shape
    for block in range(blocks):
        for begin in range(0, steps, _LINE_WORDS):
            end = min(steps, begin + _LINE_WORDS)
            for row in range(ROWS):
                for step in range(begin, end):
                    words[block, step, row] = rows[block, row, step]


def _block(name: str, full: NDArray[np.float32], format: Format, group: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pack 64 padded rows: words (steps, 64) and scales (groups, 64)."""
    none = np.empty((0, ROWS), np.float32)
    if format is Format.FP32:
        return full.view(np.uint32).T, none
    if format is Format.BF16:
        words = np.empty(full.size // 2, np.uint32)
        bfloat16_pairs(full.view(np.uint32).ravel(), words)
        return words.reshape(ROWS, -1).T, none
    words = np.empty((full.shape[1] // format.per_word, ROWS), np.uint32)
    scales: NDArray[Any] = np.empty((full.shape[1] // group, ROWS), format.scale_type)
    if format is Format.MXFP4:
        if not np.isfinite(full).all():
            raise ValueError(f"{name} must be finite to share scales: pack it as fp32 or bf16.")
        reorder_mxfp4(*_as_mxfp4(full), words[None], scales[None])
        return words, scales
    if format is Format.UINT4:
        if not np.isfinite(full).all():
            raise ValueError(f"{name} must be finite to share scales: pack it as fp32 or bf16.")
        codes, scales = _as_uint4(full, group)
        reorder_int4(codes, words[None])
        return words, scales.T
    if not _round(full, format.zero, format is Format.INT4, words, scales):
        raise ValueError(f"{name} must be finite to share scales: pack it as fp32 or bf16.")
    return words, scales


def _as_uint4(full: NDArray[np.float32], group: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Round rows (R, width) to codes (R, width), and to scales with zero points (R, groups)."""
    grouped = full.reshape(len(full), -1, group).astype(np.float64)
    low = np.minimum(grouped.min(axis=2), 0)
    high = np.maximum(grouped.max(axis=2), 0)
    bits = ((high - low) / 15).astype(np.float32).view(np.int32)
    bits = bits + ZERO_BITS & ~ZERO_BITS  # rounded up, so that 16 numbers reach from the least to the largest
    scales = bits.view(np.float32).astype(np.float64)
    units = np.where(scales > 0, scales, 1.0)
    zeros = np.rint(-low / units)
    codes = np.clip(np.rint(grouped / units[..., None]) + zeros[..., None], 0, 15)
    return codes.astype(np.uint8).reshape(full.shape), bits | zeros.astype(np.int32)


def _as_mxfp4(full: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Round rows (R, width) to codes (R, G, 16) and exponents (R, G)."""
    grouped = full.reshape(len(full), -1, MXFP4_GROUP)
    high = np.abs(grouped).max(axis=2)
    power = np.clip(np.frexp(high)[1] - 3, -126, 125)  # the largest code, 6, is 1.5 * 2**2
    magnitudes = np.ldexp(np.abs(grouped), -power[..., None])
    codes = np.searchsorted(_MXFP4_BOUNDS, magnitudes).astype(np.uint8)
    codes |= np.signbit(grouped).astype(np.uint8) << 3
    return codes[..., ::2] | codes[..., 1::2] << 4, (power + 127).astype(np.uint8)


@compiled()
def _round(full: Any, zero: int, halves: bool, words: Any, scales: Any) -> bool:
    """Round rows (64, width) to words (steps, 64) with scales (groups, 64); False if a number is not finite."""
    group = full.shape[1] // len(scales)
    steps = len(words) // len(scales)
    numbers = np.empty(group, np.uint8)
    fours = numbers.view(np.uint32)
    for g in range(len(scales)):
        for row in range(ROWS):
            own = full[row, g * group : (g + 1) * group]
            bits = own.view(np.uint32)
            high = np.uint32(0)
            for i in range(group):  # bits without the sign are ordered like magnitudes, and their maximum vectorises
                high = np.uint32(max(high, np.uint32(bits[i] & np.uint32(0x7FFFFFFF))))
            if high >= np.uint32(0x7F800000):
                return False
            scale = np.float32(np.uint32(high).view(np.float32) / np.float32(zero - 1))
            unit = scale if scale > 0 else np.float32(1)
            for i in range(group):
                numbers[i] = np.uint8(np.int32(np.rint(np.float32(own[i] / unit))) + zero)
            scales[g, row] = scale
            for s in range(steps):
                word = np.uint32(fours[2 * s] | np.uint32(fours[2 * s + 1] << np.uint32(4))) if halves else fours[s]
                words[g * steps + s, row] = word
    return True
