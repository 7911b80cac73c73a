"""Checks and launch shape shared by the kernels that process whole rows."""

from __future__ import annotations

import torch

from ..backend.operands import FLOATS
from ..backend.operators import check_tensor


def check_rows(name: str, rows: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """Raise unless `rows` is (T, M) with contiguous columns, and matches `like` if that is given.

    Raises
    ------
    TypeError
        If it is no tensor, or the dtype is none of fp32, fp16 and bf16, or not that of `like`.
    ValueError
        If shape, memory layout or device is another.
    """
    check_tensor(name, rows)
    if rows.dtype not in FLOATS or (like is not None and rows.dtype is not like.dtype):
        wanted = "fp32, fp16 or bf16" if like is None else f"{like.dtype} as x"
        raise TypeError(f"{name} must be {wanted}, not {rows.dtype}: convert it before the call.")
    if rows.ndim != 2 or rows.shape[1] == 0 or (rows.stride(1) != 1 and rows.shape[1] > 1):
        raise ValueError(f"{name} must be (T, M) with contiguous columns, not {tuple(rows.shape)}: reshape or copy it.")
    if like is not None and (rows.shape != like.shape or rows.device != like.device):
        raise ValueError(
            f"{name} must be {tuple(like.shape)} on {like.device} as x, not {tuple(rows.shape)} on {rows.device}: "
            "pass one batch."
        )


def check_vector(name: str, vector: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless `vector` has one number of x's type per column of x.

    Raises
    ------
    TypeError
        If it is no tensor, or the dtype is another.
    ValueError
        If shape, memory layout or device is another.
    """
    check_tensor(name, vector)
    if vector.dtype is not x.dtype:
        raise TypeError(f"{name} must be {x.dtype} as x, not {vector.dtype}: convert it before the call.")
    if vector.shape != x.shape[-1:] or not vector.is_contiguous() or vector.device != x.device:
        raise ValueError(
            f"{name} must be ({x.shape[-1]},), contiguous and on {x.device}, not {tuple(vector.shape)} on "
            f"{vector.device}: pass one number per column."
        )


def launch_shape(width: int) -> dict[str, int]:
    """Return columns and warps of a program that holds a whole row: 16 numbers per thread, up to 16 warps.

    Examples
    --------
    >>> launch_shape(5000)
    {'BLOCK': 8192, 'num_warps': 16}
    """
    block = 1 << (width - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
