"""RMSNorm of rows, in fp32, rounded once to the input's type and then scaled, as Hugging Face's Mixtral does."""

from __future__ import annotations

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operators import operator
from ..declarations import operation, reference_of, work_of
from .rows import check_rows, check_vector, launch_shape


@operation
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, backend: str | None = None) -> torch.Tensor:
    """Normalise each row to unit mean square and scale it.

        out[t] = weight * round(x[t] / sqrt(mean(x[t]^2) + eps))

    Parameters
    ----------
    x : Tensor (T, M) fp32, fp16 or bf16
        Rows may be strided, columns not.
    weight : Tensor (M,) of the same type
    eps : float
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    Tensor (T, M) of x's type
        Relative error against float64: 1e-5 in fp32, 2e-3 in fp16, 8e-3 in bf16.

    Raises
    ------
    TypeError
        If dtypes disagree.
    ValueError
        If shapes, memory layout or devices disagree, or the backend cannot compute here.

    Examples
    --------
    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([[0.8485, 2.2627]])
    """
    check_rows("x", x)
    check_vector("weight", weight, x)
    out: torch.Tensor = _norm(x, weight, float(eps), str(choose_backend(backend, x, weight)))
    return out


@operation
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a sublayer's output to the residual stream and normalise the sum, in one pass over memory.

        total[t] = round(x[t] + residual[t]);  out[t] = rms_norm(total[t])

    Parameters
    ----------
    x, residual : Tensor (T, M) fp32, fp16 or bf16, both of one type
    weight : (M,) of the same type
    eps, backend
        As of `rms_norm`.

    Returns
    -------
    out, total : Tensor (T, M) of x's type

    Raises
    ------
    TypeError, ValueError
        As `rms_norm`.

    Examples
    --------
    >>> out, total = add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.ones(2), eps=0.0)
    >>> out, total
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    check_rows("x", x)
    check_rows("residual", residual, x)
    check_vector("weight", weight, x)
    both: tuple[torch.Tensor, torch.Tensor] = _added_norm(
        x, residual, weight, float(eps), str(choose_backend(backend, x, residual, weight))
    )
    return both


def _compute(x: torch.Tensor, weight: torch.Tensor, eps: float, backend: str) -> torch.Tensor:
    if backend == Backend.TORCH:
        return _torch(x, weight, eps)
    return _triton(Backend(backend), x, None, weight, eps)[0]


def _compute_added(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend == Backend.TORCH:
        total = x + residual
        return _torch(total, weight, eps), total
    return _triton(Backend(backend), x, residual, weight, eps)


def _shaped(x: torch.Tensor, *_rest: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_norm = operator("rms_norm", _compute, _shaped, formula=_compute)
_added_norm = operator(
    "add_rms_norm", _compute_added, lambda x, *_rest: (_shaped(x), _shaped(x)), formula=_compute_added
)


def _torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _triton(
    backend: Backend, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    enter_mode(backend)
    from .jit_norms import rms_norm as kernel

    rows, width = x.shape
    out = x.new_empty(rows, width)
    total = out if residual is None else torch.empty_like(out)
    if rows:
        kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            M=width,
            EPS=eps,
            ADDED=residual is not None,
            **launch_shape(width),
        )
    return out, total


@work_of(rms_norm)
def rms_norm_work(rows: int, width: int, itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]) = (4 T M, itemsize (2 T M + M)).

    Examples
    --------
    >>> rms_norm_work(rows=2, width=8, itemsize=2)
    (64, 80)
    """
    return 4 * rows * width, itemsize * (2 * rows * width + width)


@work_of(add_rms_norm)
def add_rms_norm_work(rows: int, width: int, itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]) = (5 T M, itemsize (4 T M + M)).

    Examples
    --------
    >>> add_rms_norm_work(rows=2, width=8, itemsize=2)
    (80, 144)
    """
    return 5 * rows * width, itemsize * (4 * rows * width + width)


@reference_of(rms_norm)
def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """Compute `rms_norm` in float64 without the rounding in between, the oracle of its tests.

    Examples
    --------
    >>> rms_norm_reference(torch.full((1, 2), 2.0), torch.ones(2), eps=0.0).tolist()
    [[1.0, 1.0]]
    """
    wide = x.double()
    return weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
