"""SwiGLU and GeGLU between the projections of a dense feed-forward network or of shared experts."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operators import operator
from ..declarations import operation, reference_of, work_of
from ..moe.experts import Activation
from .rows import check_rows

_TILE = 1024


@operation
def gated(x: torch.Tensor, *, activation: str = "swiglu", backend: str | None = None) -> torch.Tensor:
    """Multiply each row's activated gates with its up projections.

        out[t] = a(x[t, :F]) * x[t, F:],  a(g) = g sigmoid(g) or g Phi(g)

    Parameters
    ----------
    x : (T, 2 F) fp32, fp16 or bf16
        Gates, then up projections. Rows may be strided, columns not.
    activation : "swiglu" or "geglu"
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (T, F) of x's type
        Relative Frobenius error against float64: 4e-3 in bf16, 5e-4 in fp16, 1e-6 in fp32.

    Raises
    ------
    TypeError
        If x has another dtype.
    ValueError
        If its shape or memory layout is another, there is no such activation, or the backend cannot compute here.

    Examples
    --------
    >>> gated(torch.tensor([[2.0, 3.0]]))
    tensor([[5.2848]])
    """
    check_rows("x", x)
    if x.shape[1] % 2 or activation not in (Activation.SWIGLU, Activation.GEGLU):
        raise ValueError(
            f"gated takes (T, 2 F) and 'swiglu' or 'geglu', not {tuple(x.shape)} and {activation!r}: pass both halves."
        )
    out: torch.Tensor = _gated(x, str(activation), str(choose_backend(backend, x)))
    return out


def _compute(x: torch.Tensor, activation: str, backend: str) -> torch.Tensor:
    if backend == Backend.TORCH:
        gate, up = x.float().chunk(2, dim=1)
        gate = functional.silu(gate) if activation == Activation.SWIGLU else functional.gelu(gate)
        return (gate * up).to(x.dtype)
    enter_mode(Backend(backend))
    from ..moe.jit_grouped import gated as kernel

    rows = x.shape[0]
    width = x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        number = 1 if activation == Activation.SWIGLU else 2
        grid = (rows, -(-width // _TILE))
        kernel[grid](x, out, x.stride(0), width, ACTIVATION=number, BLOCK=_TILE)
    return out


_gated = operator("gated", _compute, lambda x, *_rest: x.new_empty(x.shape[0], x.shape[1] // 2), formula=_compute)


@work_of(gated)
def gated_work(rows: int, width: int, itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]) = (5 T F, 3 itemsize T F).

    Examples
    --------
    >>> gated_work(rows=2, width=8, itemsize=2)
    (80, 96)
    """
    return 5 * rows * width, 3 * itemsize * rows * width


@reference_of(gated)
def gated_reference(x: torch.Tensor, *, activation: str = "swiglu") -> torch.Tensor:
    """Compute `gated` in float64, the oracle of its tests.

    Examples
    --------
    >>> gated_reference(torch.tensor([[0.0, 3.0]])).item()
    0.0
    """
    gate, up = x.double().chunk(2, dim=1)
    if activation == "geglu":
        factor = torch.special.erfc(-gate / 2**0.5) / 2
    else:
        factor = 1 / (1 + torch.exp(-gate))
    out: torch.Tensor = gate * factor * up
    return out
