"""Rows of many matrices times the tokens that chose them: threads take runs of rows of one expert after the other."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled
from .decode_portable import exp2, gather, score
from .decode_tasks import LOG2_E, even_lanes, lane_order
from .decode_vectors import take
from .expert_vectors import dots, rows_at_once
from .features import CodePath
from .team import side_by_side
from .vector_ir import LINE, Kind

ROWS = 16
"""Rows of weights per task: 128 KiB for 4096 columns in bf16, small enough that threads end together."""


@functools.cache
def rows_times_tokens(lanes: int, kind: Kind, dim: int) -> Any:
    """The loop of one thread, compiled for a length of rows; only numbers are closed over, as in `decoder`."""
    form, row_bytes = int(kind), dim * kind.itemsize
    by_one, by_two, by_three, by_four = (rows_at_once(tokens, lanes) for tokens in (1, 2, 3, 4))

    @compiled()
    def serve(weights: Any, rows: int, first: Any, tasks: Any, counter: int, x: Any, out: Any) -> None:
        stride, apart = 4 * x.shape[1], 4 * out.shape[1]
        while True:
            index = take(counter, 1)
            if index >= len(tasks):
                return
            expert, begin = tasks[index, 0], tasks[index, 1]
            end, tokens = min(begin + ROWS, rows), first[expert + 1] - first[expert]
            for t in range(0, tokens, 4):
                x_at = x.ctypes.data + stride * (first[expert] + t)
                out_at = out.ctypes.data + apart * (first[expert] + t)
                several, r = min(4, tokens - t), begin
                together = by_one if several == 1 else by_two if several == 2 else by_three if several == 3 else by_four
                while r + together <= end:
                    row, to = weights[expert] + r * row_bytes, out_at + 4 * r
                    if several == 1:
                        dots(lanes, form, dim, by_one, 1, row, x_at, stride, to, apart)
                    elif several == 2:
                        dots(lanes, form, dim, by_two, 2, row, x_at, stride, to, apart)
                    elif several == 3:
                        dots(lanes, form, dim, by_three, 3, row, x_at, stride, to, apart)
                    else:
                        dots(lanes, form, dim, by_four, 4, row, x_at, stride, to, apart)
                    r += together
                while r < end:
                    for s in range(several):
                        row, to = weights[expert] + r * row_bytes, out_at + 4 * r + s * apart
                        dots(lanes, form, dim, 1, 1, row, x_at + s * stride, stride, to, apart)
                    r += 1

    return serve


@compiled()
def serve_portably(
    form: int, weights: Any, rows: int, first: Any, tasks: Any, counter: int, x: Any, out: Any
) -> None:  # fmt: skip
    """As `rows_times_tokens`' loop, for any length of rows and CPU."""
    dim = x.shape[1]
    row_bytes = dim * (4 if form == 0 else 2)
    bits = np.empty((ROWS, dim), np.uint32)
    addresses = np.empty(ROWS, np.int64)
    products = np.empty((len(x), ROWS), np.float32)
    while True:
        index = take(counter, 1)
        if index >= len(tasks):
            return
        expert, begin = tasks[index, 0], tasks[index, 1]
        count = min(ROWS, rows - begin)
        for r in range(count):
            addresses[r] = weights[expert] + (begin + r) * row_bytes
        gather(form, dim, addresses, 0, count, bits)
        mine = x[first[expert] : first[expert + 1]]
        score(mine, bits.view(np.float32), count, products)
        for t in range(len(mine)):
            for r in range(count):
                out[first[expert] + t, begin + r] = products[t, r]


@compiled("contract")
def swiglu(both: Any, places: Any, out: Any) -> None:
    """out[t, places[f]] = silu(gate) up, of rows that hold the gates and then the ups."""
    width = out.shape[1]
    for t in range(len(both)):
        for f in range(width):
            gate = both[t, f]
            fall = exp2(np.float32(-abs(gate) * np.float32(LOG2_E)))
            share = np.float32(1) / (np.float32(1) + fall)
            both[t, f] = gate * (share if gate >= 0 else fall * share) * both[t, width + f]
        for f in range(width):
            out[t, places[f]] = both[t, f]


@compiled("contract")
def weighted_sum(answers: Any, places: Any, weights: Any, out: Any) -> None:
    """out[t] = sum over j of weights[t, j] answers[places[t, j]], in the order of j."""
    for t in range(len(out)):
        for j in range(weights.shape[1]):
            answer, weight = answers[places[t, j]], weights[t, j]
            for x in range(out.shape[1]):
                out[t, x] = weight * answer[x] + (out[t, x] if j else np.float32(0))


@dataclass(frozen=True)
class Matrices:
    """One matrix per expert, of the same shape and format: rows of `dim` elements, one after the other.

    Attributes
    ----------
    addresses : (E,) int64
    kind : Kind
    rows, dim : int
    """

    addresses: NDArray[np.int64]
    kind: Kind
    rows: int
    dim: int


def aligned_rows(count: int, dim: int) -> NDArray[np.float32]:
    """Room for packed rows, aligned to a line as registers are loaded from it; not cleared."""
    room = np.empty(count * dim + LINE // 4, np.float32)
    begin = -room.ctypes.data % LINE // 4
    return room[begin : begin + count * dim].reshape(count, dim)


def packed_order(matrices: Matrices, path: CodePath) -> NDArray[np.int64]:
    """Which element stands where in a packed row that `multiply` takes."""
    return lane_order(matrices.dim, matrices.kind, even_lanes(path, matrices.dim))


def multiply(
    matrices: Matrices, first: NDArray[np.int64], x: NDArray[np.float32], path: CodePath, threads: int
) -> NDArray[np.float32]:
    """Rows first[e] to first[e + 1] of packed x (T, dim) times the matrix of expert e, transposed -> (T, rows)."""
    out = np.empty((len(x), matrices.rows), np.float32)
    chosen = np.flatnonzero(np.diff(first))
    starts = np.arange(0, matrices.rows, ROWS)
    tasks = np.stack([np.repeat(chosen, len(starts)), np.tile(starts, len(chosen))], axis=1)
    counter = np.zeros(1, np.int64)
    arguments = (matrices.addresses, matrices.rows, first, tasks, counter.ctypes.data, x, out)
    lanes = even_lanes(path, matrices.dim)
    if lanes:
        serve = rows_times_tokens(lanes, matrices.kind, matrices.dim)
    else:
        serve = functools.partial(serve_portably, int(matrices.kind))
    side_by_side(lambda: serve(*arguments), max(1, min(threads, len(tasks))))
    return out
