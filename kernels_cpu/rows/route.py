"""Router: the chosen experts of each token and their weights, by a softmax over one logit per expert."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments import SameKind, real, same_kind, whole
from ..codegen.compiled import compiled
from ..codegen.numerics import LOG2_E, exp2
from ..codegen.rounding import widened
from ..declarations import operation
from .rows import by_rows, rows_of

_LOG2_E = np.float32(LOG2_E)
_LARGEST = np.finfo(np.float32).max
_FLOOR = np.float32(-1e38)  # rank of NaN and -inf: below every usual number
_TINY = np.float32(1e-20)  # keeps a sum of weights that all underflow from being zero


@operation
def route(
    logits: SameKind, k: int, *, renormalise: bool = False, scale: float = 1.0, threads: int | None = None
) -> tuple[SameKind, SameKind]:
    """Choose the k experts with the largest logits of each token.

        weights = scale * softmax(logits)[ids],  divided by their sum if `renormalise`

    Of equal experts the lowest index wins. NaN and -inf rank last, so that the ids of a token are always different.

    Parameters
    ----------
    logits : (T, E) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits
        Rows may be strided, columns not.
    k : int
        Experts per token.
    renormalise : bool
        True if the weights of a token sum to `scale`.
    scale : float
        Factor of all weights.
    threads : int, optional
        Most threads that share the rows, by default as many as cores that this process may use.

    Returns
    -------
    ids, weights : (T, k) int32, best first, and (T, k) fp32; arrays or tensors as logits
        Relative error of weights of at least 1e-30 against float64: 1e-5.

    Raises
    ------
    TypeError
        If logits are neither an array nor a tensor, or have another dtype.
    ValueError
        If shape or memory layout is another, or there are fewer than k experts.

    Examples
    --------
    >>> ids, weights = route(np.array([[0, 2, 1, 2]], np.float32), 2, renormalise=True)
    >>> ids, weights
    (array([[1, 3]], dtype=int32), array([[0.5, 0.5]], dtype=float32))
    """
    array, rows = rows_of("logits", logits, "T E")
    experts = array.shape[1]
    if not 1 <= whole("k", k) <= experts:
        raise ValueError(f"k must be in [1, {experts}], the experts in the choice, not {k}: choose fewer.")
    ids = np.empty((len(array), int(k)), np.int32)
    weights = np.empty(ids.shape, np.float32)
    operands = (*rows, experts, bool(renormalise), np.float32(real("scale", scale)), ids, weights)
    by_rows(lambda low, high: choose(*operands, low, high), array.shape, threads)
    return same_kind(logits, ids), same_kind(logits, weights)


@compiled("contract")
def choose(
    x: Any, strides: Any, experts: int, renormalise: bool, scale: Any, ids: Any, weights: Any, low: int, high: int
) -> None:
    """Choose the experts of rows low .. high - 1."""
    k = ids.shape[1]
    rank = np.empty(experts, np.float32)
    score = np.empty(experts, np.float32)
    for t in range(low, high):
        begin = t * strides[0]
        row = x[begin : begin + experts]
        most = np.float32(-np.inf)
        for e in range(experts):
            logit = widened(row[e])
            rank[e] = min(logit, _LARGEST) if logit > -np.inf else _FLOOR
            most = max(most, logit) if logit == logit else most
        for e in range(experts):
            logit = widened(row[e])
            score[e] = exp2(np.float32((logit - most) * _LOG2_E))
        total = np.float32(0)
        for e in range(experts):
            total += score[e] if widened(row[e]) != -np.inf else np.float32(0)
        chosen = np.float32(0)
        for j in range(k):
            best = 0
            for e in range(1, experts):
                best = e if rank[e] > rank[best] else best
            rank[best] = -np.inf
            ids[t, j] = best
            own = score[best] / total
            weights[t, j] = own if widened(row[best]) != -np.inf or own != own else np.float32(0)
            chosen += weights[t, j]
        whole = chosen + _TINY if renormalise else np.float32(1)
        for j in range(k):
            weights[t, j] = weights[t, j] / whole * scale
