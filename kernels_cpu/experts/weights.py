"""Weights of routed experts in the layout that the expert kernels read: blocks of 64 rows, columns in order.

A matrix (R, C) becomes words of 32 bits, (blocks, C / per word, 64): word [b, s, r] holds the elements
s * per word, ... of row 64 b + r, the first in its lowest bits; of INT4 the low nibbles of the four bytes come first,
then the high ones. So a block is one stream in memory, a register of words serves as many rows, and no sum is taken
across lanes. INT8 and INT4 are symmetric per row and group of columns; words hold the number plus 128 or 8. Weights
left in place are the same words by other strides: the 64 rows of a block lie one behind the other.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, checked, float64, whole
from ..codegen.rounding import bfloat16_pairs
from ..declarations import public

ROWS = 64
"""Rows of a block."""
STREAMS = 4
"""Parts of a block, of equal numbers of steps where there are no groups, that may be read side by side."""
COLUMNS = 32
"""Columns, or a multiple of so many, that rows in place have: whole registers on every code path."""
GROUP = 128
"""Columns that share a scale, unless chosen."""


@public
class Format(enum.IntEnum):
    """Number formats of packed weights: elements per word of 32 bits; an int, because Numba passes it as a literal."""

    FP32 = 1
    BF16 = 2
    INT8 = 4
    INT4 = 8

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 32 // self

    @property
    def scaled(self) -> bool:
        """True if groups of columns have scales."""
        return self in (Format.INT8, Format.INT4)

    def weight_bytes(self, group: int = 128) -> float:
        """Bytes of one weight with its share of the scale of `group` columns [byte]."""
        return self.bits / 8 + (4 / group if self.scaled else 0)

    @property
    def zero(self) -> int:
        """Code of 0 in a word."""
        return 1 << (self.bits - 1) if self.scaled else 0


@dataclass(frozen=True)
class Matrices:
    """One packed matrix per expert.

    Attributes
    ----------
    words : (E, blocks, steps, 64) uint32
        Contiguous, or a view of rows as they lie.
    scales : (E, blocks, groups, 64) fp32
        Empty unless the format has scales.
    rows, dim : int
        Rows and columns of each matrix, without what fills up blocks and groups.
    format : Format
    group : int
        Columns that share a scale.
    """

    words: NDArray[np.uint32]
    scales: NDArray[np.float32]
    rows: int
    dim: int
    format: Format
    group: int

    @property
    def width(self) -> int:
        """Columns with those that fill up the last group or word."""
        return int(self.words.shape[2]) * self.format

    @property
    def in_place(self) -> bool:
        """True if the words are those of the rows as they lie."""
        return not self.words.flags.c_contiguous

    @property
    def nbytes(self) -> int:
        """Bytes of words and scales."""
        return self.words.nbytes + self.scales.nbytes


@public
@dataclass(frozen=True)
class PackedExperts:
    """The routed experts of one layer, packed by `pack_experts` or left where they are by `experts_in_place`.

    Attributes
    ----------
    gate_up, down : Matrices
        Per expert the gate's rows and then the up projection's, and the down projection.
    """

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
        Per expert the rows of the gate and then of the up projection. A list's matrices may lie anywhere.
    down : (E, M, F), or E matrices (M, F); as gate_up
    format : Format or its name, optional
        "fp32", "bf16" (rounded to nearest even), "int8" or "int4" (rounded to the nearest multiple of the group's
        largest magnitude over 127 or 7); unless given bf16 for bf16 weights, else fp32.
    group : int
        Columns that share a scale in INT8 and INT4, a multiple of 8.

    Returns
    -------
    PackedExperts
        Of new memory; the weights given are needed no longer.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes disagree, the format is unknown, or a weight that shares a scale is not finite.

    Examples
    --------
    >>> experts = pack_experts(np.ones((2, 6, 4), np.float32), np.ones((2, 4, 3), np.float32), format="int8")
    >>> len(experts), experts.format.name
    (2, 'INT8')
    """
    first, second = checked_layer(gate_up, down)
    if whole("group", group) < 8 or group % 8:
        raise ValueError(f"group must be a multiple of 8 columns, not {group}: leave it out for {GROUP}.")
    chosen = _format(format, first[0].dtype)
    return PackedExperts(_packed("gate_up", first, chosen, group), _packed("down", second, chosen, group))


@public
def experts_in_place(gate_up: Operand, down: Operand) -> PackedExperts:
    """The weights of a layer's experts for `fused_moe`, read where they lie: nothing is copied.

    As fast as what `pack_experts` makes, or faster, where activations stay fp32 (see `fused_moe`) and no matrix
    registers serve.

    Parameters
    ----------
    gate_up : (E, 2 F, M) torch.bfloat16, or uint16 that holds bfloat16 bits; C-contiguous
        Per expert the rows of the gate and then of the up projection; 2 F a multiple of 64 and M of 64.
    down : (E, M, F), as gate_up
        F a multiple of 32.

    Returns
    -------
    PackedExperts
        Of the same memory: later changes of the weights count.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes disagree or are no such multiples, or the memory is not contiguous or begins at no multiple of four
        bytes.

    Examples
    --------
    >>> experts = experts_in_place(np.zeros((2, 64, 64), np.uint16), np.zeros((2, 64, 32), np.uint16))
    >>> len(experts), experts.format.name
    (2, 'BF16')
    """
    first, second = (checked(name, m, "E R C", np.uint16) for name, m in (("gate_up", gate_up), ("down", down)))
    if 0 in first.shape:
        raise ValueError("gate_up must have an expert with rows and columns at least: pass (E, 2 F, M).")
    _check(first, second)
    return PackedExperts(_in_place("gate_up", first), _in_place("down", second))


def _in_place(name: str, array: NDArray[Any]) -> Matrices:
    count, rows, dim = array.shape
    if rows % ROWS or dim % COLUMNS or not array.flags.c_contiguous or array.ctypes.data % 4:
        raise ValueError(
            f"{name} must be C-contiguous from a multiple of 4 bytes on, with multiples of {ROWS} rows and {COLUMNS} "
            f"columns, not {array.shape} with strides {array.strides}: use pack_experts."
        )
    words = array.view(np.uint32).reshape(count, rows // ROWS, ROWS, dim // 2).swapaxes(2, 3)
    return Matrices(words, np.empty((count, rows // ROWS, 0, ROWS), np.float32), rows, dim, Format.BF16, GROUP)


def checked_layer(
    gate_up: Operand | Sequence[Operand], down: Operand | Sequence[Operand]
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """The matrices of each expert, of shapes that go together."""
    first = _several("gate_up", gate_up)
    second = _several("down", down)
    _check(first, second)
    return first, second


def _several(name: str, operands: Operand | Sequence[Operand]) -> list[NDArray[Any]]:
    dtypes = (np.float32, np.uint16, np.float16)
    several: Any = operands if isinstance(operands, Sequence) else checked(name, operands, "E R C", *dtypes)
    arrays = [checked(f"{name}[{e}]", m, "R C", *dtypes) for e, m in enumerate(several)]
    if not arrays or 0 in arrays[0].shape:
        raise ValueError(f"{name} must have an expert with rows and columns at least: pass (E, R, C).")
    for e, array in enumerate(arrays):
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise ValueError(
                f"{name}[{e}] must be {arrays[0].shape} {arrays[0].dtype} as {name}[0], not {array.shape} "
                f"{array.dtype}: pass experts of one layer."
            )
    return arrays


def _check(gate_up: Sequence[NDArray[Any]] | NDArray[Any], down: Sequence[NDArray[Any]] | NDArray[Any]) -> None:
    (rows, width) = gate_up[0].shape
    found = (len(down), *down[0].shape)
    if rows % 2:
        raise ValueError(f"gate_up must have an even number of rows, not {rows}: pass (E, 2 F, M), gates before ups.")
    want = (len(gate_up), width, rows // 2)
    if found != want:
        raise ValueError(f"down must be {want}, which gate_up asks for, not {found}: pass (E, M, F) of the same layer.")


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


def _packed(name: str, matrices: Sequence[NDArray[Any]], format: Format, group: int) -> Matrices:
    rows, dim = matrices[0].shape
    unit = group if format.scaled else STREAMS * format
    width = -(-dim // unit) * unit
    blocks = -(-rows // ROWS)
    words = aligned(np.uint32, len(matrices), blocks, width // format, ROWS)
    groups = width // group if format.scaled else 0
    scales = aligned(np.float32, len(matrices), blocks, groups, ROWS)
    for e, matrix in enumerate(matrices):
        for b in range(blocks):  # one block at a time keeps the scratch memory small
            part = matrix[b * ROWS : (b + 1) * ROWS]
            full = np.zeros((ROWS, width), np.float32)
            full[: len(part), :dim] = _fp32(part)
            words[e, b], scales[e, b] = _block(f"{name}[{e}]", full, format, group)
    return Matrices(words, scales, rows, dim, format, group)


def _fp32(part: NDArray[Any]) -> NDArray[np.float32]:
    if part.dtype == np.uint16:
        return (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return part.astype(np.float32)


def _block(name: str, full: NDArray[np.float32], format: Format, group: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Words (steps, 64) and scales (groups, 64) of 64 whole rows."""
    none = np.empty((0, ROWS), np.float32)
    if format is Format.FP32:
        return full.view(np.uint32).T, none
    if format is Format.BF16:
        words = np.empty(full.size // 2, np.uint32)
        bfloat16_pairs(full.view(np.uint32).ravel(), words)
        return words.reshape(ROWS, -1).T, none
    grouped = full.reshape(ROWS, -1, group)
    largest = np.abs(grouped).max(axis=2)
    if not np.isfinite(largest).all():
        raise ValueError(f"{name} must be finite to share scales: pack it as fp32 or bf16.")
    scales = (largest / np.float32(format.zero - 1)).astype(np.float32)
    steps = np.where(scales > 0, scales, np.float32(1))[..., None]
    numbers = (np.rint(grouped / steps) + format.zero).astype(np.uint8).reshape(ROWS, -1, int(format))
    if format is Format.INT4:
        numbers = numbers[..., :4] | numbers[..., 4:] << np.uint8(4)
    return np.ascontiguousarray(numbers).view("<u4")[..., 0].T, scales.T


def aligned(dtype: Any, *shape: int) -> NDArray[Any]:
    """New memory that begins on a cache line, not cleared."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + 64, np.uint8)
    begin = -room.ctypes.data % 64
    found: NDArray[Any] = room[begin : begin + size].view(dtype).reshape(shape)
    return found


def unpacked(matrices: Matrices, experts: Iterable[int]) -> list[NDArray[np.float64]]:
    """The matrices (rows, dim) of some experts in float64, as the kernels read them."""
    return [_unpacked(matrices, expert) for expert in experts]


def _unpacked(matrices: Matrices, expert: int) -> NDArray[np.float64]:
    words = matrices.words[expert].transpose(0, 2, 1).reshape(-1, matrices.words.shape[2])
    form = matrices.format
    if form is Format.FP32:
        values = float64("words", words.view(np.float32))
    elif form is Format.BF16:
        values = float64("words", np.ascontiguousarray(words).view(np.uint16))
    else:
        numbers = np.ascontiguousarray(words).view(np.uint8)
        if form is Format.INT4:
            fours = numbers.reshape(len(words), -1, 4)
            numbers = np.concatenate([fours & 15, fours >> 4], axis=2).reshape(len(words), -1)
        scales = matrices.scales[expert].transpose(0, 2, 1).reshape(len(words), -1)
        values = (numbers.astype(float) - form.zero) * np.repeat(scales.astype(float), matrices.group, axis=1)
    return np.asarray(values[: matrices.rows, : matrices.dim], np.float64)
