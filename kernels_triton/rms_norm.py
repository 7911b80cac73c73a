"""RMSNorm of rows, in fp32, rounded once to the input's type and then scaled, as Hugging Face's Mixtral does."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """Normalise each row to unit mean square and scale it.

        out[t] = weight * round(x[t] / sqrt(mean(x[t]^2) + eps))

    Parameters
    ----------
    x : Tensor (T, M) fp32, fp16 or bf16
        Rows may be strided, columns not.
    weight : Tensor (M,) of the same type
    eps : float

    Returns
    -------
    Tensor (T, M) of x's type
        Relative error against float64: 1e-5 in fp32, 2e-3 in fp16, 8e-3 in bf16.

    Raises
    ------
    ValueError
        If shapes, types or devices do not go together, or there is neither a GPU tensor nor the interpreter.
    """
    _check(x, weight)
    from .jit.rms_norm import rms_norm as kernel

    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        kernel[(rows,)](x, weight, out, x.stride(0), M=width, EPS=eps, BLOCK=1 << (width - 1).bit_length())
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.ndim != 2 or weight.shape != x.shape[1:] or x.shape[1] == 0:
        raise ValueError(f"rms_norm takes x (T, M) and weight (M,), not {tuple(x.shape)} and {tuple(weight.shape)}.")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or weight.dtype is not x.dtype:
        raise ValueError(f"rms_norm takes fp32, fp16 or bf16, both alike, not {x.dtype}, {weight.dtype}; convert.")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("rms_norm needs contiguous columns in x and weight; call .contiguous() first.")
    if x.device != weight.device:
        raise ValueError(f"rms_norm needs x and weight on one device, not {x.device} and {weight.device}; move one.")
    from .jit.mode import INTERPRETED

    if not (x.is_cuda or INTERPRETED):
        raise ValueError("rms_norm needs GPU tensors; on the CPU set TRITON_INTERPRET=1 before triton is imported.")


def rms_norm_work(rows: int, width: int, itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops, bytes) = (4 T M, itemsize (2 T M + M))."""
    return 4 * rows * width, itemsize * (2 * rows * width + width)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """The same in float64, without the rounding in between."""
    wide = x.double()
    return weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
