"""Routed experts on the CPU: gate and up, SwiGLU, down, and the weighted sum over the chosen experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, SameKind, check_apart, checked, contiguous, float64, host_array, same_kind, writeable
from ..declarations import operation, reference_of, work_of
from ..machine.features import CodePath, code_path
from ..threads.task_counts import counters
from ..threads.team import helped, on_node, team_size
from .activations import room
from .nodes import NodeExperts
from .tasks import FEW, MANY, PHASES, blocks_of, columns_of, parts_of, server
from .weights import ROWS, PackedExperts, aligned, unpacked

_WORTH = 1 << 20
"""Bytes of weights per thread below which waking it takes longer than it helps."""


def _check(x: NDArray[Any], experts: PackedExperts, ids: NDArray[Any], weights: NDArray[Any]) -> None:
    tokens, width = x.shape
    if experts.gate_up.dim != width:
        raise ValueError(
            f"x must have the {experts.gate_up.dim} columns of the experts, not {width}: pass one layer's."
        )
    if len(ids) != tokens or weights.shape != ids.shape:
        raise ValueError(
            f"weights must have the shape of ids and both one row per row of x, {tokens}, not {weights.shape} and "
            f"{ids.shape}: pass one batch."
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < len(experts):
        t, j = np.argwhere((ids < 0) | (ids >= len(experts)))[0]
        raise ValueError(
            f"ids[{t}, {j}] must be an expert in [0, {len(experts)}), not {ids[t, j]}: correct the routing."
        )


@operation
def fused_moe(
    x: SameKind,
    experts: PackedExperts | NodeExperts,
    ids: Operand,
    weights: Operand,
    *,
    exact: bool = False,
    threads: int | None = None,
    path: CodePath | None = None,
    out: SameKind | None = None,
) -> SameKind:
    """The routed experts of one layer, each read once for all tokens that chose it.

        out[t] = sum over j of weights[t, j] * down[e] (silu(gate[e] x[t]) * up[e] x[t]),  e = ids[t, j]

    Threads pull blocks of 64 rows from one queue, the blocks of an expert one after the other. Sums are in fp32, and
    in the order given over j, so the result does not depend on the number of threads. The GIL is released. Numpy
    arrays and CPU torch tensors are read in place.

    Activations stay fp32 with FP32 and BF16 weights, but where rounding them to bf16 pays: for a packed expert with
    more than 4 tokens on Zen with AVX512_BF16, with more than 32 where the CPU has matrix registers (AMX). With INT8
    and INT4 they are rounded to multiples of each group's largest magnitude over 127; vectors and matrix registers, for
    an expert with more than 4 tokens and groups of a multiple of 32 columns, give the same bits (KTransformers' low and
    high intensity kernels, section 3.1).

    Parameters
    ----------
    x : (T, M) fp32
        Normed hidden states.
    experts : PackedExperts or NodeExperts
        The layer's experts from `pack_experts` or `experts_in_place`, or from `pack_by_node`: then the cores of each
        node compute with its own slice, and the slices' results are summed in their order.
    ids : (T, k) int32 or int64
        Experts of each token.
    weights : (T, k) fp32
        Their weights.
    exact : bool
        Keep activations in fp32 for any number of tokens with FP32 and BF16 weights: then a token's result depends on
        who else is in the batch by no more than the order in which its fp32 sums are taken.
    threads : int, optional
        Threads that share the work; the cores that this process may use unless given.
    path : CodePath, optional
        Code path; this computer's own (`features`) unless given.
    out : (T, M) fp32, C-contiguous, optional
        Where to store the result, apart from all that is read.

    Returns
    -------
    (T, M) fp32
        `out` if given, else new and of the kind of `x`. Relative Frobenius error against float64 with the packed
        weights: 1e-6; 5e-3 where activations are rounded to bf16, 2e-2 with INT8 and INT4, 3e-2 in rows of a few.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype, or `experts` are not packed.
    ValueError
        If shapes disagree, an operand is not contiguous, `out` overlaps one, or an expert is out of range.

    Examples
    --------
    >>> from kernels_cpu import pack_experts
    >>> experts = pack_experts(np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32))
    >>> x, weights = np.full((1, 1), 2, np.float32), np.ones((1, 1), np.float32)
    >>> fused_moe(x, experts, np.zeros((1, 1), np.int64), weights).round(4)
    array([[3.5232]], dtype=float32)
    """
    if not isinstance(experts, PackedExperts | NodeExperts):
        raise TypeError(f"experts must be PackedExperts, not {type(experts).__name__}: pass what pack_experts returns.")
    slices = experts.slices if isinstance(experts, NodeExperts) else (experts,)
    hidden = contiguous("x", checked("x", x, "T M", np.float32))
    chosen = checked("ids", ids, "T k", np.int32, np.int64)
    scales = contiguous("weights", checked("weights", weights, "T k", np.float32))
    _check(hidden, slices[0], chosen, scales)
    size = team_size(threads)
    taken = code_path(path)
    result = np.empty_like(hidden) if out is None else writeable("out", checked("out", out, "T M", np.float32))
    if result.shape != hidden.shape:
        raise ValueError(f"out must have the shape {hidden.shape} of x, not {result.shape}: leave it out.")
    if out is not None:
        check_apart("out", result, x=hidden, weights=scales)
        for part in slices:
            check_apart("out", result, experts=part.gate_up.words)
            check_apart("out", result, experts=part.down.words)
    pairs = _sorted(chosen, len(experts))
    call = partial(_call, hidden, pairs, scales, exact, taken)
    if isinstance(experts, PackedExperts):
        helped(call(experts, result), min(size, _worth(experts, pairs)))
    else:
        _by_node(call, experts, size, result)
    return same_kind(x, result) if out is None else out


class _Pairs(NamedTuple):
    """Pairs of token and expert, sorted by expert: expert e has pairs first[e] to first[e + 1].

    `places` (T, k) tells where each pair went, `touched` which experts somebody chose, `most` how many an expert has.
    """

    tokens: NDArray[np.int64]
    first: NDArray[np.int64]
    places: NDArray[np.int64]
    touched: NDArray[np.int64]
    most: int


def _sorted(ids: NDArray[Any], experts: int) -> _Pairs:
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    first = np.zeros(experts + 1, np.int64)
    places = np.empty(len(flat), np.int64)
    np.cumsum(counts, out=first[1:])
    places[order] = np.arange(len(flat))
    tokens = order // max(1, ids.shape[1])
    most = int(counts.max(initial=0))
    return _Pairs(tokens, first, places.reshape(ids.shape), np.flatnonzero(counts), most)


def _worth(experts: PackedExperts, pairs: _Pairs) -> int:
    """Most threads that are worth waking."""
    return int(1 + len(pairs.touched) * experts.nbytes // len(experts) // _WORTH)


def _by_node(
    call: Callable[[PackedExperts, NDArray[np.float32]], Callable[[], object]],
    experts: NodeExperts,
    threads: int,
    out: NDArray[np.float32],
) -> None:
    """Each slice on its node, side by side; their sum in order."""
    parts = [out, *(np.empty_like(out) for _ in experts.slices[1:])]
    calls = [call(own, part) for own, part in zip(experts.slices, parts, strict=True)]
    share = -(-threads // len(calls))
    waiting = [on_node(serve, cpus, share) for serve, cpus in zip(calls, experts.nodes, strict=True)]
    for part, done in zip(parts, waiting, strict=True):
        done.result()
        if part is not out:
            out += part


def _call(
    x: NDArray[np.float32],
    pairs: _Pairs,
    weights: NDArray[np.float32],
    exact: bool,
    path: CodePath,
    experts: PackedExperts,
    out: NDArray[np.float32],
) -> Callable[[], object]:
    """One thread's work: the pairs through both products, and back to tokens."""
    up = experts.gate_up
    down = experts.down
    count = len(pairs.tokens)
    parts = parts_of(experts, path, exact) if pairs.most > FEW else 0
    lanes = path.value
    both: NDArray[Any] = aligned(np.float32, count, up.words.shape[1] * ROWS)
    answers: NDArray[Any] = aligned(np.float32, count, down.words.shape[1] * ROWS)
    counter = counters(PHASES)
    serve = partial(
        server(lanes, int(experts.format), up.in_place, parts, columns_of(experts, path)),
        *(counter.ctypes.data, x, pairs.tokens, pairs.first, experts.format.zero, count if exact else MANY),
        *(pairs.touched, up.words, up.scales, blocks_of(up, parts, pairs.most), room(count, up, parts, lanes), both),
        *(down.dim, down.words, down.scales, blocks_of(down, parts, pairs.most), room(count, down, parts, lanes)),
        answers,
        *(pairs.places, weights, out),
    )
    return lambda: (serve(), counter)  # which the counter, of whom it knows the address, outlives


@work_of(fused_moe)
def fused_moe_work(
    model_dim: int,
    expert_dim: int,
    tokens: int,
    chosen: int,
    touched: int,
    weight_bytes: float,
    itemsize: int = 4,
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 6 M F T k,  bytes = 3 M F weight_bytes E_touched + 2 itemsize M T

    Parameters
    ----------
    model_dim, expert_dim : int
        M and F.
    tokens, chosen, touched : int
        T, k, and how many different experts they chose.
    weight_bytes : float
        Bytes of one weight with its share of a scale, as `Format.weight_bytes` tells: 0.625 for 4 bits in groups of 32
        with fp32 scales [byte].
    itemsize : int
        Bytes of a number of x [byte].

    Examples
    --------
    >>> fused_moe_work(model_dim=4096, expert_dim=14336, tokens=1, chosen=2, touched=2, weight_bytes=2)
    (704643072, 704675840)
    """
    moved = 3 * model_dim * expert_dim * weight_bytes * touched + 2 * itemsize * model_dim * tokens
    return 6 * model_dim * expert_dim * tokens * chosen, round(moved)


@reference_of(fused_moe)
def fused_moe_reference(x: Operand, experts: PackedExperts, ids: Operand, weights: Operand) -> NDArray[np.float64]:
    """`fused_moe` in float64 numpy with the weights as packed, the oracle of its tests -> (T, M) float64.

    Examples
    --------
    >>> from kernels_cpu import pack_experts
    >>> experts = pack_experts(np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32))
    >>> fused_moe_reference(np.full((1, 1), 2.0), experts, np.zeros((1, 1), int), np.ones((1, 1))).round(4)
    array([[3.5232]])
    """
    rows = float64("x", x)
    chosen = host_array("ids", ids)
    scales = float64("weights", weights)
    gate_up, down = (unpacked(matrices, range(len(experts))) for matrices in (experts.gate_up, experts.down))
    out = np.zeros(rows.shape)
    for t, row in enumerate(rows):
        for expert, scale in zip(chosen[t], scales[t], strict=True):
            gate, up = np.split(gate_up[expert] @ row, 2)
            share = np.where(gate >= 0, 1.0, np.exp(-np.abs(gate))) / (1 + np.exp(-np.abs(gate)))
            out[t] += scale * (down[expert] @ (gate * share * up))
    return out
