"""A product of few rows with a matrix, after a norm if there is one, with bias and residual."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from ..arguments import Operand, SameKind
from ..codegen.compiled import compiled
from ..codegen.rounding import narrowed, widened
from ..codegen.vector_ir import Storage
from ..codegen.views import pointer
from ..declarations import public
from ..machine.features import CodePath
from ..rows.rms_norm import norm_row
from ..threads.crew import Crew
from .calls import Plan, address_of, laid, opened, real
from .operands import memory_of, new_rows, residual_at, rows_at, uses, vector_of, weight_of
from .products import MOST, add_residual, gathered, lay, most_pairs, multiply_pairs, multiply_rows, no_pairs

DTYPES: dict[Storage, Any] = {Storage.FP32: np.float32, Storage.BF16: np.uint16}
"""Arrays that hold rows of a format."""


@compiled("contract")
def add_bias(sums: Any, bias: Any, out: Any) -> None:
    """out = round(sums + bias); without bias, rounded sums."""
    for r in range(len(out)):
        out[r] = narrowed(sums[r] + (widened(bias[r]) if len(bias) else np.float32(0)), out[r])


@functools.cache
def _server(lanes: int, storage: Storage, paired: bool) -> Any:
    stored = int(storage)
    number = DTYPES[storage]
    multiply_many = multiply_pairs if paired else no_pairs

    @compiled()
    def serve(at: int) -> int:
        call, board, plan, memory = opened(at)
        tokens = call[3]
        x = call[4]
        residual = call[5]
        out = call[6]
        eps = real(plan, 7)
        rows = plan[0]
        width = plan[1]
        given = carray(pointer(x), (tokens, width), number)
        norm = carray(pointer(plan[3]), (plan[4],), number)
        bias = carray(pointer(plan[5]), (plan[6],), number)
        h = carray(pointer(memory[0]), (tokens, width), number)
        if tokens > MOST:
            for t in range(tokens if len(norm) else 0):
                norm_row(given[t], norm, eps, h[t])
            source = memory[0] if len(norm) else x
            multiply_many(
                lanes, board, plan[2], rows, source, width, tokens, plan[5] if len(bias) else 0, residual, out
            )
            return 0
        wide = carray(pointer(memory[1]), (tokens, width), np.float32)
        sums = carray(pointer(memory[2]), (tokens, rows), np.float32)
        found = carray(pointer(out), (tokens, rows), number)
        for t in range(tokens):
            if len(norm):
                norm_row(given[t], norm, eps, h[t])
                lay(lanes, stored, h[t], wide[t])
            else:
                lay(lanes, stored, given[t], wide[t])
        multiply_rows(lanes, stored, board, plan[2], rows, wide, tokens, sums)
        for t in range(tokens):
            add_bias(sums[t], bias, found[t])
        if residual:
            added = carray(pointer(residual), (tokens, rows), number)
            for t in range(tokens):
                add_residual(added[t], found[t])
        return 0

    return serve


@public
class FewLinear:
    """Rows times a matrix, held and checked once, for calls with few rows.

        out[t] = residual[t] + round(weight norm(x[t]) + bias)

    The weights are read in place, once per call of up to four rows, by the calling thread and helpers that wait for the
    next call in between. Sums are in fp32; results do not depend on the number of threads. The GIL is released. With
    more than four rows, AVX512_BF16 multiplies pairs, which takes subnormal numbers as 0 and sums in another order.

    Parameters
    ----------
    weight : (R, C) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits; as `fits_few_rows` says
        Read in place: later changes of the memory take effect.
    bias : (R,) of its type, optional
    norm : (C,) of its type, optional
        Weight of an RMSNorm of x (`rms_norm`).
    eps : float
        Epsilon of the norm.
    path : CodePath, optional
        Code path, by default this computer's own (`features`).

    Raises
    ------
    TypeError
        If an operand is neither an array nor a tensor, or has another dtype.
    ValueError
        If shapes disagree, or the weight does not fit.

    Attributes
    ----------
    most : int
        Most rows of a call: `MOST`, or more where AVX512_BF16 multiplies bf16 weights faster than torch does.

    Examples
    --------
    >>> double = FewLinear(np.eye(32, dtype=np.float32) * 2)
    >>> double(np.full((1, 32), 3, np.float32))[0, :3]
    array([6., 6., 6.], dtype=float32)
    """

    MOST = MOST
    """Most rows that are multiplied with one read of the weights, by this and the other stages for few rows."""

    def __init__(
        self,
        weight: Operand,
        bias: Operand | None = None,
        *,
        norm: Operand | None = None,
        eps: float = 1e-5,
        path: CodePath | None = None,
    ) -> None:
        held = weight_of("weight", weight, path)
        dtype = held.array.dtype
        scale = vector_of("norm", norm, dtype, held.columns)
        shift = vector_of("bias", bias, dtype, held.rows)
        self._plan = Plan(held.rows, held.columns, held.array, scale, len(scale), shift, len(shift), np.float32(eps))
        self.rows = held.rows
        self.columns = held.columns
        self.storage = held.storage
        self.lanes = held.lanes
        columns = held.columns
        self.most = most_pairs(held.lanes, held.storage)
        self._many = uses(("normed", dtype, columns), rows=self.most)
        self._uses = uses(("normed", dtype, columns), ("x", np.float32, columns), ("sums", np.float32, held.rows))
        self.serve = _server(held.lanes, held.storage, self.most > MOST)

    def __call__(self, x: SameKind, residual: Operand | None = None, *, threads: int = 1) -> SameKind:
        """Multiply x (T, C), T in 1 .. `most`, on this many threads: -> (T, R) of x's kind and type.

        Raises
        ------
        ValueError
            If x or the residual (T, R) is not of the weight's type and sizes.
        """
        tokens, at = rows_at("x", x, self.columns, self.storage, most=self.most)
        added = residual_at(residual, tokens, self.rows, self.storage)
        crew = gathered(self.lanes, threads)
        out: SameKind
        out, to = new_rows(x, tokens, self.rows)
        call = laid(*self.call(crew, tokens, at, added, to))
        self.serve(address_of(call))
        return out

    def call(self, crew: Crew, tokens: int, x: int, residual: int, out: int) -> tuple[int, ...]:
        """Numbers of a call of `serve` with rows at these addresses; 0 is that of no residual."""
        memory = memory_of(crew, self._uses if tokens <= MOST else self._many).address
        return crew.address, self._plan.address, memory, tokens, x, residual, out
