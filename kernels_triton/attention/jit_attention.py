"""Attention with an online softmax: of packed prompts, and of one query per sequence over a paged cache.

Scores are to the base 2. A row's running maximum starts at a finite number, so that a row without keys so far has
weights of zero instead of NaN.
"""

from ..backend.mode import tl, triton

FLOOR = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(base, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """Load the rows that `base` points to; zero where a row is not live or a column is past WIDTH."""
    at = tl.arange(0, BLOCK)
    place = base[:, None] + at[None, :]
    if CHECKED or WIDTH != BLOCK:
        return tl.load(place, mask=live[:, None] & (at < WIDTH)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def _attend(
    acc,
    denominator,
    maximum,
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
    SHARED: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add keys low .. end - 1 to the online softmax; a query sees keys up to its own position.

    PAGE is 0 where keys and values are contiguous rows instead of pages. With SHARED the first D_MAIN numbers of a key
    are its value, and are loaded once.
    """
    for start in range(low, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        live = at < end
        if PAGE:
            page = tl.load(pages + at // PAGE, mask=live, other=0).to(tl.int64) * page_stride
            key = page + at % PAGE * key_stride
            value = page + at % PAGE * value_stride
        else:
            key = at.to(tl.int64) * key_stride
            value = at.to(tl.int64) * value_stride
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
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        denominator = denominator * shrink + tl.sum(weights, 1)
        maximum = new_maximum
        v = k
        if not SHARED:
            v = _rows(values + value, live, DV, BLOCK_DV, CHECKED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, denominator, maximum


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
    """Attend with one block of queries of one head; the last blocks, which see the most keys, start first.

    The blocks of sequence s begin at starts[s] // BLOCK_M + s. Every sequence has enough blocks then, and the host need
    not know lengths.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    other = tl.arange(0, BLOCK_B)
    before = tl.load(starts + other, mask=other < B, other=0) // BLOCK_M + other
    sequence = tl.sum(((before <= pid) & (other < B)).to(tl.int32), 0) - 1
    begin = tl.load(starts + sequence).to(tl.int64)
    length = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    first = (pid - begin // BLOCK_M - sequence).to(tl.int32) * BLOCK_M
    if first >= length:
        return
    key_begin = tl.load(key_starts + sequence).to(tl.int64)
    key_count = (tl.load(key_starts + sequence + 1) - key_begin).to(tl.int32)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < length
    row = begin + rows
    q += row * q_row + head * q_head
    q_main = _rows(q, live, D_MAIN, D_MAIN, True)
    q_rest = q_main
    if REST:
        q_rest = _rows(q + D_MAIN, live, REST, BLOCK_REST, True)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    maximum = denominator + FLOOR
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        maximum = tl.maximum(maximum, sink)
        denominator += tl.exp2(sink - maximum)
    kv_head = head // GROUP
    position = key_count - length + rows
    first_position = key_count - length + first  # position of the first query: all queries see the keys up to it
    if PAGE:
        past = tl.load(prefixes + sequence).to(tl.int32)
        D: tl.constexpr = D_MAIN + REST
        keys = kv + kv_head.to(tl.int64) * (2 * PAGE * D)
        values = keys + PAGE * D
        pages = table + sequence.to(tl.int64) * table_row
        low = past * 0
        unmasked_end = past // BLOCK_N * BLOCK_N
        if WINDOW:
            low = tl.maximum(0, past + first_position - WINDOW + 1)
            unmasked_end = low
        else:
            acc, denominator, maximum = _attend(
                acc, denominator, maximum, q_main, q_rest, past + position, keys, values, low, unmasked_end,
                pages, page_stride, D, D, scale, cap,
                D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, PAGE, WINDOW, CAPPED, False, False, BLOCK_N,
            )  # fmt: skip
        acc, denominator, maximum = _attend(
            acc, denominator, maximum, q_main, q_rest, past + position, keys, values, unmasked_end, past,
            pages, page_stride, D, D, scale, cap,
            D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, PAGE, WINDOW, CAPPED, False, True, BLOCK_N,
        )  # fmt: skip
    keys = k + key_begin * k_row + kv_head * k_head
    values = v + key_begin * v_row + kv_head * v_head
    low = key_count * 0
    end = tl.minimum(key_count, first_position + BLOCK_M)
    unmasked_end = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        low = tl.maximum(0, first_position - WINDOW + 1)
        unmasked_end = low
    else:
        acc, denominator, maximum = _attend(
            acc, denominator, maximum, q_main, q_rest, position, keys, values, low, unmasked_end,
            starts, 0, k_row, v_row, scale, cap,
            D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, 0, WINDOW, CAPPED, False, False, BLOCK_N,
        )  # fmt: skip
    acc, denominator, maximum = _attend(
        acc, denominator, maximum, q_main, q_rest, position, keys, values, unmasked_end, end,
        starts, 0, k_row, v_row, scale, cap,
        D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, 0, WINDOW, CAPPED, False, True, BLOCK_N,
    )  # fmt: skip
    at = tl.arange(0, BLOCK_DV)
    place = out + (row * tl.num_programs(1) + head)[:, None] * DV + at[None, :]
    result = acc / tl.where(denominator > 0, denominator, 1.0)[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=live[:, None] & (at < DV)[None, :])


@triton.jit
def decode(
    q,
    kv,
    sums,
    denominators,
    maxima,
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
    SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend over one chunk of a sequence's cache, with query heads that share a KV head.

    Chunks begin at multiples of CHUNK, so that the sums do not depend on the rest of the batch. SHARED as in `_attend`.
    """
    sequence = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS  # programs that read the same keys follow one another
    chunk = tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    low = chunk * CHUNK
    end = tl.minimum(low + CHUNK, length)
    if WINDOW:
        low = tl.maximum(low, length - WINDOW)
    if low >= end:
        return
    member = tl.program_id(0) // KV_HEADS * BLOCK_G + tl.arange(0, BLOCK_G)
    live = member < GROUP
    head = kv_head * GROUP + member
    q += sequence * q_row + head * q_head
    q_main = _rows(q, live, D_MAIN, D_MAIN, True)
    q_rest = q_main
    if REST:
        q_rest = _rows(q + D_MAIN, live, REST, BLOCK_REST, True)
    acc = tl.zeros((BLOCK_G, BLOCK_DV), tl.float32)
    denominator = tl.zeros((BLOCK_G,), tl.float32)
    maximum = denominator + FLOOR
    position = tl.zeros((BLOCK_G,), tl.int32) + length - 1
    keys = kv + kv_head.to(tl.int64) * head_stride
    values = keys + value_offset
    pages = table + sequence * table_row
    D: tl.constexpr = D_MAIN + REST
    unmasked_end = low + (end - low) // BLOCK_N * BLOCK_N
    acc, denominator, maximum = _attend(
        acc, denominator, maximum, q_main, q_rest, position, keys, values, low, unmasked_end,
        pages, page_stride, D, D, scale, cap,
        D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, PAGE, 0, CAPPED, SHARED, False, BLOCK_N,
    )  # fmt: skip
    acc, denominator, maximum = _attend(
        acc, denominator, maximum, q_main, q_rest, position, keys, values, unmasked_end, end,
        pages, page_stride, D, D, scale, cap,
        D_MAIN, REST, BLOCK_REST, DV, BLOCK_DV, PAGE, 0, CAPPED, SHARED, True, BLOCK_N,
    )  # fmt: skip
    at = tl.arange(0, BLOCK_DV)
    row = (sequence * (KV_HEADS * GROUP) + head) * tl.num_programs(2) + chunk
    tl.store(denominators + row, denominator, mask=live)
    tl.store(maxima + row, maximum, mask=live)
    tl.store(sums + row[:, None] * DV + at[None, :], acc, mask=live[:, None] & (at < DV)[None, :])


@triton.jit
def merge(
    sums,
    denominators,
    maxima,
    sinks,
    lengths,
    out,
    chunks,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine the chunks of one sequence and head, always in their order."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = sequence * tl.num_programs(1) + head
    length = tl.load(lengths + sequence).to(tl.int32)
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // CHUNK
    at = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    denominator = length * 0.0
    maximum = denominator + FLOOR
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        maximum = tl.maximum(maximum, sink)
        denominator += tl.exp2(sink - maximum)
    for start in range(first, tl.cdiv(length, CHUNK), BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        live = chunk < tl.cdiv(length, CHUNK)
        place = row * chunks + chunk
        chunk_maxima = tl.load(maxima + place, mask=live, other=FLOOR)
        new_maximum = tl.maximum(maximum, tl.max(chunk_maxima, 0))
        weight = tl.exp2(chunk_maxima - new_maximum)
        shrink = tl.exp2(maximum - new_maximum)
        inside = live[:, None] & (at < DV)[None, :]
        tile = tl.load(sums + place[:, None] * DV + at[None, :], mask=inside, other=0.0)
        acc = acc * shrink + tl.sum(tile * weight[:, None], 0)
        denominator = denominator * shrink + tl.sum(tl.load(denominators + place, mask=live, other=0.0) * weight, 0)
        maximum = new_maximum
    result = acc / tl.where(denominator > 0, denominator, 1.0)
    tl.store(out + row * DV + at, result.to(out.dtype.element_ty), mask=at < DV)
