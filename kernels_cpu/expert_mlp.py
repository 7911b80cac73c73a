"""Routed experts on the CPU: gate and up, SwiGLU, down, and the weighted sum over the chosen experts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import Operand, SameKind, checked, contiguous, host_array, same_kind, writeable
from .expert_tasks import Matrices, aligned_rows, multiply, packed_order, swiglu, weighted_sum
from .features import CodePath, features
from .flash_decode import CACHED, KINDS
from .team import usable_cores


def _matrices(name: str, operands: Operand | Sequence[Operand]) -> Matrices:
    """One matrix per expert, which need not be neighbours in memory."""
    several: Any = operands if isinstance(operands, Sequence) else checked(name, operands, "E R C", *CACHED)
    arrays = [contiguous(f"{name}[{e}]", checked(f"{name}[{e}]", m, "R C", *CACHED)) for e, m in enumerate(several)]
    if not arrays or 0 in arrays[0].shape:
        raise ValueError(f"{name} must have an expert with rows and columns at least: pass (E, R, C).")
    for e, array in enumerate(arrays):
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise ValueError(
                f"{name}[{e}] must be {arrays[0].shape} {arrays[0].dtype} as {name}[0], not {array.shape} "
                f"{array.dtype}: pass experts of one layer."
            )
    addresses = np.array([array.ctypes.data for array in arrays], np.int64)
    return Matrices(addresses, KINDS[arrays[0].dtype.type], *arrays[0].shape)


def _check(h: NDArray[Any], gate_up: Matrices, down: Matrices, ids: NDArray[Any], weights: NDArray[Any]) -> None:
    (tokens, width), experts = h.shape, len(gate_up.addresses)
    if gate_up.dim != width or gate_up.rows % 2:
        raise ValueError(
            f"gate_up must have an even number of rows of {width} columns, the width of h, not {gate_up.rows} of "
            f"{gate_up.dim}: pass (E, 2 F, M), the gates' rows before the ups'."
        )
    if (len(down.addresses), down.rows, down.dim) != (experts, width, gate_up.rows // 2):
        raise ValueError(
            f"down must be ({experts}, {width}, {gate_up.rows // 2}), which gate_up and h ask for, not "
            f"({len(down.addresses)}, {down.rows}, {down.dim}): pass (E, M, F) of the same layer."
        )
    if len(ids) != tokens or weights.shape != ids.shape:
        raise ValueError(
            f"weights must have the shape of ids and both one row per row of h, {tokens}, not {weights.shape} and "
            f"{ids.shape}: pass one batch."
        )
    bad = np.argwhere((ids < 0) | (ids >= experts))
    if bad.size:
        t, j = bad[0]
        raise ValueError(f"ids[{t}, {j}] must be an expert in [0, {experts}), not {ids[t, j]}: correct the routing.")


def expert_mlp(
    h: SameKind,
    gate_up: Operand | Sequence[Operand],
    down: Operand | Sequence[Operand],
    ids: Operand,
    weights: Operand,
    *,
    threads: int | None = None,
    path: CodePath | None = None,
    out: SameKind | None = None,
) -> SameKind:
    """The routed experts of one layer for a few tokens, bound by reading the chosen experts' weights once.

        out[t] = sum over j of weights[t, j] * down[e] (silu(gate[e] h[t]) * up[e] h[t]),  e = ids[t, j]

    Meant for one or two tokens per expert, where reading the weights limits; right for any number. On two Zen 4 cores
    it was 1.5 times as fast as torch's bf16 products with one token per expert, and 0.8 times with four. fp32
    computation; the sum over j is in the order given, so the result does not depend on the number of threads. The GIL
    is released. Numpy arrays and CPU torch tensors are read in place.

    Parameters
    ----------
    h : (T, M) fp32
        Normed hidden states.
    gate_up : (E, 2 F, M), or E matrices (2 F, M); fp32, fp16, torch.bfloat16, or uint16 that holds bfloat16 bits
        Per expert the rows of the gate and then of the up projection. A list's matrices may lie anywhere.
    down : (E, M, F), or E matrices (M, F); as gate_up
    ids : (T, k) int32 or int64
        Experts of each token.
    weights : (T, k) fp32
        Their weights.
    threads : int, optional
        Threads that share the work; the cores that this process may use unless given.
    path : CodePath, optional
        Code path; this computer's own (`features`) unless given.
    out : (T, M) fp32, C-contiguous, optional
        Where to store the result.

    Returns
    -------
    (T, M) fp32
        `out` if given, else new and of the kind of `h`; relative Frobenius error 1e-6 against float64.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes disagree, a matrix is not contiguous, or an expert is out of range.

    Examples
    --------
    >>> h, both, down = np.full((1, 1), 2, np.float32), np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32)
    >>> expert_mlp(h, both, down, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)).round(4)
    array([[3.5232]], dtype=float32)
    """
    hidden = contiguous("h", checked("h", h, "T M", np.float32))
    first, second = _matrices("gate_up", gate_up), _matrices("down", down)
    chosen = checked("ids", ids, "T k", np.int32, np.int64)
    scales = contiguous("weights", checked("weights", weights, "T k", np.float32))
    _check(hidden, first, second, chosen, scales)
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be >= 1, not {threads}: leave it out to use every core.")
    result = np.empty_like(hidden) if out is None else writeable("out", checked("out", out, "T M", np.float32))
    if result.shape != hidden.shape:
        raise ValueError(f"out must have the shape {hidden.shape} of h, not {result.shape}: leave it out.")
    _compute(hidden, first, second, chosen, scales, threads or usable_cores(), path or features().path, result)
    return same_kind(h, result) if out is None else out


def _compute(
    h: NDArray[np.float32],
    gate_up: Matrices,
    down: Matrices,
    ids: NDArray[Any],
    weights: NDArray[np.float32],
    threads: int,
    path: CodePath,
    out: NDArray[np.float32],
) -> None:
    """Pairs of token and expert, sorted by expert, through both products; then back to tokens."""
    experts = len(gate_up.addresses)
    pairs = np.argsort(ids.ravel(), kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(ids.ravel(), minlength=experts))])
    x = aligned_rows(len(pairs), gate_up.dim)
    np.take(h[:, packed_order(gate_up, path)], pairs // max(1, ids.shape[1]), axis=0, out=x)
    both = multiply(gate_up, first, x, path, threads)
    inner = aligned_rows(len(pairs), down.dim)
    swiglu(both, np.argsort(packed_order(down, path)), inner)
    answers = multiply(down, first, inner, path, threads)
    out[:] = 0
    weighted_sum(answers, np.argsort(pairs).reshape(ids.shape), weights, out)


def expert_mlp_work(
    model_dim: int, expert_dim: int, tokens: int, chosen: int, touched: int, weight_itemsize: int
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 6 M F T k,  bytes = 3 M F weight_itemsize E_touched + 2 * 4 M T

    Parameters
    ----------
    model_dim, expert_dim : int
        M and F.
    tokens, chosen : int
        T and k.
    touched : int
        Distinct experts that the tokens chose.
    weight_itemsize : int
        2 for bfloat16 and fp16, 4 for fp32 [byte].

    Examples
    --------
    >>> expert_mlp_work(model_dim=4096, expert_dim=14336, tokens=1, chosen=2, touched=2, weight_itemsize=2)
    (704643072, 704675840)
    """
    flops = 6 * model_dim * expert_dim * tokens * chosen
    return flops, 3 * model_dim * expert_dim * weight_itemsize * touched + 2 * 4 * model_dim * tokens


def expert_mlp_reference(h: Operand, gate_up: Any, down: Any, ids: Operand, weights: Operand) -> NDArray[np.float64]:
    """`expert_mlp` in float64 numpy, the oracle of its tests: same operands, -> (T, M) float64.

    Examples
    --------
    >>> one = np.ones((1, 1))
    >>> expert_mlp_reference(2 * one, [np.ones((2, 1))], [one], np.zeros((1, 1), int), one).round(4)
    array([[3.5232]])
    """

    def wide(matrix: Any) -> NDArray[np.float64]:
        array = host_array("weights", matrix)
        if array.dtype == np.uint16:
            array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return array.astype(np.float64)

    rows, chosen, scales = (np.asarray(host_array("operand", part)) for part in (h, ids, weights))
    out = np.zeros(rows.shape)
    for t, row in enumerate(rows.astype(np.float64)):
        for expert, scale in zip(chosen[t], scales[t].astype(np.float64), strict=True):
            gate, up = np.split(wide(gate_up[expert]) @ row, 2)
            share = np.where(gate >= 0, 1.0, np.exp(-np.abs(gate))) / (1 + np.exp(-np.abs(gate)))
            out[t] += scale * (wide(down[expert]) @ (gate * share * up))
    return out
