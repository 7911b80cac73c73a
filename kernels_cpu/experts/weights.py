"""Packed weights of routed experts: blocks of 64 rows, with columns in order.

A matrix (R, C) becomes 32-bit words (blocks, C / per word, 64). Word [b, s, r] holds the elements s * per word, ... of
row 64 b + r, the first in its lowest bits; with INT4 four elements are in the low nibbles of its bytes and the next
four in the high nibbles. A block is thus one stream in memory, the lanes of a register of words are rows, and no sum is
taken across lanes. INT8 and INT4 are symmetric with one scale per row and group of columns; words hold the number plus
128 or 8. MXFP4 has the order of INT4; its words hold codes of 4-bit floats, and the scale of 32 columns is an exponent.
Weights in place are a view of the same words with other strides: the 64 rows of a block are contiguous.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, checked, contiguous, float64, host_array, whole
from ..codegen.compiled import compiled
from ..codegen.rounding import bfloat16_pairs
from ..declarations import public
from ..machine.huge_pages import empty_in_huge_pages

ROWS = 64
"""Rows of a block."""
STREAMS = 4
"""Streams in which a block may be read side by side; without groups the number of steps is a multiple of it."""
COLUMNS = 32
"""Rows in place have a multiple of this many columns: whole registers on every code path."""
GROUP = 128
"""Default number of columns that share a scale."""
LINE = 64
"""Bytes of a cache line, on which packed memory begins."""
_LINE_WORDS = LINE // 4


@public
class Format(enum.IntEnum):
    """Number formats of packed weights; Numba can pass their values as literals."""

    FP32 = 1
    BF16 = 2
    INT8 = 4
    INT4 = 8
    MXFP4 = 16

    @property
    def per_word(self) -> int:
        """Elements per 32-bit word."""
        return 8 if self is Format.MXFP4 else int(self)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 32 // self.per_word

    @property
    def scaled(self) -> bool:
        """True if groups of columns share a scale."""
        return self in (Format.INT8, Format.INT4, Format.MXFP4)

    @property
    def scale_type(self) -> Any:
        """Type of a scale: fp32, or uint8 for an exponent."""
        return np.uint8 if self is Format.MXFP4 else np.float32

    def weight_bytes(self, group: int = 128) -> float:
        """Size of one weight with its share of the scale of `group` columns, which are 32 in MXFP4 [byte]."""
        if self is Format.MXFP4:
            return (self.bits + 8 / MXFP4_GROUP) / 8
        return self.bits / 8 + (4 / group if self.scaled else 0)

    @property
    def zero(self) -> int:
        """The number that stands for 0 where the weights are multiplied as unsigned bytes."""
        if self is Format.MXFP4:
            return MXFP4_BYTES[0]
        return 1 << (self.bits - 1) if self.scaled else 0


MXFP4_GROUP = 32
"""Columns that share a scale in MXFP4."""
MXFP4_BYTES = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the number of each code (OCP Microscaling Formats 1.0, E2M1) plus 12, so that it is an unsigned byte."""

_MXFP4_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
"""Largest magnitude that is rounded to each code but the last."""
_MXFP4_BOUNDS[1::2] = np.nextafter(_MXFP4_BOUNDS[1::2], np.float32(0))  # a tie goes to the code that is even
_PACKED_FROM = (np.float32, np.uint16, np.float16)
"""Types of matrices that can be packed; uint16 holds bfloat16 bits."""
_TYPES: dict[Format, Any] = {
    Format.FP32: np.float32,
    Format.BF16: np.uint16,
    Format.INT8: np.int8,
    Format.INT4: np.uint8,
    Format.MXFP4: np.uint8,
}
"""Type of matrices in the order of blocks; uint8 holds two numbers, and the type of their scales tells the format."""


@dataclass(frozen=True)
class Matrices:
    """One packed matrix per expert.

    Attributes
    ----------
    words : (E, blocks, steps, 64) uint32
        Contiguous if packed, else a view of rows in place.
    scales : (E, blocks, groups, 64) fp32, in MXFP4 uint8
        Empty unless the format has scales. In MXFP4 a scale of s means 2**(s - 127), and 0 means 0.
    rows, dim : int
        Rows and columns of each matrix, without the padding of blocks and groups.
    format : Format
    group : int
        Columns that share a scale.
    """

    words: NDArray[np.uint32]
    scales: NDArray[Any]
    rows: int
    dim: int
    format: Format
    group: int

    @property
    def width(self) -> int:
        """Number of columns including the padding of the last group or word."""
        return int(self.words.shape[2]) * self.format.per_word

    @property
    def in_place(self) -> bool:
        """True if the words are a view of rows in place."""
        return not self.words.flags.c_contiguous

    @property
    def nbytes(self) -> int:
        """Bytes of words and scales."""
        return self.words.nbytes + self.scales.nbytes

    @property
    def blocks(self) -> NDArray[Any]:
        """The words as `experts_of_blocks` takes them: (E, R, C) of the format's type, or (E, R, C / 2) for 4 bits."""
        experts, blocks, _, _ = self.words.shape
        numbers: NDArray[Any] = self.words.reshape(experts, -1).view(_TYPES[self.format])
        return numbers.reshape(experts, blocks * ROWS, -1)


@public
@dataclass(frozen=True)
class PackedExperts:
    """The routed experts of one layer, from `pack_experts`, `pack_mxfp4`, `experts_of_blocks` or `experts_in_place`.

    Attributes
    ----------
    gate_up, down : Matrices
        Per expert the rows of the gate, then those of the up projection; and the down projection.
    UNIT : int
        Weights whose M and F are multiples of it have no padding.
    """

    UNIT: ClassVar[int] = ROWS
    gate_up: Matrices
    down: Matrices

    @property
    def format(self) -> Format:
        """Number format of the weights."""
        return self.gate_up.format

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return self.gate_up.nbytes + self.down.nbytes

    def __len__(self) -> int:
        return len(self.gate_up.words)


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
        largest magnitude over 127 or 7), or "mxfp4" (as OCP Microscaling Formats 1.0, section 6.3); by default bf16 for
        bf16 weights, else fp32.
    group : int
        Columns that share a scale in INT8 and INT4, a multiple of 8; 32 do in MXFP4.

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
    _check_layer(first.shape, second.shape)
    if whole("group", group) < 8 or group % 8:
        raise ValueError(f"group must be a multiple of 8 columns, not {group}: leave it out for {GROUP}.")
    chosen = _format(format, first.dtype)
    group = MXFP4_GROUP if chosen is Format.MXFP4 else group
    return PackedExperts(_packed("gate_up", first, chosen, group), _packed("down", second, chosen, group))


@public
def experts_in_place(gate_up: Operand, down: Operand) -> PackedExperts:
    """Use the weights of a layer's experts in place, without a copy, for `fused_moe`.

    They are at least as fast as packed weights where activations stay in fp32 (see `fused_moe`) and no matrix registers
    are used.

    Parameters
    ----------
    gate_up : (E, 2 F, M) torch.bfloat16, or uint16 that holds bfloat16 bits; C-contiguous
        Per expert the rows of the gate, then those of the up projection; 2 F and M are multiples of 64.
    down : (E, M, F), as gate_up
        F is a multiple of 32.

    Returns
    -------
    PackedExperts
        A view of the same memory: later changes of the weights take effect.

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes disagree or are not such multiples, or the memory is not contiguous or not aligned to four bytes.

    Examples
    --------
    >>> experts = experts_in_place(np.zeros((2, 64, 64), np.uint16), np.zeros((2, 64, 32), np.uint16))
    >>> len(experts), experts.format.name
    (2, 'BF16')
    """
    first = checked("gate_up", gate_up, "E R C", np.uint16)
    second = checked("down", down, "E R C", np.uint16)
    if 0 in first.shape:
        raise ValueError("gate_up must have an expert with rows and columns at least: pass (E, 2 F, M).")
    _check_layer(first.shape, second.shape)
    return PackedExperts(_in_place("gate_up", first), _in_place("down", second))


def _in_place(name: str, array: NDArray[Any]) -> Matrices:
    """View matrices (E, R, C) of bfloat16 bits as words, after a check of shape and memory layout."""
    count, rows, dim = array.shape
    if rows % ROWS or dim % COLUMNS or not array.flags.c_contiguous or array.ctypes.data % 4:
        raise ValueError(
            f"{name} must be C-contiguous from a multiple of 4 bytes on, with multiples of {ROWS} rows and {COLUMNS} "
            f"columns, not {array.shape} with strides {array.strides}: use pack_experts."
        )
    words = array.view(np.uint32).reshape(count, rows // ROWS, ROWS, dim // 2).swapaxes(2, 3)
    return Matrices(words, np.empty((count, rows // ROWS, 0, ROWS), np.float32), rows, dim, Format.BF16, GROUP)


@public
def experts_of_blocks(
    gate_up: Operand, down: Operand, gate_up_scales: Operand | None = None, down_scales: Operand | None = None
) -> PackedExperts:
    """Use packed weights that lie anywhere in memory, such as copies of what `pack_experts` returned, without a copy.

    Only weights without padding: M and F are multiples of 64, and of the columns that share a scale.

    Parameters
    ----------
    gate_up : (E, 2 F, M) fp32, torch.bfloat16, uint16 that holds bfloat16 bits, or int8; (E, 2 F, M / 2) uint8 for INT4
        and MXFP4
        `PackedExperts.gate_up.blocks`, or a copy that begins on a multiple of 64 bytes.
    down : (E, M, F), or (E, M, F / 2) uint8; as gate_up
    gate_up_scales : (E, 2 F / 64, groups, 64) fp32, or uint8 for MXFP4, optional
        `PackedExperts.gate_up.scales` of INT8, INT4 and MXFP4, or a copy. An exponent of MXFP4 is at most 254.
    down_scales : (E, M / 64, groups, 64), as gate_up_scales, optional

    Returns
    -------
    PackedExperts
        A view of the same memory: later changes of the weights take effect.

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes disagree or are not such multiples, the memory is not contiguous or begins elsewhere, or scales are
        missing or superfluous.

    Examples
    --------
    >>> packed = pack_experts(np.ones((2, 128, 64), np.float32), np.ones((2, 64, 64), np.float32))
    >>> experts = experts_of_blocks(packed.gate_up.blocks, packed.down.blocks)
    >>> len(experts), experts.format.name
    (2, 'FP32')
    """
    first = _of_blocks("gate_up", gate_up, gate_up_scales)
    second = _of_blocks("down", down, down_scales)
    if first.format is not second.format:
        raise ValueError(
            f"down must be {first.format.name} as gate_up, not {second.format.name}: pass the matrices of one layer."
        )
    _check_layer((len(first.words), first.rows, first.dim), (len(second.words), second.rows, second.dim))
    return PackedExperts(first, second)


def _of_blocks(name: str, operand: Operand, scales: Operand | None) -> Matrices:
    """View matrices in the order of blocks as words."""
    array = checked(name, operand, "E R C", *dict.fromkeys(_TYPES.values()))
    format = next(format for format, dtype in _TYPES.items() if array.dtype == dtype)
    steps = None if scales is None else host_array(f"{name}_scales", scales)
    if format is Format.INT4 and steps is not None and steps.dtype == np.uint8:
        format = Format.MXFP4
    count, rows, dim = array.shape
    dim *= 2 if array.dtype == np.uint8 else 1
    if 0 in array.shape or rows % ROWS or dim % ROWS or not array.flags.c_contiguous or array.ctypes.data % LINE:
        raise ValueError(
            f"{name} must be C-contiguous from a multiple of {LINE} bytes on, with multiples of {ROWS} rows and "
            f"columns, not {array.shape} with strides {array.strides}: pass what pack_experts returned."
        )
    words = array.reshape(count, -1).view(np.uint32).reshape(count, rows // ROWS, -1, ROWS)
    if not format.scaled:
        if scales is not None:
            raise ValueError(f"{name}_scales must be left out: {format.name} has none.")
        return Matrices(words, np.empty((count, rows // ROWS, 0, ROWS), np.float32), rows, dim, format, GROUP)
    if scales is None:
        raise ValueError(f"{name}_scales must be given for {format.name}: pass the scales that pack_experts returned.")
    steps = contiguous(f"{name}_scales", checked(f"{name}_scales", scales, "E R/64 G 64", format.scale_type))
    groups = steps.shape[2]
    if steps.shape != (count, rows // ROWS, groups, ROWS) or groups == 0 or dim % groups or dim // groups % 8:
        raise ValueError(
            f"{name}_scales must be ({count}, {rows // ROWS}, groups, {ROWS}) with groups of a multiple of 8 columns, "
            f"not {steps.shape}: pass the scales that pack_experts returned."
        )
    if format is Format.MXFP4 and dim // groups != MXFP4_GROUP:
        raise ValueError(
            f"{name}_scales must have {dim / MXFP4_GROUP:g} groups of {MXFP4_GROUP} columns, not {groups}: pass the "
            "scales that pack_mxfp4 returned."
        )
    if steps.ctypes.data % LINE:
        raise ValueError(f"{name}_scales must begin on a multiple of {LINE} bytes: copy them to such a place.")
    return Matrices(words, steps, rows, dim, format, dim // groups)


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
    _check_layer((len(first.words), first.rows, first.dim), (len(second.words), second.rows, second.dim))
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
    _check_layer(first.shape, second.shape)
    return [*first], [*second]


def _check_layer(gate_up: tuple[int, ...], down: tuple[int, ...]) -> None:
    """Check the sizes (E, 2 F, M) and (E, M, F) of one layer's matrices."""
    count, rows, width = gate_up
    if rows % 2:
        raise ValueError(f"gate_up must have an even number of rows, not {rows}: pass (E, 2 F, M), gates before ups.")
    want = (count, width, rows // 2)
    if down != want:
        raise ValueError(f"down must be {want}, which gate_up asks for, not {down}: pass (E, M, F) of the same layer.")


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
    unit = group if format.scaled else STREAMS * format
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
    if not _round(full, format.zero, format is Format.INT4, words, scales):
        raise ValueError(f"{name} must be finite to share scales: pack it as fp32 or bf16.")
    return words, scales


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


def aligned(dtype: Any, *shape: int) -> NDArray[Any]:
    """A new array that begins on a cache line, not cleared."""
    room = np.empty(math.prod(shape) * np.dtype(dtype).itemsize + LINE, np.uint8)
    return np.ndarray(shape, dtype, room, -room.ctypes.data % LINE)


def unpacked(matrices: Matrices, experts: Iterable[int]) -> list[NDArray[np.float64]]:
    """Unpack the matrices (rows, dim) of some experts to float64."""
    return [_unpacked(matrices, expert) for expert in experts]


def _unpacked(matrices: Matrices, expert: int) -> NDArray[np.float64]:
    words = matrices.words[expert].transpose(0, 2, 1).reshape(-1, matrices.words.shape[2])
    stored = matrices.format
    if stored is Format.FP32:
        values = float64("words", words.view(np.float32))
    elif stored is Format.BF16:
        values = float64("words", np.ascontiguousarray(words).view(np.uint16))
    else:
        numbers = np.ascontiguousarray(words).view(np.uint8)
        if stored.per_word == 8:
            fours = numbers.reshape(len(words), -1, 4)
            numbers = np.concatenate([fours & 15, fours >> 4], axis=2).reshape(len(words), -1)
        if stored is Format.MXFP4:
            numbers = np.array(MXFP4_BYTES)[numbers]
        scales = matrices.scales[expert].transpose(0, 2, 1).reshape(len(words), -1)
        if stored is Format.MXFP4:
            scales = np.where(scales > 0, 2.0 ** (scales.astype(float) - 127), 0)
        values = (numbers.astype(float) - stored.zero) * np.repeat(scales.astype(float), matrices.group, axis=1)
    return np.asarray(values[: matrices.rows, : matrices.dim], np.float64)
