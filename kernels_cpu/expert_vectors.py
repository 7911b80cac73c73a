"""The inner loop of the experts as an intrinsic: one row of weights times a few tokens, in registers."""

from __future__ import annotations

from typing import Any

from numba import types

from .compiled import emitted
from .vector_ir import F32, I32, I64, Emitter, Kind, pieces

MOST_TOKENS = 4
"""Tokens that share a row of weights in registers."""


@emitted
def dots(
    typing: Any, lanes: Any, kind: Any, dim: Any, tokens: Any, row: Any, x: Any, stride: Any, out: Any, apart: Any
) -> Any:
    """out[t] = row . x[t] for `tokens` packed tokens `stride` bytes apart; their results are `apart` bytes apart."""
    width, form = int(lanes.literal_value), Kind(int(kind.literal_value))
    length, count = int(dim.literal_value), int(tokens.literal_value)
    parts = pieces(length, form, width)
    together = max(1, 8 // (count * parts[0].vectors))
    regular = sum(part.vectors == parts[0].vectors for part in parts) // together * together

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, width)
        row_, x_, stride_, out_, apart_ = arguments[4:]
        token = [e.at(x_, builder.mul(stride_, I64(t))) for t in range(count)]
        held = together * parts[0].vectors

        def products(chosen: Any, place: Any, weights: Any, sums: list[Any]) -> list[Any]:
            """Pieces at `weights` times what stands `place` bytes into each packed token."""
            sums, at = list(sums), 0
            for piece in chosen:
                for register in e.widen(piece, weights, form):
                    for t in range(count):
                        value = e.load_f32(e.at(token[t], place), 4 * width * at)
                        slot = t * held + at % held
                        sums[slot] = e.fma(register, value, sums[slot])
                    at += 1
            return sums

        sums = [e.zero] * (count * held)
        step = together * parts[0].vectors * width
        if regular:
            bytes_per_step = step * form.itemsize

            def body(index: Any, carried: list[Any]) -> list[Any]:
                weights = e.at(row_, builder.mul(index, I64(bytes_per_step)))
                return products(parts[:together], builder.mul(index, I64(4 * step)), weights, carried)

            sums = e.loop(I64(regular // together), sums, body)
        place = sum(part.vectors for part in parts[:regular]) * width
        sums = products(parts[regular:], I64(4 * place), row_, sums)
        for t in range(count):
            own = sums[t * held : (t + 1) * held]
            while len(own) > 1:
                own = [builder.fadd(a, b) for a, b in zip(own[::2], own[1::2], strict=True)]
            total = builder.extract_element(e.across(own[0], builder.fadd), I32(0))
            place_ = e.at(out_, builder.mul(apart_, I64(t)))
            builder.store(total, builder.inttoptr(place_, F32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, tokens, *[types.int64] * 5), emit
