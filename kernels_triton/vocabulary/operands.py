"""The check of logits."""

from __future__ import annotations

import torch

from ..backend.operators import check_tensor

MOST = 1 << 20


def check_logits(logits: torch.Tensor) -> None:
    """Raise unless logits are (R, V) fp32 with contiguous columns and V from 1 to 2^20.

    Raises
    ------
    TypeError
        If they have another dtype.
    ValueError
        If their shape or memory layout is another.
    """
    check_tensor("logits", logits)
    if logits.dtype is not torch.float32:
        raise TypeError(f"logits must be fp32, not {logits.dtype}: convert them before the call.")
    wide = logits.ndim == 2 and 1 <= logits.shape[1] <= MOST
    if not wide or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise ValueError(
            f"logits must be (R, V) with contiguous columns, V in 1 .. 2^20, not {tuple(logits.shape)}: copy or "
            "reshape them."
        )
