"""Embeddings of token ids, and logits of the rows that sample."""

from ..backend.mode import tl, triton


@triton.jit
def embed(ids, table, out, stride, M, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    tl.store(out + token * M + columns, tl.load(table + row * stride + columns, mask=columns < M), mask=columns < M)


@triton.jit
def logits(
    x,
    rows,
    head,
    out,
    R,
    N,
    K,
    x_stride,
    weight_row,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one tile of logits, transposed as in `jit_grouped`: rows of the head times a block of rows of x.

    Neighbouring programs share the rows of the head and have different blocks.
    """
    blocks = tl.cdiv(R, BLOCK_M)
    row = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < R
    entries = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = entries < N
    token = tl.load(rows + row, mask=live, other=0).to(tl.int64)
    tokens = x + (token * x_stride)[None, :]
    weights = head + (entries * weight_row)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        tile = tl.load(weights + at[None, :], mask=inside[:, None] & (EVEN_K | (at < K)[None, :]), other=0.0)
        hidden = tl.load(tokens + at[:, None], mask=live[None, :] & (EVEN_K | (at < K)[:, None]), other=0.0)
        total = tl.dot(tile, hidden, total, input_precision="ieee")
    place = out + (row.to(tl.int64) * N)[None, :] + entries[:, None]
    tl.store(place, total, mask=inside[:, None] & live[None, :])
