"""The inner loop of the experts as an intrinsic: one row of weights times a few tokens, in registers."""

from __future__ import annotations

from typing import Any

from numba import types

from .compiled import emitted
from .vector_ir import F32, I32, I64, Emitter, Kind, Piece, pieces

_SUMS = {16: 16, 8: 8}
"""Registers for running sums, by lanes."""


def rows_at_once(tokens: int, lanes: int) -> int:
    """Rows of weights that share each load of the tokens, a power of two."""
    room = _SUMS[lanes] // (2 * tokens)
    return 1 << (min(4, max(1, room)).bit_length() - 1)


@emitted
def dots(
    typing: Any, lanes: Any, kind: Any, dim: Any, rows: Any, tokens: Any,
    row: Any, x: Any, stride: Any, out: Any, apart: Any,
) -> Any:  # fmt: skip
    """out[t, r] = row[r] . x[t] for `rows` rows, one after the other, and `tokens` packed tokens.

    Tokens are `stride` bytes apart, their results `apart` bytes.
    """
    width, form = int(lanes.literal_value), Kind(int(kind.literal_value))
    length, several, count = (int(value.literal_value) for value in (dim, rows, tokens))
    parts = pieces(length, form, width)
    regular = sum(part.vectors == parts[0].vectors for part in parts)
    held = parts[0].vectors

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, width)
        row_, x_, stride_, out_, apart_ = arguments[5:]
        token = [e.at(x_, builder.mul(stride_, I64(t))) for t in range(count)]

        def products(piece: Piece, place: Any, weights: Any, sums: list[Any]) -> list[Any]:
            """A piece of each row, at `weights`, times what stands `place` bytes into each packed token."""
            sums = list(sums)
            widened = [e.widen(piece, e.at(weights, r * length * form.itemsize), form) for r in range(several)]
            for at in range(piece.vectors):
                for t in range(count):
                    value = e.load_f32(e.at(token[t], place), 4 * width * at)
                    for r in range(several):
                        slot = (t * several + r) * held + at
                        sums[slot] = e.fma(widened[r][at], value, sums[slot])
            return sums

        step = held * width

        def body(index: Any, carried: list[Any]) -> list[Any]:
            weights = e.at(row_, builder.mul(index, I64(step * form.itemsize)))
            return products(parts[0], builder.mul(index, I64(4 * step)), weights, carried)

        sums = e.loop(I64(regular), [e.zero] * (count * several * held), body)
        for number, piece in enumerate(parts[regular:]):
            sums = products(piece, I64(4 * (regular * step + number * width)), row_, sums)
        for t in range(count):
            for r in range(several):
                own = sums[(t * several + r) * held : (t * several + r + 1) * held]
                total = builder.fadd(own[0], own[1]) if held == 2 else own[0]
                value = builder.extract_element(e.across(total, builder.fadd), I32(0))
                place = e.at(e.at(out_, builder.mul(apart_, I64(t))), 4 * r)
                builder.store(value, builder.inttoptr(place, F32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(lanes, kind, dim, rows, tokens, *[types.int64] * 5), emit
