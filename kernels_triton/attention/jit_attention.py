"""Attention with an online softmax: of packed prompts, and of one query per sequence over a paged cache.

Scores are powers of two. A row's maximum starts from a finite number, so that a row that has seen no key yet keeps
weights of zero instead of NaN.
"""

from ..backend.mode import tl, triton

FLOOR = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(base, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """Tile of the rows that `base` points to; zero where a row or a column is not there."""
    at = tl.arange(0, BLOCK)
    place = base[:, None] + at[None, :]
    if CHECKED or WIDTH != BLOCK:
        return tl.load(place, mask=live[:, None] & (at < WIDTH)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def _attend(
    acc,
    mass,
    high,
    q,
    q_rest,
    position,
    keys,
    values,
    low,
    end,
    pages,
    page_stride,
    key_stride,
    value_stride,
    scale,
    cap,
    D_MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take in keys low .. end; a query sees those up to its own position. PAGE is 0 where the rows lie together."""
    for start in range(low, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        live = at < end
        if PAGE:
            page = tl.load(pages + at // PAGE, mask=live, other=0).to(tl.int64) * page_stride
            key, value = page + at % PAGE * key_stride, page + at % PAGE * value_stride
        else:
            key, value = at.to(tl.int64) * key_stride, at.to(tl.int64) * value_stride
        k = _rows(keys + key, live, D_MAIN, D_MAIN, CHECKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            k_rest = _rows(keys + D_MAIN + key, live, REST, BLOCK_REST, CHECKED).to(q.dtype)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores *= scale
        if CAPPED:
            scores = cap * (1 - 2 / (1 + tl.exp2(scores)))  # tanh
        if CHECKED:
            seen = live[None, :] & (at[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        shrink = tl.exp2(high - higher)
        weights = tl.exp2(scores - higher[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        high = higher
        v = _rows(values + value, live, DV, BLOCK_DV, CHECKED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, mass, high


@triton.jit
def prefill(
    q,
    k,
    v,
    kv,
    out,
    sinks,
    starts,
    key_starts,
    table,
    prefixes,
    scale,
    cap,
    B,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    page_stride,
    table_row,
    GROUP: tl.constexpr,
    D_MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One block of queries of one head; long rows first, since they take longest.

    Sequence s has blocks starts[s] // BLOCK_M + s and on, which is room enough and needs no lengths on the host.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    other = tl.arange(0, BLOCK_B)
    before = tl.load(starts + other, mask=other < B, other=0) // BLOCK_M + other
    s = tl.sum(((before <= pid) & (other < B)).to(tl.int32), 0) - 1
    begin = tl.load(starts + s).to(tl.int64)
    length = (tl.load(starts + s + 1) - begin).to(tl.int32)
    first = (pid - begin // BLOCK_M - s).to(tl.int32) * BLOCK_M
    if first >= length:
        return
    key_begin = tl.load(key_starts + s).to(tl.int64)
    own = (tl.load(key_starts + s + 1) - key_begin).to(tl.int32)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < length
    row = begin + rows
    q += row * q_row + head * q_head
    here = _rows(q, live, D_MAIN, D_MAIN, True)
    rest = here
    if REST:
        rest = _rows(q + D_MAIN, live, REST, BLOCK_REST, True)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    high = mass + FLOOR
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        high = tl.maximum(high, sink)
        mass += tl.exp2(sink - high)
    group = head // GROUP
    position = own - length + rows
    step = own - length + first  # position of the first query: all see the keys up to it
    if PAGE:
        past = tl.load(prefixes + s).to(tl.int32)
        D: tl.constexpr = D_MAIN + REST
        keys = kv + group.to(tl.int64) * (2 * PAGE * D)
        values = keys + PAGE * D
        pages = table + s.to(tl.int64) * table_row
        low = past * 0
        whole = past // BLOCK_N * BLOCK_N
        if WINDOW:
            low = tl.maximum(0, past + step - WINDOW + 1)
            whole = low
        else:
            acc, mass, high = _attend(
                acc, mass, high, here, rest, past + position, keys, values, low, whole, pages, page_stride, D, D,
                scale, cap, D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, PAGE, WINDOW, CAPPED, False, BLOCK_N,
            )  # fmt: skip
        acc, mass, high = _attend(
            acc, mass, high, here, rest, past + position, keys, values, whole, past, pages, page_stride, D, D,
            scale, cap, D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, PAGE, WINDOW, CAPPED, True, BLOCK_N,
        )  # fmt: skip
    keys = k + key_begin * k_row + group * k_head
    values = v + key_begin * v_row + group * v_head
    low = own * 0
    end = tl.minimum(own, step + BLOCK_M)
    whole = (step + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        low = tl.maximum(0, step - WINDOW + 1)
        whole = low
    else:
        acc, mass, high = _attend(
            acc, mass, high, here, rest, position, keys, values, low, whole, starts, 0, k_row, v_row,
            scale, cap, D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, 0, WINDOW, CAPPED, False, BLOCK_N,
        )  # fmt: skip
    acc, mass, high = _attend(
        acc, mass, high, here, rest, position, keys, values, whole, end, starts, 0, k_row, v_row,
        scale, cap, D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, 0, WINDOW, CAPPED, True, BLOCK_N,
    )  # fmt: skip
    at = tl.arange(0, BLOCK_DV)
    place = out + (row * tl.num_programs(1) + head)[:, None] * DV + at[None, :]
    result = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=live[:, None] & (at < DV)[None, :])


@triton.jit
def decode(
    q,
    kv,
    sums,
    masses,
    highs,
    table,
    lengths,
    scale,
    cap,
    q_row,
    q_head,
    page_stride,
    head_stride,
    value_offset,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D_MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One chunk of a sequence's cache for query heads that share a KV head; chunks begin at multiples of CHUNK.

    So the sums do not depend on what else is in the batch.
    """
    s = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) % KV_HEADS
    part = tl.program_id(2)
    length = tl.load(lengths + s).to(tl.int32)
    low = part * CHUNK
    end = tl.minimum(low + CHUNK, length)
    if WINDOW:
        low = tl.maximum(low, length - WINDOW)
    if low >= end:
        return
    member = tl.program_id(1) // KV_HEADS * BLOCK_G + tl.arange(0, BLOCK_G)
    live = member < GROUP
    head = group * GROUP + member
    q += s * q_row + head * q_head
    here = _rows(q, live, D_MAIN, D_MAIN, True)
    rest = here
    if REST:
        rest = _rows(q + D_MAIN, live, REST, BLOCK_REST, True)
    acc = tl.zeros((BLOCK_G, BLOCK_DV), tl.float32)
    mass = tl.zeros((BLOCK_G,), tl.float32)
    high = mass + FLOOR
    position = tl.zeros((BLOCK_G,), tl.int32) + length - 1
    keys = kv + group.to(tl.int64) * head_stride
    values = keys + value_offset
    pages = table + s * table_row
    D: tl.constexpr = D_MAIN + REST
    whole = low + (end - low) // BLOCK_N * BLOCK_N
    acc, mass, high = _attend(
        acc, mass, high, here, rest, position, keys, values, low, whole, pages, page_stride, D, D,
        scale, cap, D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, PAGE, 0, CAPPED, False, BLOCK_N,
    )  # fmt: skip
    acc, mass, high = _attend(
        acc, mass, high, here, rest, position, keys, values, whole, end, pages, page_stride, D, D,
        scale, cap, D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, PAGE, 0, CAPPED, True, BLOCK_N,
    )  # fmt: skip
    at = tl.arange(0, BLOCK_DV)
    row = (s * (KV_HEADS * GROUP) + head) * tl.num_programs(2) + part
    tl.store(masses + row, mass, mask=live)
    tl.store(highs + row, high, mask=live)
    tl.store(sums + row[:, None] * DV + at[None, :], acc, mask=live[:, None] & (at < DV)[None, :])


@triton.jit
def merge(
    sums,
    masses,
    highs,
    sinks,
    lengths,
    out,
    parts,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum over the chunks of one sequence and head, always in their order."""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = s * tl.num_programs(1) + head
    length = tl.load(lengths + s).to(tl.int32)
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // CHUNK
    at = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    mass = length * 0.0
    high = mass + FLOOR
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        high = tl.maximum(high, sink)
        mass += tl.exp2(sink - high)
    for start in range(first, tl.cdiv(length, CHUNK), BLOCK):
        part = start + tl.arange(0, BLOCK)
        live = part < tl.cdiv(length, CHUNK)
        place = row * parts + part
        theirs = tl.load(highs + place, mask=live, other=FLOOR)
        higher = tl.maximum(high, tl.max(theirs, 0))
        weight = tl.exp2(theirs - higher)
        shrink = tl.exp2(high - higher)
        tile = tl.load(sums + place[:, None] * DV + at[None, :], mask=live[:, None] & (at < DV)[None, :], other=0.0)
        acc = acc * shrink + tl.sum(tile * weight[:, None], 0)
        mass = mass * shrink + tl.sum(tl.load(masses + place, mask=live, other=0.0) * weight, 0)
        high = higher
    result = acc / tl.where(mass > 0, mass, 1.0)
    tl.store(out + row * DV + at, result.to(out.dtype.element_ty), mask=at < DV)
