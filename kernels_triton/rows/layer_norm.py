"""LayerNorm of rows, in fp32, rounded once."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operators import operator
from ..declarations import operation, reference_of, work_of
from .rows import check_rows, check_vector, launch_shape


@operation
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> torch.Tensor:
    """Normalise each row to mean 0 and variance 1, then scale and shift it.

        out[t] = weight * (x[t] - mean(x[t])) / sqrt(var(x[t]) + eps) + bias

    Parameters
    ----------
    x : (T, M) fp32, fp16 or bf16
        Rows may be strided, columns not.
    weight, bias : (M,) of the same type; by default no bias
    eps : float
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (T, M) of x's type
        Relative Frobenius error against float64: 1e-5 in fp32, 1e-3 in fp16, 8e-3 in bf16.

    Raises
    ------
    TypeError
        If dtypes disagree.
    ValueError
        If shapes, memory layout or devices disagree, or the backend cannot compute here.

    Examples
    --------
    >>> layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), eps=0.0)
    tensor([[-1.,  1.]])
    """
    check_rows("x", x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_vector(name, vector, x)
    out: torch.Tensor = _norm(x, weight, bias, float(eps), str(choose_backend(backend, x, weight, bias)))
    return out


def _compute(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, backend: str
) -> torch.Tensor:
    if backend == Backend.TORCH:
        return functional.layer_norm(x, x.shape[1:], weight, bias, eps)
    enter_mode(Backend(backend))
    from .jit_norms import layer_norm as kernel

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        constants = {"M": x.shape[1], "EPS": eps, "BIASED": bias is not None}
        kernel[(len(x),)](x, weight, bias, out, x.stride(0), **constants, **launch_shape(x.shape[1]))
    return out


_norm = operator("layer_norm", _compute, lambda x, *_rest: x.new_empty(x.shape), formula=_compute)


@work_of(layer_norm)
def layer_norm_work(rows: int, width: int, itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]) = (7 T M, itemsize (2 T M + 2 M)).

    Examples
    --------
    >>> layer_norm_work(rows=2, width=8, itemsize=2)
    (112, 96)
    """
    return 7 * rows * width, itemsize * (2 * rows * width + 2 * width)


@reference_of(layer_norm)
def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float = 1e-5
) -> torch.Tensor:
    """Compute `layer_norm` in float64, the oracle of its tests.

    Examples
    --------
    >>> layer_norm_reference(torch.tensor([[1.0, 3.0]]), torch.ones(2), eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    wide = x.double()
    middle = wide - wide.mean(-1, keepdim=True)
    scaled = weight.double() * middle / torch.sqrt(middle.pow(2).mean(-1, keepdim=True) + eps)
    return scaled if bias is None else scaled + bias.double()
