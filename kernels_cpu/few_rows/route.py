"""The router of few rows: norm, gate, and the choice of experts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from ..arguments import Operand, SameKind
from ..codegen.compiled import compiled
from ..codegen.vector_ir import Storage
from ..codegen.views import pointer
from ..declarations import public
from ..machine.features import CodePath
from ..rows.rms_norm import norm_row
from ..rows.route import choose
from ..threads.crew import Crew
from .calls import Plan, address_of, laid, opened, real
from .linear import DTYPES, add_bias
from .operands import memory_of, new_rows, rows_at, uses, vector_of, weight_of
from .products import gathered, lay, most_rows, multiply_rows


@functools.cache
def _server(lanes: int, storage: Storage) -> Any:
    stored = int(storage)
    number = DTYPES[storage]

    @compiled()
    def serve(at: int) -> int:
        call, board, plan, memory = opened(at)
        tokens = call[3]
        x = call[4]
        out = call[5]
        out_gates = call[6]
        eps = real(plan, 8)
        scale = real(plan, 9)
        experts = plan[0]
        width = plan[1]
        chosen = plan[3]
        given = carray(pointer(x), (tokens, width), number)
        norm = carray(pointer(plan[5]), (width,), number)
        bias = carray(pointer(plan[6]), (plan[7],), number)
        wide = carray(pointer(memory[0]), (tokens, width), np.float32)
        sums = carray(pointer(memory[1]), (tokens, experts), np.float32)
        logits = carray(pointer(memory[2]), (tokens, experts), number)
        ids = carray(pointer(memory[3]), (tokens, chosen), np.int32)
        shares = carray(pointer(memory[4]), (tokens, chosen), np.float32)
        h = carray(pointer(out), (tokens, width), number)
        gates = carray(pointer(out_gates), (tokens, 2 * chosen), np.float32)
        for t in range(tokens):
            norm_row(given[t], norm, eps, h[t])
            lay(lanes, stored, h[t], wide[t])
        multiply_rows(lanes, stored, board, plan[2], experts, wide, tokens, sums)
        for t in range(tokens):
            add_bias(sums[t], bias, logits[t])
        choose(logits.reshape(-1), (experts,), experts, plan[4] != 0, scale, ids, shares, 0, tokens)
        for t in range(tokens):
            for j in range(chosen):
                gates[t, j] = ids[t, j]
                gates[t, chosen + j] = shares[t, j]
        return 0

    return serve


@public
class FewRoute:
    """The router of one layer, for calls with few rows; weights are held and checked once.

        h = rms_norm(x);  ids, weights = route(round(gate h + bias), k)

    The calling thread norms the rows and chooses.

    Parameters
    ----------
    norm : (M,) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits
    gate : (E, M) of its type
        As `fits_few_rows` says, and read in place.
    k : int
        Experts per row.
    bias : (E,) of its type, optional
        Added to the logits.
    renormalise : bool
        True if the weights of a row sum to `scale`.
    scale : float
        Factor of all weights.
    eps : float
    path : CodePath, optional
        Code path, by default this computer's own (`features`).

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes disagree, the gate does not fit, or there are fewer than k experts.

    Attributes
    ----------
    most : int
        Most rows of a call: `FewLinear.MOST`, or more where that was measured to be faster than separate operations.

    Examples
    --------
    >>> gate = np.arange(4, dtype=np.float32)[:, None] * np.full((1, 32), 1 / 32, np.float32)
    >>> h, gates = FewRoute(np.ones(32, np.float32), gate, 2, renormalise=True)(np.ones((1, 32), np.float32))
    >>> gates.round(2)
    array([[3.  , 2.  , 0.73, 0.27]], dtype=float32)
    """

    def __init__(
        self,
        norm: Operand,
        gate: Operand,
        k: int,
        *,
        bias: Operand | None = None,
        renormalise: bool = False,
        scale: float = 1.0,
        eps: float = 1e-5,
        path: CodePath | None = None,
    ) -> None:
        held = weight_of("gate", gate, path)
        dtype = held.array.dtype
        if not 1 <= k <= held.rows:
            raise ValueError(f"k must be in [1, {held.rows}], the rows of gate, not {k}: choose fewer experts.")
        vector = vector_of("norm", norm, dtype, held.columns)
        shift = vector_of("bias", bias, dtype, held.rows)
        factors = np.float32(eps), np.float32(scale)
        self._plan = Plan(held.rows, held.columns, held.array, k, int(renormalise), vector, shift, len(shift), *factors)
        self.columns = held.columns
        self.k = k
        self.count = held.rows
        self.storage = held.storage
        self.lanes = held.lanes
        self.most = most_rows(held.lanes)
        self._uses = uses(
            ("x", np.float32, held.columns),
            ("sums", np.float32, held.rows),
            ("joined", dtype, held.rows),
            ("ids", np.int32, k),
            ("shares", np.float32, k),
            rows=self.most,
        )
        self.serve = _server(held.lanes, held.storage)

    def __call__(self, x: SameKind, *, threads: int = 1) -> tuple[SameKind, SameKind]:
        """Route rows x (T, M), T in 1 .. `most`: -> h (T, M) of x's type and gates (T, 2 k) fp32, ids and then weights.

        Raises
        ------
        ValueError
            If x is not of the weights' type and sizes.
        """
        tokens, at = rows_at("x", x, self.columns, self.storage, most=self.most)
        crew = gathered(self.lanes, threads)
        h, to = new_rows(x, tokens, self.columns)
        gates, to_gates = new_rows(x, tokens, 2 * self.k, fp32=True)
        call = laid(*self.call(crew, tokens, at, to, to_gates))
        self.serve(address_of(call))
        return h, gates

    def call(self, crew: Crew, tokens: int, x: int, h: int, gates: int) -> tuple[int, ...]:
        """Numbers of a call of `serve` with rows at these addresses."""
        return crew.address, self._plan.address, memory_of(crew, self._uses).address, tokens, x, h, gates
