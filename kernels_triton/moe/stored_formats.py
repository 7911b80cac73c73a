"""Weights as quantised checkpoints store them, to numbers: FP8 with a scale per block, group-wise INT4, and MXFP4."""

from __future__ import annotations

import enum

import torch

from ..declarations import public

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of MXFP4's exponents
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in a row; AWQ writes them in the order 0, 2, 4, 6, 1, 3, 5, 7
_MIDDLE = 8  # zero point of symmetric INT4
_ONES = 0x11111111  # one in each number of a word


@public
class Int4Order(enum.Enum):
    """The eight numbers of 4 bits that a 32-bit word holds, of a matrix from C inputs to R outputs."""

    INPUTS = "inputs"
    """Eight inputs in a row, in words (C / 8, R): GPTQ's ``qweight``."""
    OUTPUTS = "outputs"
    """Eight outputs in a row, in words (C, R / 8): ``qzeros`` of format gptq_v2, a group in the place of an input."""
    OUTPUTS_LESS_ONE = "outputs_less_one"
    """Words of `OUTPUTS`, stored less 0x11111111: ``qzeros`` of format gptq. A number of 0 borrows from the next."""
    AWQ = "awq"
    """Eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, in words (C, R / 8): AWQ's ``qweight`` and ``qzeros``."""


@public
def int4_codes(words: torch.Tensor, order: Int4Order) -> torch.Tensor:
    """Unpack the numbers of 4 bits in 32-bit words, as GPTQ and AWQ store codes and zero points: -> (R, C) uint8.

    Parameters
    ----------
    words : (C / 8, R) or (C, R / 8) int32
        The first number is in the lowest bits.
    order : Int4Order

    Raises
    ------
    ValueError
        If the words are no matrix of int32.

    Examples
    --------
    >>> int4_codes(torch.tensor([[0x76543210]], dtype=torch.int32), Int4Order.INPUTS)
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8)
    >>> int4_codes(torch.tensor([[0x75316420]], dtype=torch.int32), Int4Order.AWQ).T
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8)
    """
    if words.ndim != 2 or words.dtype is not torch.int32:
        raise ValueError(
            f"words must be a matrix of int32, not {tuple(words.shape)} {words.dtype}: pass qweight or qzeros."
        )
    turned = words.T.contiguous()
    if order is Int4Order.OUTPUTS_LESS_ONE:
        turned = turned + _ONES
    rows, columns = turned.shape
    inputs = order is Int4Order.INPUTS
    found = torch.empty((rows, columns, 8) if inputs else (rows, 8, columns), dtype=torch.uint8, device=words.device)
    places = _AWQ_PLACES if order is Int4Order.AWQ else range(8)
    for place, numbers in zip(places, found.unbind(-1 if inputs else 1), strict=True):
        numbers.copy_(turned >> 4 * place & 15)
    return found.flatten(1) if inputs else found.flatten(0, 1)


@public
def int4_weights(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """Convert group-wise INT4 weights (GPTQ, AWQ) to (R, C) of another type.

        weight = (code - zero point) * scale

    Parameters
    ----------
    codes : (R, C) uint8
        From `int4_codes`.
    scales : (R, groups), of any floating-point type
        Each is of C / groups columns.
    dtype : torch.dtype
    zeros : (R, groups) uint8, optional
        Zero points; without them all are 8.

    Raises
    ------
    ValueError
        If types or shapes disagree.

    Examples
    --------
    >>> codes = torch.tensor([[0, 8, 15, 9]], dtype=torch.uint8)
    >>> int4_weights(codes, torch.tensor([[0.5, 2.0]]), torch.float32)
    tensor([[-4.,  0., 14.,  2.]])
    """
    rows, columns = codes.shape
    groups = scales.shape[-1]
    fits = tuple(scales.shape) == (rows, groups) and groups > 0 and columns % groups == 0
    if codes.dtype is not torch.uint8 or not fits or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(
            f"INT4 weights must be (R, C) uint8 with scales and zeros (R, groups), not {tuple(codes.shape)} "
            f"{codes.dtype} with {tuple(scales.shape)}: pass codes, scales and zero points of one matrix."
        )
    middle = torch.full_like(scales, _MIDDLE, dtype=torch.float32) if zeros is None else zeros.float()
    numbers = codes.float().unflatten(1, (groups, -1)) - middle[..., None]
    found: torch.Tensor = (numbers * scales.float()[..., None]).flatten(1)
    return found.to(dtype)


@public
def fp8_weights(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, block: int = 128) -> torch.Tensor:
    """Convert FP8 weights with one scale per square block (DeepSeek-V3) to (R, C) of another type.

    Parameters
    ----------
    values : (R, C) float8_e4m3fn
    scales : (ceil(R / block), ceil(C / block)) fp32
        ``weight_scale_inv`` of a checkpoint: factors, whatever their name says.
    dtype : torch.dtype
    block : int
        Rows and columns of a block; those at the edges may be smaller.

    Raises
    ------
    ValueError
        If types or shapes disagree.

    Examples
    --------
    >>> values = torch.tensor([[1.0, 2.0, 3.0]]).to(torch.float8_e4m3fn)
    >>> fp8_weights(values, torch.tensor([[10.0, 0.5]]), torch.float32, block=2)
    tensor([[10.0000, 20.0000,  1.5000]])
    """
    wanted = tuple(-(-size // block) for size in values.shape)
    if values.ndim != 2 or values.dtype is not torch.float8_e4m3fn or tuple(scales.shape) != wanted:
        raise ValueError(
            f"FP8 weights must be (R, C) float8_e4m3fn with a scale per block of {block}, not {tuple(values.shape)} "
            f"{values.dtype} with {tuple(scales.shape)}: pass weight and weight_scale_inv of one matrix."
        )
    rows, columns = values.shape
    factors = scales.float().repeat_interleave(block, dim=0)[:rows].repeat_interleave(block, dim=1)[:, :columns]
    return (values.float() * factors).to(dtype)


@public
def mxfp4_weights(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert MXFP4 weights (GPT-OSS) to (..., 32 G) of another type.

    A byte holds two numbers of 4 bits (sign, two of exponent, one of mantissa), the first in its lower half; 32 of them
    share an exponent. OCP Microscaling Formats, version 1.0.

    Parameters
    ----------
    blocks : (..., G, 16) uint8
    scales : (..., G) uint8
        Exponents of 2, plus 127.
    dtype : torch.dtype

    Raises
    ------
    ValueError
        If types or shapes disagree.

    Examples
    --------
    >>> blocks = torch.zeros(1, 16, dtype=torch.uint8)
    >>> blocks[0, 0] = 0x92
    >>> mxfp4_weights(blocks, torch.tensor([128], dtype=torch.uint8), torch.float32)[:3]
    tensor([ 2., -1.,  0.])
    """
    if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.shape != (*scales.shape, 16):
        raise ValueError(
            f"MXFP4 weights must be (..., G, 16) uint8 with scales (..., G) uint8, not {tuple(blocks.shape)} "
            f"{blocks.dtype} with {tuple(scales.shape)} {scales.dtype}: pass blocks and scales of one tensor."
        )
    numbers = torch.tensor((*_E2M1, *(-number for number in _E2M1)), device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    scaled = torch.ldexp(numbers[codes.long()], scales.int()[..., None] - _BIAS)
    return scaled.flatten(-2).to(dtype)
