"""Copies of experts' weights in the layout of `weights`, rounded to the format that is asked for, and back in rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, checked, whole
from ..codegen.compiled import compiled
from ..codegen.rounding import bfloat16_pairs
from ..declarations import public
from ..machine.huge_pages import empty_in_huge_pages
from .weights import (
    GROUP,
    LINE,
    MXFP4_GROUP,
    ROWS,
    ZERO_BITS,
    Format,
    Matrices,
    PackedExperts,
    check_layer,
    stored_words,
)

_STREAMS = 4
"""Streams in which a block may be read side by side; without groups the number of steps is a multiple of it."""
_LINE_WORDS = LINE // 4
_MXFP4_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
"""Largest magnitude that is rounded to each code but the last."""
_MXFP4_BOUNDS[1::2] = np.nextafter(_MXFP4_BOUNDS[1::2], np.float32(0))  # a tie goes to the code that is even
_PACKED_FROM = (np.float32, np.uint16, np.float16)
"""Types of matrices that can be packed; uint16 holds bfloat16 bits."""
_IN_ROWS: dict[Format, Any] = {Format.INT8: np.int8, Format.INT4: np.uint8}
"""Types of matrices in the layout of `QuantisedRows`."""


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


@public
def pack_int4(
    gate_up: Operand | Sequence[Operand],
    gate_up_scales: Operand | Sequence[Operand],
    down: Operand | Sequence[Operand],
    down_scales: Operand | Sequence[Operand],
    *,
    gate_up_zeros: Operand | Sequence[Operand] | None = None,
    down_zeros: Operand | Sequence[Operand] | None = None,
) -> PackedExperts:
    """Copy experts in group-wise INT4, as GPTQ and AWQ quantise them, into the layout that `fused_moe` reads.

        weight = (code - zero point) * scale

    The weights keep their numbers. `int4_codes` unpacks the codes of checkpoints.

    Parameters
    ----------
    gate_up : (E, 2 F, M) uint8, or E matrices (2 F, M)
        Codes from 0 to 15: per expert the rows of the gate, then those of the up projection.
    gate_up_scales : (E, 2 F, groups) fp16, fp32, torch.bfloat16, or uint16 that holds its bits; or E matrices
        Each is of M / groups columns, a multiple of 8. With zero points the last four bits of fp32 scales must be 0, as
        they are where the numbers have been fp16 or bf16.
    down, down_scales : (E, M, F) and (E, M, groups), or E matrices of each; as gate_up and gate_up_scales
    gate_up_zeros, down_zeros : (E, 2 F, groups) and (E, M, groups) uint8, or E matrices of each, optional
        Zero points from 0 to 15, both or none; without them all are 8 (symmetric quantisation).

    Returns
    -------
    PackedExperts
        A copy in the format INT4, with zero points UINT4; the original weights are no longer needed.

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes disagree, a code or a zero point is above 15, a scale is not finite or has too many bits.

    Examples
    --------
    >>> codes, scales = np.full((1, 64, 64), 11, np.uint8), np.full((1, 64, 2), 0.5, np.float16)
    >>> experts = pack_int4(codes, scales, codes[..., :32], scales[..., :1])
    >>> len(experts), experts.format.name
    (1, 'INT4')
    """
    if (gate_up_zeros is None) != (down_zeros is None):
        raise ValueError("gate_up_zeros and down_zeros must both be given, or none: pass 8 for the one that is none.")
    first = _packed_int4("gate_up", gate_up, gate_up_scales, gate_up_zeros)
    second = _packed_int4("down", down, down_scales, down_zeros)
    check_layer((len(first.words), first.rows, first.dim), (len(second.words), second.rows, second.dim))
    return PackedExperts(first, second)


def _packed_int4(name: str, codes: Any, scales: Any, zeros: Any) -> Matrices:
    """Pack one matrix in INT4 or UINT4 per expert; each is asked for once."""
    count = len(codes)
    format = Format.INT4 if zeros is None else Format.UINT4
    if count == 0 or len(scales) != count or (zeros is not None and len(zeros) != count):
        raise ValueError(f"{name}, {name}_scales and {name}_zeros must have an expert each, and as many: pass a layer.")
    words: NDArray[np.uint32] = np.empty(0, np.uint32)
    held: NDArray[Any] = np.empty(0, format.scale_type)
    shape, group = (0, 0), 0
    for e in range(count):
        own = checked(f"{name}[{e}]", codes[e], "R C", np.uint8)
        factors = _fp32(checked(f"{name}_scales[{e}]", scales[e], "R G", *_PACKED_FROM))
        rows, columns = own.shape
        groups = factors.shape[1]
        if e == 0:
            if 0 in (rows, groups) or columns % groups or columns // groups % 8 or columns == 0:
                raise ValueError(
                    f"{name}_scales[0] must have groups of a multiple of 8 columns, not {groups} for {columns}: pass "
                    "the scales of one matrix."
                )
            shape, group = own.shape, columns // groups
            blocks = -(-rows // ROWS)
            words = empty_in_huge_pages((count, blocks, columns // 8, ROWS), np.uint32)
            held = empty_in_huge_pages((count, blocks, groups, ROWS), format.scale_type)
        if own.shape != shape or factors.shape != (rows, shape[1] // group):
            raise ValueError(
                f"{name}[{e}] must be {shape} with scales {(shape[0], shape[1] // group)}, not {own.shape} and "
                f"{factors.shape}: pass one layer's experts."
            )
        if not _reorder_int4(np.ascontiguousarray(own), words[e]):
            raise ValueError(f"{name}[{e}] must have codes from 0 to 15: unpack them first.")
        if not np.isfinite(factors).all():
            raise ValueError(f"{name}_scales[{e}] must be finite: repair the checkpoint.")
        held[e] = _in_lanes(factors if zeros is None else _with_zeros(f"{name}_zeros[{e}]", zeros[e], factors))
    return Matrices(words, held, *shape, format, group)


def _with_zeros(name: str, given: Any, scales: NDArray[np.float32]) -> NDArray[np.int32]:
    """Scales (R, G) with the zero points of their groups in their last bits, as UINT4 has them."""
    zeros = checked(name, given, "R G", np.uint8)
    bits = scales.view(np.int32)
    if zeros.shape != scales.shape or zeros.max(initial=0) > ZERO_BITS:
        raise ValueError(
            f"{name} must be {scales.shape} from 0 to {ZERO_BITS}, not {zeros.shape} up to {zeros.max(initial=0)}: "
            "pass one for each scale."
        )
    if (bits & ZERO_BITS).any():
        raise ValueError(f"the scales of {name} must have 20 bits of mantissa at most: round them to fp16 or bf16.")
    found: NDArray[np.int32] = bits | zeros
    return found


def _in_lanes(scales: NDArray[Any]) -> NDArray[Any]:
    """Scales (R, G) in the order of blocks (blocks, G, 64); those of rows that are missing are 0."""
    rows, groups = scales.shape
    padded = np.zeros((-(-rows // ROWS) * ROWS, groups), scales.dtype)
    padded[:rows] = scales
    return padded.reshape(-1, ROWS, groups).swapaxes(1, 2)


@compiled()
def _reorder_int4(codes: Any, words: Any) -> bool:
    """Copy rows of codes (R, C) to words (blocks, C / 8, 64); False if one is above 15.

    Four columns in a row lie in the low halves of a word's bytes, the next four in the high halves.
    """
    rows, columns = codes.shape
    every = np.uint8(0)
    for row in range(len(words) * ROWS):
        block = row // ROWS
        lane = row % ROWS
        for step in range(columns // 8):
            word = np.uint32(0)
            for place in range(8 if row < rows else 0):
                code = codes[row, 8 * step + place]
                every |= code
                word |= np.uint32(np.uint32(code) << np.uint32(8 * (place % 4) + 4 * (place // 4)))
            words[block, step, lane] = word
    return bool(every < 16)


@public
def pack_mxfp4(
    gate_up: Operand | Sequence[Operand],
    gate_up_scales: Operand | Sequence[Operand],
    down: Operand | Sequence[Operand],
    down_scales: Operand | Sequence[Operand],
) -> PackedExperts:
    """Copy experts in MXFP4, as checkpoints of GPT-OSS store them, into the layout that `fused_moe` reads.

    The weights keep their numbers, but for those whose scale is 2**-126 or smaller, which become 0.

    Parameters
    ----------
    gate_up : (E, 2 F, M / 32, 16) uint8, or E matrices (2 F, M / 32, 16)
        Two codes in a byte, the first in its low bits, 32 columns after the other.
    gate_up_scales : (E, 2 F, M / 32) uint8, or E matrices (2 F, M / 32)
        A scale of s means 2**(s - 127); 255, which means NaN, is refused.
    down : (E, M, F / 32, 16) uint8, or E matrices (M, F / 32, 16)
    down_scales : (E, M, F / 32) uint8, or E matrices (M, F / 32)

    Returns
    -------
    PackedExperts
        A copy; the original weights are no longer needed.

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes disagree, or a scale is NaN.

    Examples
    --------
    >>> codes, scales = np.full((1, 64, 2, 16), 0x22, np.uint8), np.full((1, 64, 2), 127, np.uint8)
    >>> experts = pack_mxfp4(codes, scales, codes[..., :1, :], scales[..., :1])
    >>> len(experts), experts.format.name
    (1, 'MXFP4')
    """
    first = _packed_mxfp4("gate_up", gate_up, gate_up_scales)
    second = _packed_mxfp4("down", down, down_scales)
    check_layer((len(first.words), first.rows, first.dim), (len(second.words), second.rows, second.dim))
    return PackedExperts(first, second)


def _packed_mxfp4(name: str, codes: Any, exponents: Any) -> Matrices:
    """Pack one matrix in MXFP4 per expert; each is asked for once."""
    count = len(codes)
    if count == 0 or len(exponents) != count:
        raise ValueError(f"{name} and {name}_scales must have an expert at least, and as many of them: pass one layer.")
    words: NDArray[np.uint32] = np.empty(0, np.uint32)
    scales: NDArray[np.uint8] = np.empty(0, np.uint8)
    shape = (0, 0)
    for e in range(count):
        own = checked(f"{name}[{e}]", codes[e], "R G 16", np.uint8)
        powers = checked(f"{name}_scales[{e}]", exponents[e], "R G", np.uint8)
        rows, groups, half = own.shape
        if half != MXFP4_GROUP // 2 or powers.shape != (rows, groups) or 0 in own.shape:
            raise ValueError(
                f"{name}[{e}] must be (R, G, {MXFP4_GROUP // 2}) with scales (R, G), not {own.shape} and "
                f"{powers.shape}: pass MXFP4 as it is stored."
            )
        blocks = -(-rows // ROWS)
        if e == 0:
            shape = (rows, groups)
            words = empty_in_huge_pages((count, blocks, groups * MXFP4_GROUP // 8, ROWS), np.uint32)
            scales = empty_in_huge_pages((count, blocks, groups, ROWS), np.uint8)
        if (rows, groups) != shape:
            raise ValueError(
                f"{name}[{e}] must be {(*shape, half)} as {name}[0], not {own.shape}: pass one layer's experts."
            )
        if not _reorder_mxfp4(np.ascontiguousarray(own), powers, words[e], scales[e]):
            raise ValueError(f"{name}_scales[{e}] must not be 255, which is NaN: repair the checkpoint.")
    return Matrices(words, scales, shape[0], shape[1] * MXFP4_GROUP, Format.MXFP4, MXFP4_GROUP)


@compiled()
def _reorder_mxfp4(codes: Any, exponents: Any, words: Any, scales: Any) -> bool:
    """Copy rows of codes (R, G, 16) and exponents (R, G) to words (blocks, 4 G, 64) and scales (blocks, G, 64).

    Four columns in a row lie in the low halves of a word's bytes, the next four in the high halves. False if a scale is
    NaN.
    """
    rows, groups, _ = codes.shape
    for row in range(len(words) * ROWS):
        block = row // ROWS
        lane = row % ROWS
        for g in range(groups):
            power = exponents[row, g] if row < rows else np.uint8(0)
            if power == 255:
                return False
            scales[block, g, lane] = power - 1 if power > 0 else 0  # the numbers of a word's codes are doubled
            for step in range(4):
                word = np.uint32(0)
                for pair in range(4 if row < rows else 0):
                    both = np.uint32(codes[row, g, 4 * step + pair])
                    shift = np.uint32(16 * (pair % 2) + 4 * (pair // 2))
                    word |= np.uint32((both & np.uint32(15)) << shift)
                    word |= np.uint32((both >> np.uint32(4)) << np.uint32(shift + np.uint32(8)))
                words[block, 4 * g + step, lane] = word
    return True


class _Given:
    """The matrices (R, C) of a layer's experts as they were given, each checked when its turn comes."""

    def __init__(self, name: str, operands: Operand | Sequence[Operand]) -> None:
        self._name = name
        self._operands: Any = operands
        if not isinstance(operands, Sequence):
            self._operands = checked(name, operands, "E R C", *_PACKED_FROM)
        self._first = self._matrix(0) if len(self._operands) else np.empty((0, 0), np.float32)
        if 0 in self._first.shape:
            raise ValueError(f"{name} must have an expert with rows and columns at least: pass (E, R, C).")
        self.dtype = self._first.dtype
        self.shape = (len(self._operands), *self._first.shape)

    def _matrix(self, expert: int) -> NDArray[Any]:
        return checked(f"{self._name}[{expert}]", self._operands[expert], "R C", *_PACKED_FROM)

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


def checked_layer(
    gate_up: Operand | Sequence[Operand], down: Operand | Sequence[Operand]
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Check the matrices of a layer's experts and return them as lists, one matrix per expert."""
    first = _Given("gate_up", gate_up)
    second = _Given("down", down)
    check_layer(first.shape, second.shape)
    return [*first], [*second]


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
            full[: len(own), :dim] = _fp32(own)
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


def _fp32(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Rows of any accepted dtype in fp32; uint16 holds bfloat16 bits."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32)


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
        _reorder_mxfp4(*_as_mxfp4(full), words[None], scales[None])
        return words, scales
    if format is Format.UINT4:
        if not np.isfinite(full).all():
            raise ValueError(f"{name} must be finite to share scales: pack it as fp32 or bf16.")
        codes, scales = _as_uint4(full, group)
        _reorder_int4(codes, words[None])
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


@public
class QuantisedRows(NamedTuple):
    """One matrix of w = value * scale per expert, in the layout of `Quantised`.

    values (E, R, C) int8; or (E, R, C / 2) uint8, two numbers + 8 per byte: byte i of a group of G holds number i in
    its lower and number i + G / 2 in its upper half. scales (E, R, C / G) fp32.
    """

    values: NDArray[Any]
    scales: NDArray[np.float32]


@public
def experts_in_rows(experts: PackedExperts) -> tuple[QuantisedRows, QuantisedRows]:
    """Copy experts in INT8 or INT4 into rows, with the same numbers and scales.

    Parameters
    ----------
    experts : PackedExperts

    Returns
    -------
    gate_up, down : QuantisedRows
        ``Quantised(*map(torch.from_numpy, gate_up))`` is what `fused_moe` takes of tensors on a GPU.

    Raises
    ------
    ValueError
        If the experts are in another format, or the last group of a row is not full.

    Examples
    --------
    >>> packed = pack_experts(np.ones((1, 16, 8), np.float32), np.ones((1, 8, 8), np.float32), format="int8", group=8)
    >>> gate_up, down = experts_in_rows(packed)
    >>> gate_up.values.shape, int(gate_up.values.max()), down.scales.shape
    ((1, 16, 8), 127, (1, 8, 1))
    """
    return _in_rows("gate_up", experts.gate_up), _in_rows("down", experts.down)


def _in_rows(name: str, matrices: Matrices) -> QuantisedRows:
    if matrices.format not in _IN_ROWS:
        raise ValueError(
            f"{name} must be in INT8 or INT4, not in {matrices.format.name}: pass the matrices that were packed."
        )
    if matrices.dim % matrices.group:
        raise ValueError(
            f"{name} must have columns that fill groups of {matrices.group}, not {matrices.dim}: pack with a group "
            "that divides them."
        )
    if matrices.format is Format.INT4 and matrices.group % 16:
        raise ValueError(f"{name} must have groups of a multiple of 16, not {matrices.group}: pack it so.")
    count = len(matrices.words)
    groups = matrices.dim // matrices.group
    bits = matrices.format.bits
    values = empty_in_huge_pages((count, matrices.rows, matrices.dim * bits // 8), _IN_ROWS[matrices.format])
    scales = empty_in_huge_pages((count, matrices.rows, groups), np.float32)
    for expert in range(count):
        words = stored_words(matrices, expert)[: matrices.rows]
        found = _by_halves(words, groups) if bits == 4 else words ^ np.uint32(0x80808080)
        values[expert] = found.view(values.dtype)
        scales[expert] = matrices.scales[expert].transpose(0, 2, 1).reshape(-1, groups)[: matrices.rows]
    return QuantisedRows(values, scales)


def _by_halves(words: NDArray[np.uint32], groups: int) -> NDArray[np.uint32]:
    """Words (R, C / 8) of four numbers in low and four in high halves of bytes, as `QuantisedRows` has them."""
    both = words.reshape(len(words), groups, 2, -1)
    low = both[:, :, 0]
    high = both[:, :, 1]
    found = np.empty((*low.shape, 2), np.uint32)
    mask = np.uint32(0x0F0F0F0F)
    found[..., 0] = (low & mask) | (high & mask) << np.uint32(4)
    found[..., 1] = (low >> np.uint32(4)) & mask | (high & ~mask)
    return found.reshape(len(words), -1)
