"""Rows times a matrix, with bias."""

from __future__ import annotations

import torch

from ..backend.operands import FLOATS
from ..backend.operators import check_tensor
from ..backend.products import product
from ..declarations import operation, reference_of, work_of


@operation
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows with a matrix.

        out[t] = weight x[t] + bias

    It is computed by torch on any device. A CPU without products of x's type, such as one with AVX2 and no AVX-512 for
    bf16, widens blocks of the weight to fp32 and multiplies these.

    Parameters
    ----------
    x : (T, C) fp32, fp16 or bf16, in any layout
    weight : (R, C) of the same type, in any layout
    bias : (R,) of the same type; by default none

    Returns
    -------
    (T, R) of x's type
        Relative Frobenius error against float64: 1e-5 in fp32, 1e-3 in fp16, 8e-3 in bf16.

    Raises
    ------
    TypeError
        If dtypes disagree.
    ValueError
        If shapes or devices disagree.

    Examples
    --------
    >>> linear(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.ones(2))
    tensor([[2., 6.]])
    """
    _check_matrix("x", x)
    _check_matrix("weight", weight)
    rows = weight.shape[0]
    _check_same("weight", weight, x, (rows, x.shape[1]))
    if bias is not None:
        check_tensor("bias", bias)
        _check_same("bias", bias, x, (rows,))
    return product(x, weight, bias)


def _check_matrix(name: str, operand: torch.Tensor) -> None:
    check_tensor(name, operand)
    if operand.dtype not in FLOATS:
        raise TypeError(f"{name} must be fp32, fp16 or bf16, not {operand.dtype}: convert it before the call.")
    if operand.ndim != 2 or operand.shape[1] == 0:
        raise ValueError(f"{name} must have rows and columns, not the shape {tuple(operand.shape)}: reshape it.")


def _check_same(name: str, operand: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if operand.dtype is not x.dtype:
        raise TypeError(f"{name} must be {x.dtype} as x, not {operand.dtype}: convert it before the call.")
    if operand.shape != shape or operand.device != x.device:
        raise ValueError(
            f"{name} must be {shape} on {x.device}, not {tuple(operand.shape)} on {operand.device}: pass one number "
            "per row of the weight and column of x."
        )


@work_of(linear)
def linear_work(rows: int, columns: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]) = (2 T C R, itemsize (T C + R C + T R)).

    Examples
    --------
    >>> linear_work(rows=2, columns=8, outputs=4, itemsize=2)
    (128, 112)
    """
    numbers = rows * columns + outputs * columns + rows * outputs
    return 2 * rows * columns * outputs, itemsize * numbers


@reference_of(linear)
def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `linear` in float64, the oracle of its tests.

    Examples
    --------
    >>> linear_reference(torch.ones(1, 2), torch.ones(1, 2)).tolist()
    [[2.0]]
    """
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()
