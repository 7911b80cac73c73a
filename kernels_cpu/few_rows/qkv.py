"""Queries, keys and values of few rows: norm, projection, norms of heads and rotation."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from ..arguments import Operand, SameKind, checked, contiguous, frozen
from ..codegen.compiled import compiled
from ..codegen.vector_ir import Storage
from ..codegen.views import pointer
from ..declarations import public
from ..machine.features import CodePath
from ..rows.rms_norm import norm_row
from ..rows.rope import rotate
from ..threads.crew import Crew
from .calls import Plan, address_of, laid, opened, real
from .linear import DTYPES, add_bias
from .operands import memory_of, new_rows, rows_at, uses, vector_of, weight_of, whole_numbers_at
from .products import MOST, gathered, lay, most_pairs, multiply_pairs, multiply_rows, no_pairs

_EPS = 16
"""Place of epsilon in a plan."""


@compiled()
def _heads(
    joined: Any, first: int, places: Any, table: Any, interleaved: bool, weight: Any, eps: Any, out: Any
) -> None:
    """Norm and rotate the heads that begin at column `first` of rows joined (T, R); out (T, H, D)."""
    tokens, heads, dim = out.shape
    each = weight
    if len(weight) == heads * dim:  # one norm of all heads together, rounded before they are rotated
        for t in range(tokens):
            row = joined[t, first : first + heads * dim]
            norm_row(row, weight, eps, row)
        each = weight[:0]
    numbers = joined.reshape(-1)[first:]
    rotate(numbers, (joined.shape[1], dim), places, table, interleaved, each, eps, out, 0, tokens)


@compiled()
def _are_places(places: Any, table: Any) -> bool:
    """True if the table has every position."""
    known = 0
    for place in places:
        known += 0 <= place < len(table)
    return known == len(places)


@functools.cache
def _normer(storage: Storage) -> Any:
    number = DTYPES[storage]

    @compiled()
    def norm(plan: Any, tokens: int, x: int, out: int) -> None:
        width = plan[1]
        given = carray(pointer(x), (tokens, width), number)
        weight = carray(pointer(plan[6]), (width,), number)
        h = carray(pointer(out), (tokens, width), number)
        for t in range(tokens):
            norm_row(given[t], weight, real(plan, _EPS), h[t])

    return norm


@functools.cache
def _splitter(storage: Storage) -> Any:
    """Norm and rotate the queries and keys of joined rows, and copy the values; False for an unknown position."""
    number = DTYPES[storage]

    @compiled()
    def split(plan: Any, tokens: int, x: int, positions: int, q: int, k: int, v: int) -> bool:
        eps = real(plan, _EPS)
        table = carray(pointer(plan[13]), (plan[14], plan[15]), np.float32)
        rows = plan[0]
        heads = plan[3]
        kv_heads = plan[4]
        interleaved = plan[5] != 0
        dim = rows // (heads + 2 * kv_heads)
        places = carray(pointer(positions), (tokens,), np.int64)
        if not _are_places(places, table):
            return False
        joined = carray(pointer(x), (tokens, rows), number)
        queries = carray(pointer(q), (tokens, heads, dim), number)
        keys = carray(pointer(k), (tokens, kv_heads, dim), number)
        values = carray(pointer(v), (tokens, kv_heads * dim), number)
        _heads(joined, 0, places, table, interleaved, carray(pointer(plan[9]), (plan[10],), number), eps, queries)
        begin = heads * dim
        _heads(joined, begin, places, table, interleaved, carray(pointer(plan[11]), (plan[12],), number), eps, keys)
        begin += kv_heads * dim
        for t in range(tokens):
            for c in range(kv_heads * dim):
                values[t, c] = joined[t, begin + c]
        return True

    return split


@functools.cache
def _server(lanes: int, storage: Storage, paired: bool) -> Any:
    stored = int(storage)
    number = DTYPES[storage]
    multiply_many = multiply_pairs if paired else no_pairs
    norm = _normer(storage)
    split = _splitter(storage)

    @compiled()
    def serve(at: int) -> int:
        call, board, plan, memory = opened(at)
        tokens = call[3]
        rows = plan[0]
        width = plan[1]
        norm(plan, tokens, call[4], memory[0])
        if tokens > MOST:
            shift = plan[7] if plan[8] else 0
            multiply_many(lanes, board, plan[2], rows, memory[0], width, tokens, shift, 0, memory[1])
        else:
            bias = carray(pointer(plan[7]), (plan[8],), number)
            h = carray(pointer(memory[0]), (tokens, width), number)
            joined = carray(pointer(memory[1]), (tokens, rows), number)
            wide = carray(pointer(memory[2]), (tokens, width), np.float32)
            sums = carray(pointer(memory[3]), (tokens, rows), np.float32)
            for t in range(tokens):
                lay(lanes, stored, h[t], wide[t])
            multiply_rows(lanes, stored, board, plan[2], rows, wide, tokens, sums)
            for t in range(tokens):
                add_bias(sums[t], bias, joined[t])
        known = split(plan, tokens, memory[1], call[5], call[6], call[7], call[8])
        return 0 if known else 1

    return serve


@public
class FewQkv:
    """Queries, keys and values of one layer, for calls with few rows; weights are held and checked once.

        q, k, v = split(round(proj rms_norm(x[t]) + bias));  q and k are normed per head, or all heads together, and
        rotated as by `rope`

    Parameters
    ----------
    norm : (M,) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits
    proj : (H D + 2 K D, M) of its type
        Rows of queries, keys and values; as `fits_few_rows` says, and read in place.
    table : (P, R) fp32
        From `rope_table`, R <= D.
    heads, kv_heads : int
        H and K.
    bias : (H D + 2 K D,) of its type, optional
    q_norm, k_norm : (D,), or (H D,) and (K D,), of its type, optional
    interleaved : bool
        See `rope`.
    eps : float
        Epsilon of all norms.
    path : CodePath, optional
        Code path, by default this computer's own (`features`).

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes disagree, or the projection does not fit.

    Attributes
    ----------
    most : int
        Most rows of a call, as of `FewLinear`.

    Examples
    --------
    >>> table = np.array([[1, 0], [0, 1]], np.float32)  # no turn, a quarter turn
    >>> stage = FewQkv(np.ones(32, np.float32), np.ones((8, 32), np.float32), table, 2, 1)
    >>> q, k, v = stage(np.ones((1, 32), np.float32), np.array([1]))
    >>> q.round(2), v.round(2)
    (array([[-32.,  32., -32.,  32.]], dtype=float32), array([[32., 32.]], dtype=float32))
    """

    def __init__(
        self,
        norm: Operand,
        proj: Operand,
        table: Operand,
        heads: int,
        kv_heads: int,
        *,
        bias: Operand | None = None,
        q_norm: Operand | None = None,
        k_norm: Operand | None = None,
        interleaved: bool = False,
        eps: float = 1e-5,
        path: CodePath | None = None,
    ) -> None:
        held = weight_of("proj", proj, path)
        dtype = held.array.dtype
        self._table = frozen(contiguous("table", checked("table", table, "P R", np.float32)))
        dim = held.rows // (heads + 2 * kv_heads)
        turned = self._table.shape[1]
        if held.rows != (heads + 2 * kv_heads) * dim or turned % 2 or not 2 <= turned <= dim:
            raise ValueError(
                f"proj must have (H + 2 K) D = ({heads} + 2 {kv_heads}) D rows, and table an even number of columns up "
                f"to D, not {held.rows} and {turned}: pass heads and table of one model."
            )
        vectors = list[int | NDArray[Any]]()
        for name, operand, sizes in (
            ("bias", bias, (held.rows,)),
            ("q_norm", q_norm, (dim, heads * dim)),
            ("k_norm", k_norm, (dim, kv_heads * dim)),
        ):
            vector = vector_of(name, operand, dtype, *sizes)
            vectors += [vector, len(vector)]
        scale = vector_of("norm", norm, dtype, held.columns)
        sizes = held.rows, held.columns
        last = self._table, *self._table.shape, np.float32(eps)
        self._plan = Plan(*sizes, held.array, heads, kv_heads, int(interleaved), scale, *vectors, *last)
        self.columns = held.columns
        self.widths = heads * dim, kv_heads * dim
        self.storage = held.storage
        self.lanes = held.lanes
        both = ("normed", dtype, held.columns), ("joined", dtype, held.rows)
        self.most = most_pairs(held.lanes, held.storage)
        self._many = uses(*both, rows=self.most)
        self._uses = uses(*both, ("x", np.float32, held.columns), ("sums", np.float32, held.rows))
        self.serve = _server(held.lanes, held.storage, self.most > MOST)

    def __call__(self, x: SameKind, positions: Operand, *, threads: int = 1) -> tuple[SameKind, SameKind, SameKind]:
        """Compute q (T, H D), k and v (T, K D) of rows x (T, M) at positions (T,) int64, T in 1 .. `most`.

        Raises
        ------
        ValueError
            If x is not of the weights' type and sizes, or positions have another type or are out of the table's range.
        """
        tokens, at = rows_at("x", x, self.columns, self.storage, most=self.most)
        places = whole_numbers_at("positions", positions, tokens)
        crew = gathered(self.lanes, threads)
        parts, addresses = self._new(x, tokens)
        call = laid(*self.call(crew, tokens, at, places, *addresses))
        self._check_places(not self.serve(address_of(call)), positions)
        return parts

    def call(self, crew: Crew, tokens: int, x: int, positions: int, q: int, k: int, v: int) -> tuple[int, ...]:
        """Numbers of a call of `serve` with operands at these addresses; 1 is its answer to an unknown position."""
        memory = memory_of(crew, self._uses if tokens <= MOST else self._many).address
        return crew.address, self._plan.address, memory, tokens, x, positions, q, k, v

    def normed(self, x: SameKind) -> SameKind:
        """rms_norm(x) of any number of rows (T, M), by this thread; see `split`.

        Raises
        ------
        ValueError
            If x is not of the weights' type and sizes.
        """
        tokens, at = rows_at("x", x, self.columns, self.storage, most=math.inf)
        h: SameKind
        h, to = new_rows(x, tokens, self.columns)
        _normer(self.storage)(self._plan.numbers, tokens, at, to)
        return h

    def split(self, joined: SameKind, positions: Operand) -> tuple[SameKind, SameKind, SameKind]:
        """Compute q, k and v of any number of products that were made elsewhere, round(proj normed(x)[t] + bias).

        joined (T, H D + 2 K D) is of the weights' type; this thread norms the heads and rotates them.

        Raises
        ------
        ValueError
            As a call.
        """
        tokens, at = rows_at("joined", joined, sum(self.widths) + self.widths[1], self.storage, most=math.inf)
        places = whole_numbers_at("positions", positions, tokens)
        parts, addresses = self._new(joined, tokens)
        known = _splitter(self.storage)(self._plan.numbers, tokens, at, places, *addresses)
        self._check_places(known, positions)
        return parts

    def _new(self, like: SameKind, tokens: int) -> tuple[tuple[SameKind, SameKind, SameKind], tuple[int, int, int]]:
        """Memory for q, k and v, and the addresses."""
        queries, kv = self.widths
        q, to_q = new_rows(like, tokens, queries)
        k, to_k = new_rows(like, tokens, kv)
        v, to_v = new_rows(like, tokens, kv)
        return (q, k, v), (to_q, to_k, to_v)

    def _check_places(self, known: bool, positions: Operand) -> None:
        """Raise ValueError unless the table is `known` to have every position."""
        if not known:
            given: Any = positions
            raise ValueError(
                f"positions must be in [0, {len(self._table)}), not {given.tolist()}: make a longer table."
            )
