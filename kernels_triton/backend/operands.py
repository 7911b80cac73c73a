"""Accepted dtypes, and checks of operands whose errors name the operand and the remedy."""

from __future__ import annotations

import torch

from .operators import check_tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDEX = (torch.int32, torch.int64)


def check_operand(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], beside: torch.Tensor
) -> None:
    """Raise unless `tensor` has this shape and one of these dtypes, is contiguous, and on the device of `beside`.

    Raises
    ------
    TypeError
        If it has another dtype.
    ValueError
        If shape, memory layout or device is another.
    """
    check_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {known}, not {tensor.dtype}: convert it before the call.")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.device != beside.device:
        raise ValueError(
            f"{name} must be {shape}, contiguous and on {beside.device}, not {tuple(tensor.shape)} on "
            f"{tensor.device}: reshape, copy or move it."
        )


def check_indices(name: str, indices: torch.Tensor, dtypes: tuple[torch.dtype, ...], beside: torch.Tensor) -> None:
    """Apply `check_operand` to a vector of any length.

    Raises
    ------
    TypeError, ValueError
        As `check_operand`.
    """
    check_tensor(name, indices)
    check_operand(name, indices, (indices.numel(),), dtypes, beside)


def check_range(name: str, indices: torch.Tensor, end: int, remedy: str) -> None:
    """Raise unless all `indices` are in [0, end).

    Raises
    ------
    ValueError
        If one is not, naming all indices and the remedy.
    """
    if not indices.numel():
        return
    low, high = indices.aminmax()
    if not 0 <= int(low) <= int(high) < end:
        raise ValueError(f"{name} must be in [0, {end}), not {indices.tolist()}: {remedy}.")
