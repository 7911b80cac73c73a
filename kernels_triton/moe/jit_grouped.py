"""Grouped GEMM of routed experts, and the sum over a token's experts.

Output tiles are transposed, (columns, rows): Hopper's matrix instruction takes 64 rows of its first operand, which are
then rows of weights, so that a few tokens do not leave it partly idle. For many tokens both orders are equally fast.
"""

from ..backend.mode import tl, triton

# Numbers of `kernels_triton.moe.experts.Activation`.
NONE = tl.constexpr(0)
GEGLU = tl.constexpr(2)
CLAMPED = tl.constexpr(3)
ROOT_HALF = tl.constexpr(0.7071067811865476)
LIMIT = tl.constexpr(7.0)  # of GPT-OSS
STEEPNESS = tl.constexpr(1.702)
LEFT_OUT = tl.constexpr(-1)
"""The page of an expert that is computed elsewhere."""


@triton.jit
def _tile_of(pid, blocks, across, GROUP_M: tl.constexpr):
    """Block and column tile of a program: GROUP_M blocks per column tile, so that its weights stay in the cache."""
    width = GROUP_M * across
    first = pid // width * GROUP_M
    high = tl.minimum(blocks - first, GROUP_M)
    return first + pid % width % high, pid % width // high


@triton.jit
def _add(total, tile, scale, inside, x, x_high, BITS: tl.constexpr):
    """Add one step's product of a tile of weights and tokens to `total`; BITS is 0 where weights are not quantised."""
    if BITS == 0:
        return tl.dot(tile, x, total, input_precision="ieee")
    if BITS == 4:
        product = tl.dot(((tile & 15).to(tl.int8) - 8).to(x.dtype), x, input_precision="ieee")
        product = tl.dot(((tile >> 4).to(tl.int8) - 8).to(x.dtype), x_high, product, input_precision="ieee")
    else:
        product = tl.dot(tile.to(x.dtype), x, input_precision="ieee")
    return total + product * tl.load(scale, mask=inside, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == CLAMPED:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1
        gate = gate * tl.sigmoid(gate * STEEPNESS)
    elif ACTIVATION == GEGLU:
        gate = gate * 0.5 * (1 + tl.erf(gate * ROOT_HALF))
    else:
        gate = gate * tl.sigmoid(gate)
    return gate * up


@triton.jit
def grouped(
    x,
    weight,
    scale,
    bias,
    factors,
    out,
    pairs,
    experts,
    rows,
    pages,
    n,
    N,
    K,
    E,
    P,
    x_stride,
    weight_page,
    weight_row,
    scale_page,
    scale_row,
    bias_page,
    out_stride,
    SHARE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGED: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
):
    """Multiply rows of pairs with their experts' matrices; `weight` is a descriptor with TMA, else a pointer.

    Program i of n computes tiles i, i + n, ...: a single tile where there are as many programs as tiles. Blocks of an
    expert that does not exist, or that is on no page, become NaN; those of an expert whose page is -1 become zero.
    """
    blocks = (tl.load(rows) // BLOCK_M).to(tl.int32)
    across = tl.cdiv(N, BLOCK_N)
    # a byte of 4-bit weights holds one of the group's first half in its lower bits, one of the second half in its upper
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    STEP: tl.constexpr = BLOCK_K // HALVES
    RUN: tl.constexpr = GROUP // HALVES
    stored = K // HALVES
    for tile in range(tl.program_id(0), blocks * across, tl.num_programs(0)):
        block, column = _tile_of(tile, blocks, across, GROUP_M)
        page = tl.load(experts + block).to(tl.int64)
        if PAGED:
            page = tl.load(pages + page, mask=page < E, other=P).to(tl.int64)
        # Where to stop adding up: -1 for an expert that is left out, 0 for one that is nowhere.
        end = tl.where(page == LEFT_OUT, -1, tl.where((page >= 0) & (page < P), stored, 0))
        page = tl.where(end > 0, page, 0)
        row = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + row).to(tl.int64)
        live = pair < n
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < N
        gates = columns.to(tl.int64)
        ups = gates + N
        if ACTIVATION == CLAMPED:  # gates and ups alternate in GPT-OSS
            gates = gates * 2
            ups = gates + 1
        tokens = x + (pair // SHARE)[None, :] * x_stride
        if not TMA:
            matrix = weight + page * weight_page
            gate_rows = matrix + (gates * weight_row)[:, None]
            up_rows = matrix + (ups * weight_row)[:, None]
        scales = scale + page * scale_page
        gate_scales = scales + gates * scale_row
        up_scales = scales + ups * scale_row
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, end, STEP):
            at = start + tl.arange(0, STEP)
            group = start // RUN
            first = at + group * (GROUP - RUN)
            mask = inside[:, None] & (EVEN_K | (at < stored)[None, :])
            seen = live[None, :] & (EVEN_K | (at < stored)[:, None])
            low = tl.load(tokens + first[:, None], mask=seen, other=0.0)
            high = low
            if BITS == 4:
                high = tl.load(tokens + (first + RUN)[:, None], mask=seen, other=0.0)
            if TMA:
                gate_tile = weight.load([page.to(tl.int32), column * BLOCK_N, start]).reshape(BLOCK_N, STEP)
            else:
                gate_tile = tl.load(gate_rows + at[None, :], mask=mask, other=0.0)
            total = _add(total, gate_tile, gate_scales + group, inside, low, high, BITS)
            if ACTIVATION != NONE:
                if TMA:
                    up_tile = weight.load([page.to(tl.int32), N + column * BLOCK_N, start]).reshape(BLOCK_N, STEP)
                else:
                    up_tile = tl.load(up_rows + at[None, :], mask=mask, other=0.0)
                total_up = _add(total_up, up_tile, up_scales + group, inside, low, high, BITS)
        # Loaded again, as volatile so that the compiler does so: pairs live across the loop make large tiles spill.
        pair = tl.load(pairs + row, volatile=True).to(tl.int64)
        live = pair < n
        if BIASED:
            biases = bias + page * bias_page
            total += tl.load(biases + gates, mask=inside, other=0.0).to(tl.float32)[:, None]
            if ACTIVATION != NONE:
                total_up += tl.load(biases + ups, mask=inside, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION != NONE:
            total = _activated(total, total_up, ACTIVATION)
        if WEIGHTED:
            total *= tl.load(factors + pair, mask=live, other=0.0)[None, :]
        nothing = tl.where(end < 0, 0.0, float("nan"))  # ids are not checked on the host: an invalid one gives NaN
        total = tl.where(end > 0, total, nothing)
        place = out + pair[None, :] * out_stride + columns[:, None]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & live[None, :])


@triton.jit
def combine(rows, out, N, K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum a token's K rows in the order of its experts."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        total += tl.load(rows + (token * K + j) * N + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * N + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(x, out, stride, F, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Activate one row of gates followed by ups."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    place = x + row * stride + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + columns, _activated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)
