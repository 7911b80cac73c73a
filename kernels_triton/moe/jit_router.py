"""Router kernel, one program per token: its logits form a tile (groups, experts per group)."""

from ..backend.mode import tl, triton

FLOOR = tl.constexpr(-1e38)  # rank of NaN and -inf: below every number, above experts that are excluded


@triton.jit
def _best(rank, at):
    """Largest value of a tile and its index, the lowest index of equal ones."""
    value = tl.max(tl.max(rank, 1), 0)
    return value, tl.min(tl.min(tl.where(rank == value, at, 0x7FFFFFFF), 1), 0)


@triton.jit
def _kept_groups(rank, group, inside, KEPT: tl.constexpr, TOP_TWO: tl.constexpr):
    """Set `rank` to -inf in all but the KEPT best groups.

    A group is as good as its best expert, or with TOP_TWO as the sum of its two best.
    """
    first = tl.max(rank, 1)
    strength = first
    if TOP_TWO:
        member = tl.arange(0, rank.shape[1])[None, :]
        leader = tl.min(tl.where(rank == first[:, None], member, 0x7FFFFFFF), 1)
        strength = first + tl.max(tl.where(member == leader[:, None], float("-inf"), rank), 1)
    strength = tl.where(inside, strength, float("-inf"))
    kept = group < 0
    for _ in tl.static_range(KEPT):
        value = tl.max(strength, 0)
        taken = tl.min(tl.where(strength == value, group, 0x7FFFFFFF), 0)
        kept = kept | (group == taken)
        strength = tl.where(group == taken, float("-inf"), strength)
    return tl.where(kept[:, None], rank, float("-inf"))


@triton.jit
def route(
    logits,
    bias,
    ids,
    weights,
    stride,
    scale,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    at = group[:, None] * SIZE + member[None, :]
    value = tl.load(logits + token * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-value))
        total = 1.0
    else:
        scores = tl.exp(value - tl.max(tl.max(value, 1), 0))
        total = tl.sum(tl.sum(scores, 1), 0)
    rank = value
    if BIASED or GROUPS > 1:
        rank = scores / total
    if BIASED:
        rank += tl.load(bias + at, mask=inside, other=0.0)
    rank = tl.where(rank > FLOOR, rank, FLOOR)
    rank = tl.where(inside, rank, float("-inf"))
    if GROUPS > 1:
        rank = _kept_groups(rank, group, group < GROUPS, KEPT, SIGMOID and SIZE > 1)
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.float32)
    places = tl.zeros((BLOCK_K,), tl.int32)
    for j in tl.static_range(K):
        _, place = _best(rank, at)
        taken = (at == place) & inside
        score = tl.sum(tl.sum(tl.where(taken, scores, 0.0), 1), 0)
        chosen = tl.where(slot == j, score, chosen)
        places = tl.where(slot == j, place, places)
        rank = tl.where(taken, float("-inf"), rank)
    if RENORMALISE:
        total = tl.sum(chosen, 0) + 1e-20
    tl.store(ids + token * K + slot, places, mask=slot < K)
    tl.store(weights + token * K + slot, chosen / total * scale, mask=slot < K)
