"""Copies of keys and values between rows and their slots in the paged cache, one program per token and block."""

from ..backend.mode import tl, triton


@triton.jit
def move_kv(
    kv,
    slots,
    k,
    v,
    page_stride,
    k_row,
    v_row,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy K and V of token t, HEADS heads of DIM numbers, into its slot, or out of it with OUT."""
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HEADS * DIM
    slot = tl.load(slots + t)
    place = kv + slot // SIZE * page_stride + at // DIM * (2 * SIZE * DIM) + slot % SIZE * DIM + at % DIM
    k += t * k_row + at
    v += t * v_row + at
    if OUT:
        tl.store(k, tl.load(place, mask=inside, other=0.0), mask=inside)
        tl.store(v, tl.load(place + SIZE * DIM, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(place, tl.load(k, mask=inside, other=0.0).to(kv.dtype.element_ty), mask=inside)
        tl.store(place + SIZE * DIM, tl.load(v, mask=inside, other=0.0).to(kv.dtype.element_ty), mask=inside)
