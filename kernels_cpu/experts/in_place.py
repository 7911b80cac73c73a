"""Experts' weights that are used where they lie: rows in place, and copies of packed weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, checked, contiguous, host_array
from ..declarations import public
from .weights import GROUP, LINE, MXFP4_GROUP, ROWS, TYPES, Format, Matrices, PackedExperts, check_layer

COLUMNS = 32
"""Rows in place have a multiple of this many columns: whole registers on every code path."""


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
    check_layer(first.shape, second.shape)
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
    gate_up : (E, 2 F, M) fp32, torch.bfloat16, uint16 that holds bfloat16 bits, or int8; (E, 2 F, M / 2) uint8 where
        numbers have 4 bits
        `PackedExperts.gate_up.blocks`, or a copy that begins on a multiple of 64 bytes.
    down : (E, M, F), or (E, M, F / 2) uint8; as gate_up
    gate_up_scales : (E, 2 F / 64, groups, 64) fp32, int32 for UINT4, or uint8 for MXFP4, optional
        `PackedExperts.gate_up.scales` of formats that have some, or a copy. An exponent of MXFP4 is at most 254.
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
    >>> from kernels_cpu import pack_experts
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
    check_layer((len(first.words), first.rows, first.dim), (len(second.words), second.rows, second.dim))
    return PackedExperts(first, second)


def _of_blocks(name: str, operand: Operand, scales: Operand | None) -> Matrices:
    """View matrices in the order of blocks as words."""
    array = checked(name, operand, "E R C", *dict.fromkeys(TYPES.values()))
    format = next(format for format, dtype in TYPES.items() if array.dtype == dtype)
    steps = None if scales is None else host_array(f"{name}_scales", scales)
    if array.dtype == np.uint8 and steps is not None:
        four_bits = [Format.MXFP4, Format.UINT4]
        format = next((each for each in four_bits if steps.dtype == each.scale_type), Format.INT4)
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
