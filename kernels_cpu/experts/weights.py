"""Packed weights of routed experts: blocks of 64 rows, with columns in order.

A matrix (R, C) becomes 32-bit words (blocks, C / per word, 64). Word [b, s, r] holds the elements s * per word, ... of
row 64 b + r, the first in its lowest bits; with INT4 four elements are in the low nibbles of its bytes and the next
four in the high nibbles. A block is thus one stream in memory, the lanes of a register of words are rows, and no sum is
taken across lanes. INT8 and INT4 are symmetric with one scale per row and group of columns; words hold the number plus
128 or 8. UINT4 is INT4 with a zero point per row and group in the place of 8, in the lowest bits of the scale. MXFP4
has the order of INT4; its words hold codes of 4-bit floats, and the scale of 32 columns is an exponent.
Weights in place are a view of the same words with other strides: the 64 rows of a block are contiguous.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import float64
from ..declarations import public

ROWS = 64
"""Rows of a block."""
GROUP = 128
"""Default number of columns that share a scale."""
LINE = 64
"""Bytes of a cache line, on which packed memory begins."""


@public
class Format(enum.IntEnum):
    """Number formats of packed weights; Numba can pass their values as literals."""

    FP32 = 1
    BF16 = 2
    INT8 = 4
    INT4 = 8
    MXFP4 = 16
    UINT4 = 32

    @property
    def per_word(self) -> int:
        """Elements per 32-bit word."""
        return min(8, int(self))

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 32 // self.per_word

    @property
    def scaled(self) -> bool:
        """True if groups of columns share a scale."""
        return self >= Format.INT8

    @property
    def scale_type(self) -> Any:
        """Type of a scale: fp32, uint8 for an exponent, or int32 for the bits of an fp32 with its zero point."""
        return {Format.MXFP4: np.uint8, Format.UINT4: np.int32}.get(self, np.float32)

    def weight_bytes(self, group: int = 128) -> float:
        """Size of one weight with its share of the scale of `group` columns, which are 32 in MXFP4 [byte]."""
        if self is Format.MXFP4:
            return (self.bits + 8 / MXFP4_GROUP) / 8
        return self.bits / 8 + (4 / group if self.scaled else 0)

    @property
    def zero(self) -> int:
        """The number that stands for 0 where the weights are multiplied as unsigned bytes.

        In UINT4, whose groups have numbers of their own, it is the factor of these: 1.
        """
        if self is Format.MXFP4:
            return MXFP4_BYTES[0]
        if self is Format.UINT4:
            return 1
        return 1 << (self.bits - 1) if self.scaled else 0


MXFP4_GROUP = 32
"""Columns that share a scale in MXFP4."""
ZERO_BITS = 15
"""The bits of a scale of UINT4 that hold the group's zero point; those of the number itself are 0 there."""
MXFP4_BYTES = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the number of each code (OCP Microscaling Formats 1.0, E2M1) plus 12, so that it is an unsigned byte."""

TYPES: dict[Format, Any] = {
    Format.FP32: np.float32,
    Format.BF16: np.uint16,
    Format.INT8: np.int8,
    Format.INT4: np.uint8,
    Format.MXFP4: np.uint8,
    Format.UINT4: np.uint8,
}
"""Type of matrices in the order of blocks; uint8 holds two numbers, and the type of their scales tells the format."""


@dataclass(frozen=True)
class Matrices:
    """One packed matrix per expert.

    Attributes
    ----------
    words : (E, blocks, steps, 64) uint32
        Contiguous if packed, else a view of rows in place.
    scales : (E, blocks, groups, 64) fp32, in MXFP4 uint8, in UINT4 int32
        Empty unless the format has scales. In MXFP4 a scale of s means 2**(s - 127), and 0 means 0. In UINT4 it has the
        bits of an fp32, the last four of which are the zero point.
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
        numbers: NDArray[Any] = self.words.reshape(experts, -1).view(TYPES[self.format])
        return numbers.reshape(experts, blocks * ROWS, -1)


@public
@dataclass(frozen=True)
class PackedExperts:
    """The routed experts of one layer, from `pack_experts`, `pack_int4`, `pack_mxfp4`, or of memory elsewhere.

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
    def pieces(self) -> int:
        """Most slices of the inner dim with whole blocks of rows and whole groups of columns."""
        piece = math.lcm(ROWS, self.down.group) if self.format.scaled else ROWS
        return 1 if self.down.dim % piece else self.down.dim // piece

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return self.gate_up.nbytes + self.down.nbytes

    def __len__(self) -> int:
        return len(self.gate_up.words)


def check_layer(gate_up: tuple[int, ...], down: tuple[int, ...]) -> None:
    """Check the sizes (E, 2 F, M) and (E, M, F) of one layer's matrices."""
    count, rows, width = gate_up
    if rows % 2:
        raise ValueError(f"gate_up must have an even number of rows, not {rows}: pass (E, 2 F, M), gates before ups.")
    want = (count, width, rows // 2)
    if down != want:
        raise ValueError(f"down must be {want}, which gate_up asks for, not {down}: pass (E, M, F) of the same layer.")


def aligned(dtype: Any, *shape: int) -> NDArray[Any]:
    """A new array that begins on a cache line unless it is empty, not cleared."""
    if 0 in shape:
        return np.empty(shape, dtype)
    room = np.empty(math.prod(shape) * np.dtype(dtype).itemsize + LINE, np.uint8)
    return np.ndarray(shape, dtype, room, -room.ctypes.data % LINE)


def unpacked(matrices: Matrices, experts: Iterable[int]) -> list[NDArray[np.float64]]:
    """Unpack the matrices (rows, dim) of some experts to float64."""
    return [_unpacked(matrices, expert) for expert in experts]


def _unpacked(matrices: Matrices, expert: int) -> NDArray[np.float64]:
    stored = matrices.format
    if not stored.scaled:
        words = stored_words(matrices, expert)
        floats = words.view(np.float32 if stored is Format.FP32 else np.uint16)
        values = float64("words", floats)
    else:
        numbers = stored_numbers(matrices, expert)
        if stored is Format.MXFP4:
            numbers = np.array(MXFP4_BYTES)[numbers]
        scales = matrices.scales[expert].transpose(0, 2, 1).reshape(len(numbers), -1)
        zeros: Any = float(stored.zero)
        if stored is Format.MXFP4:
            scales = np.where(scales > 0, 2.0 ** (scales.astype(float) - 127), 0)
        if stored is Format.UINT4:
            zeros = np.repeat(scales & ZERO_BITS, matrices.group, axis=1)
            scales = (scales & ~ZERO_BITS).view(np.float32)
        values = (numbers - zeros) * np.repeat(scales.astype(float), matrices.group, axis=1)
    return np.asarray(values[: matrices.rows, : matrices.dim], np.float64)


def stored_numbers(matrices: Matrices, expert: int) -> NDArray[np.uint8]:
    """The numbers of an expert in a format with scales, as they are stored, in rows with their padding."""
    numbers = stored_words(matrices, expert).view(np.uint8)
    if matrices.format.per_word == 4:
        return numbers
    fours = numbers.reshape(len(numbers), -1, 4)
    return np.concatenate([fours & 15, fours >> 4], axis=2).reshape(len(numbers), -1)


def stored_words(matrices: Matrices, expert: int) -> NDArray[np.uint32]:
    """The words of an expert in rows, with their padding."""
    steps = matrices.words.shape[2]
    return np.ascontiguousarray(matrices.words[expert].transpose(0, 2, 1).reshape(-1, steps))
