"""The next token of a row of logits, without sorting it: sums of whole numbers are the same in any order.

A logit weighs floor(2^32 exp((l - max) / temperature)). Logits are ranked by their bits, turned into whole numbers that
rise with them; where a running sum over the ranking crosses a target is found bit by bit.
"""

from ..backend.mode import tl, triton

ONE = tl.constexpr(4294967296.0)  # 2^32, the weight of the largest logit
INF = tl.constexpr(float("-inf"))


@triton.jit
def _tile(logits, start, V, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    value = tl.load(logits + at, mask=at < V, other=INF)
    return at, tl.where(value == 0, 0.0, value)  # -0 is 0


@triton.jit
def _rank(value):
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _weight(value, high, temperature):
    return (tl.exp((value - high).to(tl.float64) / temperature) * ONE).to(tl.int64)


@triton.jit
def _mass(logits, rank, high, temperature, V, BLOCK: tl.constexpr):
    """Weight of all logits of this rank and above."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        _, value = _tile(logits, start, V, BLOCK)
        total += tl.where(_rank(value) >= rank, _weight(value, high, temperature), 0)
    return tl.sum(total, 0)


@triton.jit
def _crossing(logits, target, high, temperature, V, BLOCK: tl.constexpr):
    """The rank at which the weights from above add up to more than `target`; what is above it; and its weight."""
    above = _rank(high) + 1
    within = above * 0 - 2147483648
    for _ in range(32):
        middle = (above + within) >> 1
        enough = _mass(logits, middle, high, temperature, V, BLOCK) > target
        within = tl.where(enough, middle, within)
        above = tl.where(enough, above, middle)
    bits = within.to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    return within, _mass(logits, above, high, temperature, V, BLOCK), _weight(value, high, temperature)


@triton.jit
def _draw(seed, position):
    """The first number of Philox 4x64-10 with this key and counter, in [0, 1), as numpy has it."""
    zero = seed * 0
    c0, c1, c2, c3 = position + 1, zero, zero, zero
    k0, k1 = seed, zero
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, zero + 0xD2E7470EE14C6C93), c0 * 0xD2E7470EE14C6C93
        high1, low1 = tl.umulhi(c2, zero + 0xCA5A826395121157), c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B97F4A7C15, k1 + 0xBB67AE8584CAA73B
    return (c0 >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _nth(logits, rank, n, V, BLOCK: tl.constexpr):
    """Place of the n-th logit of this rank, in their own order."""
    seen, place = n * 0, n * 0
    for start in range(0, V, BLOCK):
        at, value = _tile(logits, start, V, BLOCK)
        equal = ((_rank(value) == rank) & (at < V)).to(tl.int64)
        here = (equal > 0) & (seen + tl.cumsum(equal, 0) - 1 == n)
        place += tl.sum(tl.where(here, at, 0).to(tl.int64), 0)
        seen += tl.sum(equal, 0)
    return place


@triton.jit
def sample(logits, temperatures, top_ps, seeds, positions, out, stride, V, DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest = tl.zeros((BLOCK,), tl.float32) + INF
    for start in range(0, V, BLOCK):
        _, value = _tile(logits, start, V, BLOCK)
        largest = tl.maximum(largest, value)
    high = tl.max(largest, 0)
    rank, n = _rank(high), row * 0
    if DRAWN:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            kept = _mass(logits, rank * 0 - 2147483648, high, temperature, V, BLOCK)
            top_p = tl.load(top_ps + row)
            if top_p < 1:
                need = tl.maximum(tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64), 1)
                _, more, each = _crossing(logits, need - 1, high, temperature, V, BLOCK)
                kept = more + (need - more + each - 1) // each * each
            draw = _draw(tl.load(seeds + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64))
            target = tl.minimum((draw * kept.to(tl.float64)).to(tl.int64), kept - 1)
            rank, more, each = _crossing(logits, target, high, temperature, V, BLOCK)
            n = (target - more) // each
    tl.store(out + row, _nth(logits, rank, n, V, BLOCK))
