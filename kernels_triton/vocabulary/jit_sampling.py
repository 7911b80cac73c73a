"""Sampling of the next token from a row of logits without sorting: sums of integers are the same in any order.

A logit l has the weight floor(2^32 exp((l - max) / temperature)). Its rank is an integer made of its bits, which grows
with l. The rank at which the running sum of weights, or the number of logits, crosses a target is found by bisection.
"""

from ..backend.mode import tl, triton

ONE = tl.constexpr(4294967296.0)  # 2^32, the weight of the largest logit
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _tile(logits, start, V, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    value = tl.load(logits + at, mask=at < V, other=NEGATIVE_INFINITY)
    return at, tl.where(value == 0, 0.0, value)  # -0 is 0


@triton.jit
def _rank(value):
    """Integer of a logit, in the order of the logits."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _weight(value, largest, temperature):
    return (tl.exp((value - largest).to(tl.float64) / temperature) * ONE).to(tl.int64)


@triton.jit
def _weight_from(logits, rank, largest, temperature, V, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the weights of all logits of this rank or a higher one; their number if COUNTED."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        at, value = _tile(logits, start, V, BLOCK)
        if COUNTED:
            total += ((_rank(value) >= rank) & (at < V)).to(tl.int64)
        else:
            total += tl.where(_rank(value) >= rank, _weight(value, largest, temperature), 0)
    return tl.sum(total, 0)


@triton.jit
def _likely(logits, least, largest, temperature, V, BLOCK: tl.constexpr):
    """Sum of the weights that are `least` or more."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        _, value = _tile(logits, start, V, BLOCK)
        weight = _weight(value, largest, temperature)
        total += tl.where(weight >= least, weight, 0)
    return tl.sum(total, 0)


@triton.jit
def _crossing(logits, target, largest, temperature, V, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Rank at which the sum of weights from the highest rank, or the number of logits if COUNTED, exceeds `target`.

    Returns the rank, the sum or the number above it, and the weight of one logit of this rank.
    """
    above = _rank(largest) + 1
    within = above * 0 - 2147483648
    for _ in range(32):
        middle = (above + within) >> 1
        enough = _weight_from(logits, middle, largest, temperature, V, COUNTED, BLOCK) > target
        within = tl.where(enough, middle, within)
        above = tl.where(enough, above, middle)
    bits = within.to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    before = _weight_from(logits, above, largest, temperature, V, COUNTED, BLOCK)
    return within, before, _weight(value, largest, temperature)


@triton.jit
def _draw(seed, position):
    """First number in [0, 1) of Philox 4x64-10 with this key and counter, equal to numpy's."""
    zero = seed * 0
    c0 = position + 1
    c1 = zero
    c2 = zero
    c3 = zero
    k0 = seed
    k1 = zero
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, zero + 0xD2E7470EE14C6C93)
        low0 = c0 * 0xD2E7470EE14C6C93
        high1 = tl.umulhi(c2, zero + 0xCA5A826395121157)
        low1 = c2 * 0xCA5A826395121157
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B97F4A7C15
        k1 = k1 + 0xBB67AE8584CAA73B
    return (c0 >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _nth(logits, rank, n, V, BLOCK: tl.constexpr):
    """Index of the n-th logit of this rank, counted from 0."""
    seen = n * 0
    place = n * 0
    for start in range(0, V, BLOCK):
        at, value = _tile(logits, start, V, BLOCK)
        equal = ((_rank(value) == rank) & (at < V)).to(tl.int64)
        here = (equal > 0) & (seen + tl.cumsum(equal, 0) - 1 == n)
        place += tl.sum(tl.where(here, at, 0).to(tl.int64), 0)
        seen += tl.sum(equal, 0)
    return place


@triton.jit
def sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    out,
    stride,
    V,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    maxima = tl.zeros((BLOCK,), tl.float32) + NEGATIVE_INFINITY
    for start in range(0, V, BLOCK):
        _, value = _tile(logits, start, V, BLOCK)
        maxima = tl.maximum(maxima, value)
    largest = tl.max(maxima, 0)
    rank = _rank(largest)
    n = row * 0
    if DRAWN:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            nucleus = _weight_from(logits, rank * 0 - 2147483648, largest, temperature, V, False, BLOCK)
            top_k = tl.load(top_ks + row)
            if (top_k > 0) & (top_k < V):
                last, before, each = _crossing(logits, top_k - 1, largest, temperature, V, True, BLOCK)
                nucleus = _weight_from(logits, last + 1, largest, temperature, V, False, BLOCK)
                nucleus += (top_k - before) * each
            top_p = tl.load(top_ps + row)
            if top_p < 1:
                need = tl.maximum(tl.ceil(top_p * nucleus.to(tl.float64)).to(tl.int64), 1)
                _, above, each = _crossing(logits, need - 1, largest, temperature, V, False, BLOCK)
                nucleus = above + (need - above + each - 1) // each * each
            min_p = tl.load(min_ps + row)
            if min_p > 0:
                least = tl.minimum(min_p * ONE, ONE).to(tl.int64)
                nucleus = tl.minimum(nucleus, _likely(logits, least, largest, temperature, V, BLOCK))
            draw = _draw(tl.load(seeds + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64))
            target = tl.minimum((draw * nucleus.to(tl.float64)).to(tl.int64), nucleus - 1)
            rank, above, each = _crossing(logits, target, largest, temperature, V, False, BLOCK)
            n = (target - above) // each
    tl.store(out + row, _nth(logits, rank, n, V, BLOCK))
