"""RMSNorm of rows in fp32, rounded once to the input's type and then scaled, as Hugging Face's Mixtral does."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments import Operand, SameKind, same_type
from ..codegen.compiled import compiled
from ..codegen.rounding import narrowed, widened
from ..declarations import operation
from .rows import by_rows, results, rows_of, vector_of


@operation
def rms_norm(x: SameKind, weight: Operand, *, eps: float = 1e-5, threads: int | None = None) -> SameKind:
    """Normalise each row to unit mean square and scale it.

        out[t] = weight * round(x[t] / sqrt(mean(x[t]^2) + eps))

    Parameters
    ----------
    x : (T, M) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits
        Rows may be strided, columns not.
    weight : (M,) of the same type
    eps : float
    threads : int, optional
        Most threads that share the rows, by default as many as cores that this process may use.

    Returns
    -------
    (T, M) of x's dtype, array or tensor as x
        Relative error against float64: 1e-5 in fp32, 8e-3 in bfloat16.

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes or memory layout disagree.

    Examples
    --------
    >>> rms_norm(np.array([[3, 4]], np.float32), np.array([1, 2], np.float32), eps=0.0).round(4)
    array([[0.8485, 2.2627]], dtype=float32)
    """
    array, rows = rows_of("x", x, "T M")
    scale = vector_of("weight", weight, array)
    out = results(array.shape, array.dtype)
    least = np.float32(eps)
    by_rows(lambda low, high: _norms(*rows, scale, least, out, low, high), out.shape, threads)
    return same_type(x, out)


@operation
def add_rms_norm(
    x: SameKind, residual: Operand, weight: Operand, *, eps: float = 1e-5, threads: int | None = None
) -> tuple[SameKind, SameKind]:
    """Add a sublayer's output to the residual stream and normalise the sum, in one pass over memory.

        total[t] = round(x[t] + residual[t]);  out[t] = rms_norm(total[t])

    Parameters
    ----------
    x, residual : (T, M) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits, the same
    weight : (M,) of the same type
    eps, threads
        As of `rms_norm`.

    Returns
    -------
    out, total : (T, M) of x's dtype, arrays or tensors as x

    Raises
    ------
    TypeError, ValueError
        As `rms_norm`.

    Examples
    --------
    >>> x, two = np.array([[1, 2]], np.float32), np.full((1, 2), 2, np.float32)
    >>> out, total = add_rms_norm(x, two, np.ones(2, np.float32), eps=0.0)
    >>> out.round(4), total
    (array([[0.8485, 1.1314]], dtype=float32), array([[3., 4.]], dtype=float32))
    """
    array, rows = rows_of("x", x, "T M")
    _, others = rows_of("residual", residual, "T M", array)
    scale = vector_of("weight", weight, array)
    out = results(array.shape, array.dtype)
    total = results(array.shape, array.dtype)
    least = np.float32(eps)
    by_rows(lambda low, high: _added_norms(*rows, *others, scale, least, out, total, low, high), out.shape, threads)
    return same_type(x, out), same_type(x, total)


@compiled()
def _norms(x: Any, strides: Any, weight: Any, eps: Any, out: Any, low: int, high: int) -> None:
    """Normalise and store rows low .. high - 1."""
    for t in range(low, high):
        begin = t * strides[0]
        norm_row(x[begin : begin + len(weight)], weight, eps, out[t])


@compiled("contract")
def _added_norms(
    x: Any, strides: Any, residual: Any, residual_strides: Any, weight: Any, eps: Any, out: Any, total: Any,
    low: int, high: int,
) -> None:  # fmt: skip
    """Add, normalise and store rows low .. high - 1."""
    for t in range(low, high):
        begin = t * strides[0]
        behind = t * residual_strides[0]
        both = total[t]
        one = x[begin : begin + len(weight)]
        other = residual[behind : behind + len(weight)]
        for m in range(len(weight)):
            both[m] = narrowed(widened(one[m]) + widened(other[m]), one[m])
        norm_row(both, weight, eps, out[t])


@compiled()
def norm_row(row: Any, weight: Any, eps: Any, out: Any) -> None:
    """Normalise one row, round it and scale it."""
    factor = inverse_root(row, eps)
    for m in range(len(row)):
        normed = narrowed(widened(row[m]) * factor, row[m])
        out[m] = narrowed(widened(weight[m]) * widened(normed), row[m])


@compiled("contract", "reassoc")
def inverse_root(row: Any, eps: Any) -> Any:
    """1 / sqrt(mean(row^2) + eps) in fp32."""
    total = np.float32(0)
    for m in range(len(row)):
        total += widened(row[m]) * widened(row[m])
    return np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
