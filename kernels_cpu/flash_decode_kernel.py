"""The kernel of `flash_decode`, tile by tile; all of it in one file, because Numba's disk cache sees no other edits."""

import math
from typing import Any

import numpy as np

from .compiled import compiled

# Tokens per softmax tile: 32 rows of 128 fp32 fill 16 KiB of a 32 KiB L1. On a shared Zen 3 core (bf16, D 128, G 4)
# with sgemm at 50 GF/s, 16, 32 and 64 all gave 3 to 4 GB/s, within the noise.
TILE = 32
# Tokens per pass over a query or an output row; 8 gave 1.1 to 1.2 times the rate of 4 there.
STEP = 8
# np.int64, since Numba would compile `gather` once for each literal int.
KEYS, VALUES = np.int64(0), np.int64(1)
ROUND = np.float32(1.5 * 2**23)
FLOOR = np.float32(-126)
C0, C1, C2, C3, C4, C5, C6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))


@compiled("contract")
def exp2(x: Any) -> Any:
    """2**x for x <= 0, relative error below 3e-7; no call and no branch, so that loops over it vectorise."""
    bounded = FLOOR if x < FLOOR else x  # this order keeps NaN
    shifted = np.float32(bounded + ROUND)
    f = bounded - np.float32(shifted - ROUND)
    poly = ((((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1) * f) + C0
    exponent = np.uint32(np.uint32(shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23))
    return np.float32(poly * exponent.view(np.float32))


@compiled()
def gather(kv: Any, row: Any, start: int, count: int, head: int, half: Any, tile: Any) -> None:
    """Widen KEYS or VALUES of `count` tokens into the fp32 bits of `tile`; clear rows up to a whole STEP."""
    block, dim = kv.shape[3], kv.shape[4]
    flat = tile.reshape(tile.size)
    done = 0
    while done < count:
        page = (start + done) // block
        offset = start + done - page * block
        run = min(count - done, block - offset)
        source = kv[row[page], head, half].reshape(block * dim)[offset * dim : (offset + run) * dim]
        target = flat[done * dim : (done + run) * dim]
        if kv.itemsize == 2:
            for x in range(source.size):
                target[x] = np.uint32(source[x]) << 16
        else:
            for x in range(source.size):
                target[x] = source[x]
        done += run
    # Not masked later: a cleared K row scores 0 and that score weighs a cleared V row, whatever the unused slots hold.
    for x in range(count * dim, (count + STEP - 1) // STEP * STEP * dim):
        flat[x] = 0


@compiled("contract", "reassoc", "nsz")
def score(queries: Any, tile: Any, count: int, scores: Any) -> None:
    """scores[g, t] = queries[g] . tile[t]; eight running sums hide the latency of the multiply-add."""
    for t in range(0, count, STEP):
        k0, k1, k2, k3 = tile[t], tile[t + 1], tile[t + 2], tile[t + 3]
        k4, k5, k6, k7 = tile[t + 4], tile[t + 5], tile[t + 6], tile[t + 7]
        for g in range(queries.shape[0]):
            q = queries[g]
            s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
            for d in range(queries.shape[1]):
                s0 += q[d] * k0[d]
                s1 += q[d] * k1[d]
                s2 += q[d] * k2[d]
                s3 += q[d] * k3[d]
                s4 += q[d] * k4[d]
                s5 += q[d] * k5[d]
                s6 += q[d] * k6[d]
                s7 += q[d] * k7[d]
            s = scores[g]
            s[t], s[t + 1], s[t + 2], s[t + 3] = s0, s1, s2, s3
            s[t + 4], s[t + 5], s[t + 6], s[t + 7] = s4, s5, s6, s7


@compiled("contract", "reassoc", "nsz")
def softmax(scores: Any, count: int, top: Any, total: Any, acc: Any) -> Any:
    """Turn one head's scores into weights relative to the new maximum; returns the new (maximum, sum)."""
    high = top
    for t in range(count):
        high = scores[t] if scores[t] > high else high
    if high > top:
        shrink = exp2(np.float32(top - high))
        total *= shrink
        for d in range(acc.shape[0]):
            acc[d] *= shrink
    for t in range(count):
        scores[t] = exp2(np.float32(scores[t] - high))
    for t in range(count):
        total += scores[t]
    return high, total


@compiled("contract")
def accumulate(weights: Any, tile: Any, count: int, acc: Any) -> None:
    """acc[g] += sum over t of weights[g, t] * tile[t]; eight tokens per pass spare loads and stores of acc."""
    for t in range(0, count, STEP):
        v0, v1, v2, v3 = tile[t], tile[t + 1], tile[t + 2], tile[t + 3]
        v4, v5, v6, v7 = tile[t + 4], tile[t + 5], tile[t + 6], tile[t + 7]
        for g in range(acc.shape[0]):
            w, a = weights[g], acc[g]
            w0, w1, w2, w3 = w[t], w[t + 1], w[t + 2], w[t + 3]
            w4, w5, w6, w7 = w[t + 4], w[t + 5], w[t + 6], w[t + 7]
            for d in range(acc.shape[1]):
                near = w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
                a[d] += near + w4 * v4[d] + w5 * v5[d] + w6 * v6[d] + w7 * v7[d]


@compiled()
def begin(q: Any, scale: Any, queries: Any, acc: Any, top: Any, total: Any) -> None:
    """Scale the queries of one KV head and clear its accumulators."""
    for g in range(q.shape[0]):
        top[g] = -np.inf
        total[g] = 0
        for d in range(q.shape[1]):
            queries[g, d] = q[g, d] * scale
            acc[g, d] = 0


@compiled()
def finish(acc: Any, total: Any, out: Any) -> None:
    """out[g] = acc[g] / total[g]; loops, since Numba takes five seconds more to compile array assignments."""
    for g in range(out.shape[0]):
        for d in range(out.shape[1]):
            out[g, d] = acc[g, d] / total[g]


@compiled()
def attend(q: Any, kv: Any, table: Any, lengths: Any, scale: Any, out: Any) -> None:
    """Every sequence and KV head in turn, tile by tile: K, softmax, V; `kv` holds bits, `scale` is to the base 2."""
    dim, kv_heads = q.shape[2], kv.shape[1]
    group = q.shape[1] // kv_heads
    bits = np.empty((TILE, dim), np.uint32)
    tile = bits.view(np.float32)
    queries, acc = np.empty((group, dim), np.float32), np.empty((group, dim), np.float32)
    scores = np.empty((group, TILE), np.float32)
    top, total = np.empty(group, np.float32), np.empty(group, np.float32)
    for s in range(q.shape[0]):
        for h in range(kv_heads):
            begin(q[s, h * group : (h + 1) * group], scale, queries, acc, top, total)
            for start in range(0, lengths[s], TILE):
                count = min(TILE, lengths[s] - start)
                gather(kv, table[s], start, count, h, KEYS, bits)
                score(queries, tile, count, scores)
                for g in range(group):
                    top[g], total[g] = softmax(scores[g], count, top[g], total[g], acc[g])
                gather(kv, table[s], start, count, h, VALUES, bits)
                accumulate(scores, tile, count, acc)
            finish(acc, total, out[s, h * group : (h + 1) * group])
