"""Routed experts on the CPU: gate and up projections, SwiGLU, down projections, and the weighted sum per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arguments import (
    Operand,
    SameKind,
    check_apart,
    checked,
    contiguous,
    float64,
    frozen,
    host_array,
    same_type,
    writeable,
)
from ..codegen.compiled import compiled
from ..codegen.rounding import narrowed
from ..declarations import operation, public, reference_of, work_of
from ..machine.features import CodePath, code_path
from ..machine.parameters import parameters
from ..threads.pull import pull
from ..threads.team import helping_cpus, on_node, team_size, usable_cpus
from .activations import empty_activations
from .nodes import NodeExperts, numa_nodes
from .products import FEW
from .tasks import blocks_of, by_matrices, columns_of, server, terms_of
from .weights import ROWS, PackedExperts, aligned, unpacked

_BUFFERED = 16 << 20
"""Bytes of buffers of one part of the pairs. They stay in the last-level cache."""
_PADDING = 16
"""Numbers behind each row of results, a cache line, so that rows do not all map to the same cache set."""
_FEWEST = 128
"""Least limit of a part [pairs]: every part of an expert reads all of its weights again."""
_WORTH = parameters().experts.thread_bytes


def _check(x: NDArray[Any], experts: PackedExperts, ids: NDArray[Any], weights: NDArray[Any]) -> None:
    """Raise ValueError unless x (T, M), ids (T, k) and weights (T, k) match the experts."""
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


@operation
def fused_moe(
    x: SameKind,
    experts: PackedExperts | NodeExperts,
    ids: Operand,
    weights: Operand,
    *,
    activation: str = "swiglu",
    gate_up_bias: Operand | None = None,
    down_bias: Operand | None = None,
    exact: bool = False,
    threads: int | None = None,
    path: CodePath | None = None,
    out: SameKind | None = None,
) -> SameKind:
    """Compute the routed experts of one layer; each is read once for all tokens that chose it.

        out[t] = sum over j of weights[t, j] * (down[e] a(gate_up[e] x[t] + gate_up_bias[e]) + down_bias[e])
        e = ids[t, j],  a(gate, up) = silu(gate) * up
        a(gate, up) = (up + 1) * gate / (1 + exp(-1.702 gate)) with gate <= 7, -7 <= up <= 7 for "swiglu-clamped"

    Threads take blocks of 64 rows from one queue, expert by expert. Sums are in fp32 and in the given order over j, so
    that the result does not depend on the number of threads. The GIL is released. Numpy arrays and CPU torch tensors
    are read in place.

    With FP32 and BF16 weights activations stay in fp32. They are rounded to bf16 only where that is faster: for packed
    BF16 experts with more than a few tokens on Zen with AVX512_BF16 and on CPUs with matrix registers (AMX). With INT8,
    INT4, UINT4 and MXFP4 weights they are rounded to multiples of each group's largest magnitude over 127. With all
    but the last, matrix registers, which serve experts with more than a few tokens and groups of a multiple of 32
    columns, give the same bits as vectors (KTransformers' high and low intensity kernels, section 3.1).

    Parameters
    ----------
    x : (T, M) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits
        Normed hidden states.
    experts : PackedExperts or NodeExperts
        The layer's experts from `pack_experts`, `pack_int4`, `pack_mxfp4`, `experts_of_blocks`, `experts_in_place` or
        `experts_by_node`. With the last, the cores of each NUMA node compute with its own slice, and what the slices
        give is summed in order.
    ids : (T, k) int32 or int64
        Experts of each token.
    weights : (T, k) fp32
        Weights of these experts.
    activation : "swiglu" or "swiglu-clamped"
        Function of gate and up projection. With the second, that of GPT-OSS, gates and ups alternate in the rows of
        gate_up.
    gate_up_bias, down_bias : (E, 2 F) and (E, M) fp32 or torch.bfloat16, or uint16 that holds its bits, optional
        Biases of the projections, both or none; not with `experts_by_node`.
    exact : bool
        Keep activations in fp32 for any number of tokens with FP32 and BF16 weights. Other tokens of the batch then
        change a token's result only by the order of its fp32 sums.
    threads : int, optional
        Threads that share the work, by default as many as cores that this process may use.
    path : CodePath, optional
        Code path, by default this computer's own (`features`).
    out : (T, M) of x's type, C-contiguous, optional
        Array that receives the result; must not overlap other operands.

    Returns
    -------
    (T, M) of x's dtype, array or tensor as x
        `out` if given, else new; rounded once. Relative Frobenius error against float64 with the packed weights: 1e-6;
        5e-3 where activations are rounded to bf16, 2e-2 with formats that have scales, 3e-2 in rows of a few numbers;
        in bf16 3e-3 more.

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype, or `experts` are not packed.
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
    hidden = contiguous("x", checked("x", x, "T M", np.float32, np.uint16))
    chosen = checked("ids", ids, "T k", np.int32, np.int64)
    scales = contiguous("weights", checked("weights", weights, "T k", np.float32))
    _check(hidden, slices[0], chosen, scales)
    clamped = is_clamped(activation)
    if isinstance(experts, NodeExperts) and (clamped or gate_up_bias is not None or down_bias is not None):
        raise ValueError(
            "activation, gate_up_bias and down_bias must be left out for experts that are divided by node: "
            "leave them whole."
        )
    biases = biases_of(slices[0], gate_up_bias, down_bias)
    size = team_size(threads)
    taken = code_path(path)
    result = np.empty_like(hidden) if out is None else writeable("out", checked("out", out, "T M", hidden.dtype))
    if result.shape != hidden.shape:
        raise ValueError(f"out must have the shape {hidden.shape} of x, not {result.shape}: leave it out.")
    if out is not None:
        check_apart("out", result, x=hidden, weights=scales, gate_up_bias=biases.up, down_bias=biases.down)
        for own in slices:
            check_apart("out", result, experts=own.gate_up.words)
            check_apart("out", result, experts=own.down.words)
    pairs = _sorted(chosen, len(experts))
    call = partial(_call, hidden, pairs, scales, exact, taken, clamped, biases)
    if isinstance(experts, PackedExperts):
        call(experts, result, min(size, _worth(experts, pairs)), None)
    else:
        _by_node(call, experts, size, result)
    return same_type(x, result) if out is None else out


def is_clamped(activation: str) -> bool:
    """True for GPT-OSS' activation function."""
    if activation not in ("swiglu", "swiglu-clamped"):
        raise ValueError(
            f"activation must be 'swiglu' or 'swiglu-clamped' for packed experts, not {activation!r}: give experts "
            "that are not packed."
        )
    return activation == "swiglu-clamped"


class Biases(NamedTuple):
    """Biases (E, 2 F) and (E, M) of one type; both are empty if there are none."""

    up: NDArray[Any]
    down: NDArray[Any]


_NO_BIASES = Biases(*(frozen(np.empty((0, 0), np.float32)) for _ in range(2)))


def biases_of(experts: PackedExperts, up: Operand | None, down: Operand | None) -> Biases:
    """The biases, checked against the experts."""
    if up is None and down is None:
        return _NO_BIASES
    if up is None or down is None:
        raise ValueError("gate_up_bias and down_bias must both be given: pass zeros (E, R) for the one that is none.")
    found = list[NDArray[Any]]()
    for name, operand, rows in (("gate_up_bias", up, experts.gate_up.rows), ("down_bias", down, experts.down.rows)):
        array = contiguous(name, checked(name, operand, "E R", np.float32, np.uint16))
        if array.shape != (len(experts), rows):
            raise ValueError(f"{name} must be {(len(experts), rows)}, not {array.shape}: pass that of the same layer.")
        found.append(array)
    if found[0].dtype != found[1].dtype:
        raise TypeError(f"down_bias must be {found[0].dtype} as gate_up_bias, not {found[1].dtype}: convert one.")
    return Biases(*map(frozen, found))


class _Pairs(NamedTuple):
    """Pairs of token and expert, sorted by expert: expert e has the pairs first[e] .. first[e + 1] - 1.

    `tokens` is the token of each pair, `ids` (T, k) the expert and `places` (T, k) the position of each pair after
    sorting, `touched` the experts that were chosen, and `most` the most pairs of one expert.
    """

    tokens: NDArray[np.int64]
    first: NDArray[np.int64]
    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    touched: NDArray[np.int64]
    most: int

    @property
    def experts(self) -> NDArray[np.int64]:
        """The expert of each pair."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def part(self, begin: int, past: int) -> _Pairs:
        """The pairs from `begin` to `past` - 1, counted from 0."""
        return _pairs_of(self.tokens[begin:past], np.clip(self.first, begin, past) - begin, self.ids, self.places)


def _pairs_of(
    tokens: NDArray[np.int64], first: NDArray[np.int64], ids: NDArray[np.int64], places: NDArray[np.int64]
) -> _Pairs:
    """Pairs that are sorted, with what follows from `first`."""
    counts = first[1:] - first[:-1]
    return _Pairs(tokens, first, ids, places, counts.nonzero()[0], int(counts.max(initial=0)))


@compiled()
def sort_pairs(ids: Any, first: Any, tokens: Any, places: Any) -> int:
    """Sort the pairs of ids (T, k) by expert, and then by token; -1, or the number of a pair whose expert is not one.

    `first` (experts + 1,) holds zeros before.
    """
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            if not 0 <= ids[t, j] < len(first) - 1:
                return int(t * ids.shape[1] + j)
            first[ids[t, j] + 1] += 1
    for expert in range(1, len(first)):
        first[expert] += first[expert - 1]
    free = first.copy()
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            place = free[ids[t, j]]
            free[ids[t, j]] += 1
            places[t, j] = place
            tokens[place] = t
    return -1


def _sorted(ids: NDArray[Any], experts: int) -> _Pairs:
    """The pairs of ids (T, k), sorted."""
    chosen = frozen(np.array(ids, np.int64, order="C"))  # a copy: threads read it when it has been checked
    first = np.zeros(experts + 1, np.int64)
    tokens = np.empty(ids.size, np.int64)
    places = np.empty(ids.shape, np.int64)
    wrong = sort_pairs(chosen, first, tokens, places)
    if wrong >= 0:
        t, j = divmod(wrong, ids.shape[1])
        raise ValueError(f"ids[{t}, {j}] must be an expert in [0, {experts}), not {ids[t, j]}: correct the routing.")
    return _pairs_of(tokens, first, chosen, places)


def _worth(experts: PackedExperts, pairs: _Pairs) -> int:
    """Most threads with enough work to be woken for."""
    return int(1 + len(pairs.touched) * experts.nbytes // len(experts) // _WORTH)


def _by_node(
    call: Callable[[PackedExperts, NDArray[Any], int, frozenset[int]], None],
    experts: NodeExperts,
    threads: int,
    out: NDArray[Any],
) -> None:
    """Compute each slice on its node, side by side, and sum the results in fp32 in the order of the slices.

    Only CPUs that the calling thread and its helpers may use take part; where a node has none of them, they all do.
    Threads are shared out by the nodes' CPUs; with fewer threads than slices, as many slices at once as threads.
    """
    total = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    results = [total, *(np.empty_like(total) for _ in experts.slices[1:])]
    mine = usable_cpus() if threads == 1 else usable_cpus() | helping_cpus()
    where = [node & mine or mine for node in experts.nodes]
    every = list(zip(experts.slices, results, where, strict=True))
    for begin in range(0, len(every), threads):
        some = every[begin : begin + threads]
        shares = _shares(threads, [len(cpus) for *_, cpus in some])
        running = [
            on_node(partial(call, own, result, share, cpus), cpus)
            for (own, result, cpus), share in zip(some, shares, strict=True)
        ]
        wait(running)
        for slice_done in running:
            slice_done.result()
    for result in results[1:]:
        total += result
    if total is not out:
        _store(total, out)


def _shares(threads: int, cpus: Sequence[int]) -> list[int]:
    """Threads of teams with so many CPUs each: one at least, as many as CPUs at most, and no more than all together."""
    spare = threads - len(cpus)
    edges = [spare * sum(cpus[:place]) // sum(cpus) for place in range(len(cpus) + 1)]
    return [min(1 + past - begin, most) for begin, past, most in zip(edges, edges[1:], cpus, strict=False)]


@compiled()
def _store(rows: Any, out: Any) -> None:
    """Round rows in fp32 to the type of `out`."""
    for t in range(len(out)):
        for m in range(out.shape[1]):
            out[t, m] = narrowed(rows[t, m], out[t, m])


def _call(
    x: NDArray[Any],
    pairs: _Pairs,
    weights: NDArray[np.float32],
    exact: bool,
    path: CodePath,
    clamped: bool,
    biases: Biases,
    experts: PackedExperts,
    out: NDArray[Any],
    threads: int,
    cpus: frozenset[int] | None,
) -> None:
    """Compute both products of all pairs, and the weighted sums per token, by this thread and by others on these CPUs.

    Pairs are computed part by part, in the same buffers. The weighted sums follow the last part.
    """
    up = experts.gate_up
    down = experts.down
    lanes = path.value
    parts = _parts(pairs, max(_FEWEST, _BUFFERED // _buffered(experts)))
    longest = max(len(part.tokens) for part in parts)
    most = max(part.most for part in parts)
    terms = terms_of(experts, path, exact) if most > FEW else 0
    matrices = terms if by_matrices(experts, path) else 0
    rounded = terms == 1 and not matrices
    both: NDArray[Any] = aligned(np.float32, longest, up.words.shape[1] * ROWS + _PADDING)
    answers: NDArray[Any] = aligned(np.float32, len(pairs.tokens), down.words.shape[1] * ROWS + _PADDING)
    hidden = empty_activations(longest, up, terms, lanes)
    inner = empty_activations(longest, down, terms, lanes)
    columns = columns_of(experts, path)
    serve = server(lanes, int(experts.format), up.in_place, rounded, matrices, columns, clamped)
    owners = pairs.experts if len(biases.up) else np.empty(0, np.int64)
    begin = 0
    for part in parts:
        past = begin + len(part.tokens)
        summed = slice(None) if part is parts[-1] else slice(0)
        arguments = (
            x, part.tokens, part.first, experts.format.zero,
            part.touched, up.words, up.scales, blocks_of(up, matrices, most), hidden, both, down.dim,
            down.words, down.scales, blocks_of(down, matrices, most), inner, answers[begin:past],
            owners[begin:past], biases.up, answers, pairs.places[summed], weights[summed], pairs.ids[summed],
            biases.down, out[summed],
        )  # fmt: skip
        pull(serve, arguments, threads, cpus)
        begin = past


def _buffered(experts: PackedExperts) -> int:
    """Bytes that one pair takes in the buffers, without the copies of its activations in other formats."""
    return 4 * (experts.gate_up.width + experts.gate_up.rows + experts.down.width)


def _parts(pairs: _Pairs, limit: int) -> list[_Pairs]:
    """Cut pairs into parts of at most `limit`: whole experts as long as they fit, an expert with more cut evenly."""
    if len(pairs.tokens) <= limit:
        return [pairs]
    edges = [0]
    for expert in pairs.touched:
        first = int(pairs.first[expert])
        past = int(pairs.first[expert + 1])
        if past - edges[-1] <= limit:
            continue
        if first > edges[-1]:
            edges.append(first)
        pieces = -(-(past - first) // limit)
        edges += [first + (past - first) * piece // pieces for piece in range(1, pieces)]
    edges.append(len(pairs.tokens))
    return [pairs.part(begin, past) for begin, past in pairwise(edges)]


@public
def warm_up_experts(
    experts: PackedExperts,
    *,
    activation: str = "swiglu",
    gate_up_bias: Operand | None = None,
    down_bias: Operand | None = None,
    dtype: DTypeLike = np.float32,
) -> None:
    """Compile `fused_moe` for such experts, activation and biases, for few and for many tokens per expert.

    Where the computer has several NUMA nodes, that includes experts divided among them.

    Rows are of a dtype of numpy: float32, or uint16 that holds bfloat16 bits.

    Examples
    --------
    >>> from kernels_cpu import pack_experts
    >>> warm_up_experts(pack_experts(np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32)))
    """
    for tokens in (1, FEW + 1):
        x = np.zeros((tokens, experts.gate_up.dim), dtype)
        fused_moe(
            x,
            experts,
            np.zeros((tokens, 1), np.int32),
            np.ones((tokens, 1), np.float32),
            activation=activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )
    if len(numa_nodes()) > 1:
        _store(np.zeros((1, 1), np.float32), np.zeros((1, 1), dtype))


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
        T, k, and the number of different experts that were chosen.
    weight_bytes : float
        Size of one weight with its share of a scale, from `Format.weight_bytes`: 0.625 for 4 bits in groups of 32 with
        fp32 scales [byte].
    itemsize : int
        Size of a number of x [byte].

    Examples
    --------
    >>> fused_moe_work(model_dim=4096, expert_dim=14336, tokens=1, chosen=2, touched=2, weight_bytes=2)
    (704643072, 704675840)
    """
    moved = 3 * model_dim * expert_dim * weight_bytes * touched + 2 * itemsize * model_dim * tokens
    return 6 * model_dim * expert_dim * tokens * chosen, round(moved)


@reference_of(fused_moe)
def fused_moe_reference(
    x: Operand,
    experts: PackedExperts,
    ids: Operand,
    weights: Operand,
    *,
    activation: str = "swiglu",
    gate_up_bias: Operand | None = None,
    down_bias: Operand | None = None,
) -> NDArray[np.float64]:
    """Compute `fused_moe` in float64 with numpy and the packed weights, the oracle of its tests: -> (T, M) float64.

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
    gate_up = unpacked(experts.gate_up, range(len(experts)))
    down = unpacked(experts.down, range(len(experts)))
    first = np.zeros((len(experts), 1)) if gate_up_bias is None else float64("gate_up_bias", gate_up_bias)
    second = np.zeros((len(experts), 1)) if down_bias is None else float64("down_bias", down_bias)
    out = np.zeros(rows.shape)
    for t, row in enumerate(rows):
        for expert, scale in zip(chosen[t], scales[t], strict=True):
            both = gate_up[expert] @ row + first[expert]
            inner = _clamped_reference(both) if activation == "swiglu-clamped" else _swiglu(both)
            out[t] += scale * (down[expert] @ inner + second[expert])
    return out


def _swiglu(both: NDArray[np.float64]) -> NDArray[np.float64]:
    """silu(gates) ups, of gates and then ups."""
    gate, up = np.split(both, 2)
    found: NDArray[np.float64] = gate * _logistic(gate) * up
    return found


def _clamped_reference(both: NDArray[np.float64]) -> NDArray[np.float64]:
    """GPT-OSS' activation function, of gates and ups in turns."""
    gate = np.minimum(both[::2], 7)
    found: NDArray[np.float64] = (np.clip(both[1::2], -7, 7) + 1) * gate * _logistic(1.702 * gate)
    return found


def _logistic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.where(x >= 0, 1.0, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x)))
    return found
