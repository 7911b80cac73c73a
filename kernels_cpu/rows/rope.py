"""Rotary position embeddings of queries or keys, optionally after a norm per head, in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, SameKind, checked, contiguous, frozen, same_type
from ..codegen.compiled import compiled
from ..codegen.rounding import narrowed, widened
from ..declarations import operation
from .rms_norm import inverse_root
from .rows import by_rows, results, rows_of, vector_of


@operation
def rope(
    x: SameKind,
    positions: Operand,
    table: Operand,
    *,
    interleaved: bool = False,
    weight: Operand | None = None,
    eps: float = 1e-6,
    threads: int | None = None,
) -> SameKind:
    """Rotate pairs of every head's first R dims by an angle that grows with the token's position.

        (a, b) -> (a cos - b sin, b cos + a sin),  a = y[i], b = y[i + R / 2]

    y is x, or x normalised per head to unit mean square and scaled by `weight` (Qwen3's qk-norm). The other D - R dims
    are not rotated. Computed in fp32 and rounded once.

    Parameters
    ----------
    x : (T, H, D) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits
        Rows and heads may be strided, as in a slice of a fused qkv.
    positions : (T,) int32 or int64
        Below P.
    table : (P, R) fp32, C-contiguous
        Cosines of the R / 2 angles of each position, then sines; R <= D.
    interleaved : bool
        True if pairs are neighbours, y[2 i] and y[2 i + 1] (GPT-J, DeepSeek).
    weight : (D,) of x's type, optional
    eps : float
        Epsilon of the norm.
    threads : int, optional
        Most threads that share the rows, by default as many as cores that this process may use.

    Returns
    -------
    (T, H, D) of x's dtype, contiguous, array or tensor as x
        Relative Frobenius error against float64 with the same table: 4e-3 in bfloat16, 1e-6 in fp32.

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes or memory layout disagree, or a position is out of range.

    Examples
    --------
    >>> table = np.array([[1, 0], [0, 1]], np.float32)  # no turn, a quarter turn
    >>> rope(np.array([[[3, 4, 5]]], np.float32), np.array([1]), table)
    array([[[-4.,  3.,  5.]]], dtype=float32)
    """
    array, rows = rows_of("x", x, "T H D")
    angles = contiguous("table", checked("table", table, "P R", np.float32))
    if angles.shape[1] % 2 or not 2 <= angles.shape[1] <= array.shape[2]:
        raise ValueError(f"table must be (P, R) with an even R <= {array.shape[2]}, not {angles.shape}: shorten it.")
    places = _places(positions, len(array), len(angles))
    scale = frozen(np.empty(0, array.dtype)) if weight is None else vector_of("weight", weight, array)
    out = results(array.shape, array.dtype)
    operands = (*rows, places, frozen(angles), bool(interleaved), scale, np.float32(eps), out)
    by_rows(lambda low, high: rotate(*operands, low, high), out.shape, threads)
    return same_type(x, out)


def _places(positions: Operand, tokens: int, most: int) -> NDArray[Any]:
    """The positions of `tokens` tokens as int64, after a check that each is in [0, most)."""
    places = checked("positions", positions, "T", np.int32, np.int64).astype(np.int64)
    if len(places) != tokens:
        raise ValueError(f"positions must be ({tokens},), not {places.shape}: pass one per token.")
    if tokens and not 0 <= places.min() <= places.max() < most:
        raise ValueError(f"positions must be in [0, {most}), not {places.tolist()}: make a longer table.")
    return places


@compiled("contract")
def rotate(
    x: Any, strides: Any, places: Any, table: Any, interleaved: bool, weight: Any, eps: Any, out: Any,
    low: int, high: int,
) -> None:  # fmt: skip
    """Rotate rows low .. high - 1. In one function LLVM sees that the scratch rows are distinct, and vectorises."""
    _, heads, dim = out.shape
    half = table.shape[1] // 2
    own = np.empty(dim, np.float32)
    a = np.empty(half, np.float32)
    b = np.empty(half, np.float32)
    for t in range(low, high):
        cos = table[places[t], :half]
        sin = table[places[t], half:]
        for h in range(heads):
            begin = t * strides[0] + h * strides[1]
            row = x[begin : begin + dim]
            for d in range(dim):
                own[d] = widened(row[d])
            if len(weight):
                factor = inverse_root(row, eps)
                for d in range(dim):
                    own[d] *= factor * widened(weight[d])
            if interleaved:
                for i in range(half):
                    a[i] = own[2 * i]
                    b[i] = own[2 * i + 1]
                for i in range(half):
                    own[2 * i] = a[i] * cos[i] - b[i] * sin[i]
                    own[2 * i + 1] = b[i] * cos[i] + a[i] * sin[i]
            else:
                for i in range(half):
                    a[i] = own[i]
                for i in range(half):
                    b[i] = own[half + i]
                for i in range(half):
                    own[i] = a[i] * cos[i] - b[i] * sin[i]
                for i in range(half):
                    own[half + i] = b[i] * cos[i] + a[i] * sin[i]
            for d in range(dim):
                out[t, h, d] = narrowed(own[d], row[0])
