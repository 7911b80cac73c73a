"""Packed experts in rows, as the kernels of a GPU read quantised weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...declarations import public
from ...machine.huge_pages import empty_in_huge_pages
from ..weights import Format, Matrices, PackedExperts, stored_words

_IN_ROWS: dict[Format, Any] = {Format.INT8: np.int8, Format.INT4: np.uint8}
"""Types of matrices in the layout of `QuantisedRows`."""


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
    >>> from kernels_cpu import pack_experts
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
