"""The routed experts of few rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from ..arguments import Operand, SameKind
from ..codegen.compiled import compiled
from ..codegen.rounding import narrowed, widened
from ..codegen.vector_ir import LINE, Storage
from ..codegen.views import pointer
from ..declarations import public
from ..experts.activations import Activations, add_bias, convert, fill_clamped, fill_swiglu
from ..experts.fused_moe import biases_of, is_clamped, sort_pairs
from ..experts.tasks import weighted_sum
from ..experts.weights import ROWS, Matrices, PackedExperts
from ..machine.features import CodePath, code_path
from ..threads.crew import Crew
from .calls import Plan, address_of, laid, opened
from .linear import DTYPES
from .operands import Uses, memory_of, new_rows, residual_at, rows_at, storage_of, uses
from .products import add_residual, gathered, multiply_blocks


@compiled()
def _activations(plan: Any, first: int, memory: Any, place: int, pairs: int) -> Any:
    """Activations for matrices whose width and groups are plan[first] and plan[first + 1], in the thread's memory."""
    width = plan[first]
    groups = plan[first + 1]
    return Activations(
        carray(pointer(memory[place]), (pairs, width), np.float32),
        carray(pointer(memory[place]), (pairs, 0), np.uint32),
        carray(pointer(memory[place + 1]), (pairs, width + LINE if groups else 0), np.int8),
        carray(pointer(memory[place + 2]), (pairs, groups), np.float32),
        carray(pointer(memory[place + 3]), (pairs, groups), np.int32),
        0,
        0,
    )


@compiled()
def _list_parts(first: Any, words: int, word_bytes: int, scales: int, scale_bytes: int, parts: Any) -> int:
    """List the chosen experts as `multiply_blocks` takes them, and return their number."""
    touched = 0
    for expert in range(len(first) - 1):
        if first[expert] < first[expert + 1]:
            parts[touched, 0] = words + expert * word_bytes
            parts[touched, 1] = scales + expert * scale_bytes
            parts[touched, 2] = first[expert]
            parts[touched, 3] = first[expert + 1]
            touched += 1
    return touched


@functools.cache
def _server(lanes: int, format: int, storage: Storage, clamped: bool, bias_bytes: int) -> Any:
    """The work of a call; biases have no bytes per number, or those of bf16 or fp32."""
    number = DTYPES[storage]
    bias_number = np.uint16 if bias_bytes == 2 else np.float32

    @compiled()
    def serve(at: int) -> int:
        call, board, plan, memory = opened(at)
        tokens = call[3]
        chosen = call[4]
        experts = plan[0]
        dim = plan[1]
        inner_dim = plan[2]
        zero = plan[3]
        pairs = tokens * chosen
        given = carray(pointer(call[5]), (tokens, dim), number)
        routing = carray(pointer(call[6]), (tokens, 2 * chosen), np.float32)
        added = carray(pointer(call[7]), (tokens if call[7] else 0, dim), number)
        found = carray(pointer(call[8]), (tokens, dim), number)
        ids = carray(pointer(memory[0]), (tokens, chosen), np.int64)
        first = carray(pointer(memory[1]), (experts + 1,), np.int64)
        owners = carray(pointer(memory[2]), (pairs,), np.int64)
        places = carray(pointer(memory[3]), (tokens, chosen), np.int64)
        parts = carray(pointer(memory[4]), (pairs, 4), np.int64)
        x = _activations(plan, 4, memory, 5, pairs)
        both = carray(pointer(memory[9]), (pairs, plan[6] * ROWS), np.float32)
        inner = _activations(plan, 12, memory, 10, pairs)
        answers = carray(pointer(memory[14]), (pairs, plan[14] * ROWS), np.float32)
        total = carray(pointer(memory[15]), (dim,), np.float32)
        biased = experts if bias_bytes else 0
        up_bias = carray(pointer(plan[20]), (biased, 2 * inner_dim), bias_number)
        down_bias = carray(pointer(plan[21]), (biased, dim), bias_number)
        for t in range(tokens):
            for j in range(chosen):
                ids[t, j] = np.int64(routing[t, j])
        first[:] = 0
        wrong = sort_pairs(ids, first, owners, places)
        if wrong >= 0:
            return wrong + 1
        for i in range(pairs):
            row = given[owners[i]]
            for m in range(dim):
                x.exact[i, m] = widened(row[m])
            x.exact[i, dim:] = 0
            convert(i, x, zero)
        touched = _list_parts(first, plan[8], plan[9], plan[10], plan[11], parts)
        multiply_blocks(lanes, format, board, parts, touched, plan[6], plan[7], x, both)
        for expert in range(biased):
            for i in range(first[expert], first[expert + 1]):
                add_bias(up_bias[expert], both[i])
        for i in range(pairs):
            if clamped:
                fill_clamped(both, inner_dim, i, inner, zero)
            else:
                fill_swiglu(both, inner_dim, i, inner, zero)
        touched = _list_parts(first, plan[16], plan[17], plan[18], plan[19], parts)
        multiply_blocks(lanes, format, board, parts, touched, plan[14], plan[15], inner, answers)
        for t in range(tokens):
            weighted_sum(answers, places[t], routing[t, chosen:], ids[t], down_bias, total)
            for m in range(dim):
                found[t, m] = narrowed(total[m], found[t, m])
            if call[7]:
                add_residual(added[t], found[t])
        return 0

    return serve


def _numbers_of(matrices: Matrices) -> list[int | NDArray[Any]]:
    """Width, groups, blocks and steps, and where words and scales are, with the bytes of an expert's."""
    words = matrices.words
    scales = matrices.scales
    sizes = [matrices.width, scales.shape[2], words.shape[1], words.shape[2]]
    return [*sizes, words, words[0].nbytes, scales, scales[0].nbytes]


@public
class FewExperts:
    """The routed experts of one layer as by `fused_moe`, for calls with at most four rows; they are checked once.

        out[t] = residual[t] + round(sum over j of
                 weights[t, j] * (down[e] a(gate_up[e] h[t] + gate_up_bias[e]) + down_bias[e]))
        e = ids[t, j]

    Activations stay in fp32 with FP32 and BF16 weights, and are rounded as by `fused_moe` with all others.

    Parameters
    ----------
    experts : PackedExperts
        From `pack_experts`, `pack_int4`, `pack_mxfp4` or `experts_of_blocks`; read in place.
    activation : "swiglu" or "swiglu-clamped"
        Function a, as of `fused_moe`.
    gate_up_bias, down_bias : (E, 2 F) and (E, M) fp32 or torch.bfloat16, or uint16 that holds its bits, optional
        Both or none; read in place.
    path : CodePath, optional
        Code path, by default this computer's own (`features`); one with vectors.

    Raises
    ------
    TypeError
        If the experts are not packed.
    ValueError
        If they lie in rows, the path is the portable one, or a bias has another shape than the experts ask for.

    Examples
    --------
    >>> from kernels_cpu import pack_experts
    >>> stage = FewExperts(pack_experts(np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32)))
    >>> stage(np.full((1, 1), 2, np.float32), np.array([[0, 1]], np.float32)).round(4)
    array([[3.5232]], dtype=float32)
    """

    def __init__(
        self,
        experts: PackedExperts,
        *,
        activation: str = "swiglu",
        gate_up_bias: Operand | None = None,
        down_bias: Operand | None = None,
        path: CodePath | None = None,
    ) -> None:
        if not isinstance(experts, PackedExperts):
            raise TypeError(
                f"experts must be PackedExperts, not {type(experts).__name__}: pass what pack_experts returns."
            )
        self.lanes = code_path(path).value
        up = experts.gate_up
        down = experts.down
        if up.in_place or not self.lanes:
            raise ValueError("experts must be packed in blocks, on a path with vectors: use fused_moe for others.")
        self.count = len(experts)
        self.dim = up.dim
        zero = experts.format.zero
        biases = biases_of(experts, gate_up_bias, down_bias)
        self._plan = Plan(self.count, up.dim, down.dim, zero, *_numbers_of(up), *_numbers_of(down), *biases)
        self._used: dict[int, Uses] = {}
        self._sizes = experts.gate_up, experts.down
        bias_bytes = biases.up.itemsize if len(biases.up) else 0
        form = self.lanes, int(experts.format)
        clamped = is_clamped(activation)
        self._servers: dict[Storage | None, Any] = {of: _server(*form, of, clamped, bias_bytes) for of in DTYPES}

    def __call__(self, h: SameKind, gates: Operand, residual: Operand | None = None, *, threads: int = 1) -> SameKind:
        """Compute rows h (T, M), T in 1 .. 4, of fp32, torch.bfloat16, or uint16 that holds bfloat16 bits.

        gates (T, 2 k) fp32 holds the ids of each row's experts, and then their weights. The result has h's kind and
        type, as the residual (T, M) has.

        Raises
        ------
        ValueError
            If shapes disagree, or an expert is out of range.
        """
        storage = storage_of(h.dtype)
        tokens, at = rows_at("h", h, self.dim, storage)
        width = int(gates.shape[-1])  # type: ignore[union-attr]
        count, at_gates = rows_at("gates", gates, width, Storage.FP32)
        chosen = width // 2
        if width % 2 or not width or count != tokens:
            raise ValueError(
                f"gates must be ({tokens}, 2 k), not ({count}, {width}): pass ids and weights of each row."
            )
        added = residual_at(residual, tokens, self.dim, storage)
        crew = gathered(self.lanes, threads)
        out: SameKind
        out, to = new_rows(h, tokens, self.dim)
        call = laid(*self.call(crew, tokens, chosen, at, at_gates, added, to))
        wrong = self.server(storage)(address_of(call))
        if wrong:
            t, j = divmod(wrong - 1, chosen)
            routing: Any = gates
            raise ValueError(
                f"gates[{t}, {j}] must be an expert in [0, {self.count}), not {routing[t, j]}: correct the routing."
            )
        return out

    def server(self, storage: Storage | None) -> Any:
        """The compiled work for rows of a format."""
        return self._servers[storage]

    def call(
        self, crew: Crew, tokens: int, chosen: int, h: int, gates: int, residual: int, out: int
    ) -> tuple[int, ...]:
        """Numbers of a call with rows at these addresses; 0 is that of no residual.

        The answer is 0, or 1 + the place of a wrong expert in the gates.
        """
        memory = memory_of(crew, self._uses(chosen)).address
        return crew.address, self._plan.address, memory, tokens, chosen, h, gates, residual, out

    def _uses(self, chosen: int) -> Uses:
        """Memory of a call with `chosen` experts per row."""
        if chosen not in self._used:
            self._used[chosen] = uses(*self._memory(chosen))
        return self._used[chosen]

    def _memory(self, chosen: int) -> list[tuple[str, Any, int]]:
        up, down = self._sizes
        found: list[tuple[str, Any, int]] = [
            ("ids", np.int64, chosen),
            ("first", np.int64, self.count + 1),
            ("owners", np.int64, chosen),
            ("places", np.int64, chosen),
            ("parts", np.int64, 4 * chosen),
        ]
        for name, matrices, outputs in (("x", up, "both"), ("inner", down, "answers")):
            groups = chosen * matrices.scales.shape[2]
            found += [
                (f"{name} exact", np.float32, chosen * matrices.width),
                (f"{name} numbers", np.int8, chosen * (matrices.width + LINE) if groups else 0),
                (f"{name} scales", np.float32, groups),
                (f"{name} offsets", np.int32, groups),
                (outputs, np.float32, chosen * matrices.words.shape[1] * ROWS),
            ]
        return [*found, ("total", np.float32, self.dim)]
