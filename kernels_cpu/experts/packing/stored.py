"""Experts in the formats of checkpoints, GPTQ's and AWQ's INT4 and MXFP4, whose numbers stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arguments import Operand, checked
from ...declarations import public
from ...machine.huge_pages import empty_in_huge_pages
from ..weights import MXFP4_GROUP, ROWS, ZERO_BITS, Format, Matrices, PackedExperts, check_layer
from .words import PACKED_FROM, fp32, reorder_int4, reorder_mxfp4


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
        factors = fp32(checked(f"{name}_scales[{e}]", scales[e], "R G", *PACKED_FROM))
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
        if not reorder_int4(np.ascontiguousarray(own), words[e]):
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
        if not reorder_mxfp4(np.ascontiguousarray(own), powers, words[e], scales[e]):
            raise ValueError(f"{name}_scales[{e}] must not be 255, which is NaN: repair the checkpoint.")
    return Matrices(words, scales, shape[0], shape[1] * MXFP4_GROUP, Format.MXFP4, MXFP4_GROUP)
