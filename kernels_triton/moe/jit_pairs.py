"""Sorting of pairs of token and expert by expert: one program per expert and no atomics, hence deterministic."""

from ..backend.mode import tl, triton


@triton.jit
def _belongs_to(expert, ids, at, n, E):
    """Mask of the pairs that belong to an expert; pairs with an expert out of range belong to number E."""
    owner = tl.load(ids + at, mask=at < n, other=0)
    return (at < n) & (tl.where((owner < 0) | (owner >= E), E, owner) == expert)


@triton.jit
def count_pairs(ids, counts, n, E, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, BLOCK):
        at = tl.arange(0, BLOCK).to(tl.int64) + start
        found += _belongs_to(expert, ids, at, n, E)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit
def place_pairs(
    ids, counts, pairs, experts, rows, n, E, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    expert = tl.program_id(0)
    all_experts = tl.arange(0, BLOCK_E)
    blocks = (tl.load(counts + all_experts, mask=all_experts <= E, other=0) + ROWS - 1) // ROWS
    first = tl.sum(tl.where(all_experts < expert, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(all_experts == expert, blocks, 0), 0)
    if expert == 0:
        tl.store(rows, tl.sum(blocks, 0) * ROWS)
    if own_blocks > 0:
        for start in range(0, own_blocks, BLOCK):
            at = tl.arange(0, BLOCK).to(tl.int64) + start
            tl.store(experts + first + at, expert, mask=at < own_blocks)
        place = first * ROWS
        for start in range(0, n, BLOCK):
            at = tl.arange(0, BLOCK).to(tl.int64) + start
            mine = _belongs_to(expert, ids, at, n, E).to(tl.int64)
            tl.store(pairs + place + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
            place += tl.sum(mine, 0)
        padding = place + tl.arange(0, ROWS)
        tl.store(pairs + padding, tl.zeros((ROWS,), tl.int64) + n, mask=padding < (first + own_blocks) * ROWS)
