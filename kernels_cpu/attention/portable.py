"""The portable loops over a tile, for CPUs and head dims without vector code; LLVM vectorises them where it can."""

import math
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from ..codegen import vector_ir
from ..codegen.compiled import compiled, emitted
from ..codegen.numerics import exp2

# Tokens per pass over a query or an output row; 8 gave 1.1 to 1.2 times the rate of 4 on a Zen 3 core.
STEP = 8
FP32 = int(vector_ir.Storage.FP32)
BF16 = int(vector_ir.Storage.BF16)
INT8 = int(vector_ir.Storage.INT8)


@emitted
def _at(typing: Any, element: Any, address: Any) -> Any:
    """A pointer to elements of the same type as `element`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer(element)  # type: ignore[no-untyped-call]
    return pointer(element, types.int64), emit


@compiled()
def _from_fp16(bits: Any) -> Any:
    """Convert fp16 bits to fp32 bits; subnormals come out right by scaling, infinities and NaN keep their exponent."""
    magnitude = np.uint32(np.uint32(bits & 0x7FFF) << np.uint32(13))
    scaled = np.float32(magnitude.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
    special = np.uint32(0x7F800000) if bits & 0x7C00 == 0x7C00 else np.uint32(0)
    return np.uint32(scaled | special | np.uint32(np.uint32(bits & 0x8000) << np.uint32(16)))


@compiled()
def gather(storage: int, dim: int, rows: Any, offset: int, scale: Any, count: int, tile: Any) -> None:
    """Convert `count` rows, INT8 times their `scale`, to fp32 bits in `tile`; clear rows up to a multiple of STEP.

    The loops need no mask: a cleared K row has the score 0, whose weight multiplies a cleared V row.
    """
    for t in range(count):
        target = tile[t]
        if storage == FP32:
            words = carray(_at(np.uint32(0), rows[t] + offset), (dim,))
            for x in range(dim):
                target[x] = words[x]
        elif storage == INT8:
            numbers = carray(_at(np.int8(0), rows[t] + offset), (dim,))
            for x in range(dim):
                target[x] = np.float32(np.float32(numbers[x]) * scale[t]).view(np.uint32)
        else:
            halves = carray(_at(np.uint16(0), rows[t] + offset), (dim,))
            if storage == BF16:
                for x in range(dim):
                    target[x] = np.uint32(halves[x]) << 16
            else:
                for x in range(dim):
                    target[x] = _from_fp16(halves[x])
    for t in range(count, (count + STEP - 1) // STEP * STEP):
        tile[t, :dim] = 0


@compiled()
def read_scales(places: Any, offset: int, count: int, scale: Any) -> None:
    """scale[t] = the fp32 at places[t] + offset."""
    for t in range(count):
        scale[t] = carray(_at(np.float32(0), places[t] + offset), (1,))[0]


@compiled("contract", "reassoc", "nsz")
def score(queries: Any, tile: Any, count: int, scores: Any) -> None:
    """scores[g, t] = queries[g] . tile[t], with eight running sums to hide the latency of multiply-adds."""
    for t in range(0, count, STEP):
        k0 = tile[t]
        k1 = tile[t + 1]
        k2 = tile[t + 2]
        k3 = tile[t + 3]
        k4 = tile[t + 4]
        k5 = tile[t + 5]
        k6 = tile[t + 6]
        k7 = tile[t + 7]
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
            s[t] = s0
            s[t + 1] = s1
            s[t + 2] = s2
            s[t + 3] = s3
            s[t + 4] = s4
            s[t + 5] = s5
            s[t + 6] = s6
            s[t + 7] = s7


@compiled("contract", "reassoc", "nsz")
def softmax(scores: Any, count: int, top: Any, total: Any, acc: Any) -> Any:
    """Turn one head's scores into weights relative to the new maximum; return the new maximum and sum of weights."""
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
    """acc[g] += sum over t of weights[g, t] * tile[t], eight tokens per pass to save loads and stores of acc."""
    for t in range(0, count, STEP):
        v0 = tile[t]
        v1 = tile[t + 1]
        v2 = tile[t + 2]
        v3 = tile[t + 3]
        v4 = tile[t + 4]
        v5 = tile[t + 5]
        v6 = tile[t + 6]
        v7 = tile[t + 7]
        for g in range(acc.shape[0]):
            w = weights[g]
            a = acc[g]
            w0 = w[t]
            w1 = w[t + 1]
            w2 = w[t + 2]
            w3 = w[t + 3]
            w4 = w[t + 4]
            w5 = w[t + 5]
            w6 = w[t + 6]
            w7 = w[t + 7]
            for d in range(acc.shape[1]):
                near = w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
                a[d] += near + w4 * v4[d] + w5 * v5[d] + w6 * v6[d] + w7 * v7[d]


@compiled()
def walk_tile(
    storage: int, cap: Any, rows: Any, geometry: Any, places: Any, scale_geometry: Any, count: int, queries: Any,
    top: Any, total: Any, sums: Any, tile: Any, scores: Any, scale: Any,
) -> None:  # fmt: skip
    """Compute one tile of every KV head: scores, softmax, weighted sums.

    queries (K, G, D), sums (K, G, D of V), top and total (K, G). `places` are the addresses of the scales of an INT8
    cache, as `rows` are those of its rows; `scale` (tokens of a tile,) is scratch.
    """
    head_bytes = geometry[4]
    value_bytes = geometry[5]
    floats = tile.view(np.float32)
    for h in range(queries.shape[0]):
        if storage == INT8:
            read_scales(places, h * scale_geometry[4], count, scale)
        gather(storage, queries.shape[2], rows, h * head_bytes, scale, count, tile)
        score(queries[h], floats, count, scores)
        for g in range(queries.shape[1]):
            if cap > 0:
                cap_scores(scores[g], count, cap)
            top[h, g], total[h, g] = softmax(scores[g], count, top[h, g], total[h, g], sums[h, g])
        if storage == INT8:
            read_scales(places, h * scale_geometry[4] + scale_geometry[5], count, scale)
        gather(storage, sums.shape[2], rows, h * head_bytes + value_bytes, scale, count, tile)
        accumulate(scores, floats, count, sums[h])


@compiled()
def cap_scores(scores: Any, count: int, cap: Any) -> None:
    """Apply the soft-cap cap tanh(score / cap) to scores to the base 2."""
    natural = np.float32(math.log(2.0) / cap)
    back = np.float32(cap / math.log(2.0))
    for t in range(count):
        scores[t] = back * np.float32(math.tanh(scores[t] * natural))
