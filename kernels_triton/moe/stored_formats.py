"""Weights as quantised checkpoints store them, to numbers: FP8 with a scale per block, and MXFP4."""

from __future__ import annotations

import torch

from ..declarations import public

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of MXFP4's exponents


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
