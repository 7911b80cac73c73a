"""Rotary position embeddings: a program rotates several heads, of one token or of neighbouring ones."""

from ..backend.mode import tl, triton


@triton.jit
def rope(
    x,
    positions,
    table,
    weight,
    out,
    n,
    x_row,
    x_head,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PAIR: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    token = row // H
    x += (token * x_row + row % H * x_head)[:, None]
    out += (row * D)[:, None]
    pair = tl.arange(0, BLOCK_PAIR)
    inside = live[:, None] & (pair < R // 2)[None, :]
    first = pair
    second = pair + R // 2
    if INTERLEAVED:
        first = pair * 2
        second = first + 1
    rest = R + tl.arange(0, BLOCK_REST)
    beyond = live[:, None] & (rest < D)[None, :]
    a = tl.load(x + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + second[None, :], mask=inside, other=0.0).to(tl.float32)
    c = tl.load(x + rest[None, :], mask=beyond, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        scale = (1.0 / tl.sqrt(squares / D + EPS))[:, None]
        a *= scale * tl.load(weight + first, mask=pair < R // 2, other=0.0).to(tl.float32)[None, :]
        b *= scale * tl.load(weight + second, mask=pair < R // 2, other=0.0).to(tl.float32)[None, :]
        c *= scale * tl.load(weight + rest, mask=rest < D, other=0.0).to(tl.float32)[None, :]
    position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
    angles = table + (position * R)[:, None] + pair[None, :]
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + R // 2, mask=inside, other=0.0)
    tl.store(out + first[None, :], (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + second[None, :], (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)
    if R < D:
        tl.store(out + rest[None, :], c.to(out.dtype.element_ty), mask=beyond)
