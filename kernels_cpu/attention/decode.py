"""Decode attention on the paged cache: one query token per sequence against its cached keys and values."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import (
    CACHED,
    Operand,
    SameKind,
    checked,
    contiguous,
    float64,
    frozen,
    host_array,
    same_kind,
    scales_of,
)
from ..declarations import operation, reference_of, work_of
from ..machine.features import CodePath
from .kv_cache import append_kv, row_bytes
from .operands import check_blocks, check_shapes, options_of, result_of
from .tasks import Cache, decode


@operation
def decode_attention(
    q: SameKind,
    kv: Operand,
    table: Operand,
    lengths: Operand,
    *,
    scales: Operand | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Operand | None = None,
    softcap: float | None = None,
    threads: int | None = None,
    path: CodePath | None = None,
    out: SameKind | None = None,
) -> SameKind:
    """Attention of one new token per sequence over its paged KV cache.

        out[s, h] = softmax(scale * q[s, h] . K[s, h // G]) V[s, h // G],  G = H / K

    K and V are read once per KV head for all of its G query heads, with an online softmax; computation is in fp32. The
    GIL is released. Numpy arrays and CPU torch tensors are read in place. The result does not depend on the number of
    threads.

    On Zen 4, with G >= 4, AVX512_BF16 multiplies queries by keys if the cache and all queries of a sequence are bf16
    numbers, as in a model in bf16. Products are exact and their sums fp32; subnormal numbers count as zero. Two cores
    are 1.01 to 1.25 times as fast then.

    A cache of int8 has half the size of one of bf16, which makes decodes faster where memory bandwidth limits them: on
    Ice Lake at 11 GB/s per core 1.6, 1.6, 1.3 and 1.0 times as fast at G of 1, 2, 4 and 8. On Zen 4 at 33 GB/s per core
    converting takes longer than reading: 0.7 times as fast at G of 4, measured with an earlier version.

    Parameters
    ----------
    q : (B, H, D) fp32, C-contiguous
        Query heads of the new tokens.
    kv : (P, K, 2, b, D) fp32, fp16, torch.bfloat16, uint16 that holds bfloat16 bits, or int8, C-contiguous
        The cache: per block and KV head, b rows of K and then b rows of V. Slots past a length are never read.
    table : (B, W) int32, C-contiguous
        Blocks of each sequence in order; entries past ceil(length / b), or before the window, are never read.
    lengths : (B,) int32 or int64
        Tokens in each sequence [tokens], in 1 .. W * b.
    scales : (P, K, 2, b) fp32, C-contiguous
        Factor of each row of an int8 cache, as `append_kv` stored it; not for other caches.
    scale : float, optional
        Factor of the scores, by default 1 / sqrt(D).
    window : int, optional
        Number of last tokens to attend to (sliding window), by default all.
    sinks : (H,) fp32, optional
        A score per head that adds to the softmax' denominator only (GPT-OSS).
    softcap : float, optional
        Scores become softcap * tanh(score / softcap).
    threads : int, optional
        Threads that share the work, by default as many as cores that this process may use.
    path : CodePath, optional
        Code path, by default this computer's own (`features`). Every path runs on every computer, slower on others.
    out : (B, H, D) fp32, C-contiguous, optional
        Array that receives the result; may be q itself.

    Returns
    -------
    (B, H, D) fp32
        `out` if given, else new: a tensor if `q` is one, else an array. Max abs error 2e-6 against float64 for operands
        of unit variance (1e-5 at scores near 100, where fp32 scores themselves round), apart from the rounding when an
        int8 cache was stored.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes disagree, an operand is not contiguous, or a length, a used block or an option is out of range.

    Examples
    --------
    A sequence of one token returns that token's value.

    >>> kv = np.zeros((1, 1, 2, 4, 2), np.float32)
    >>> kv[0, 0, 1, 0] = [3, 5]
    >>> decode_attention(np.ones((1, 1, 2), np.float32), kv, np.zeros((1, 1), np.int32), np.ones(1, np.int64))
    array([[[3., 5.]]], dtype=float32)
    """
    queries = contiguous("q", checked("q", q, "B H D", np.float32))
    cache = contiguous("kv", checked("kv", kv, "P K 2 b D", *CACHED, np.int8))
    blocks = contiguous("table", checked("table", table, "B W", np.int32))
    spans = checked("lengths", lengths, "B", np.int32, np.int64).astype(np.int64)
    check_shapes(queries, cache, blocks, spans)
    options = options_of(queries.shape[1], queries.shape[2], scale, window, sinks, softcap, threads, path)
    check_blocks(blocks, spans, cache.shape[0], cache.shape[3], options["window"])
    factors = scales_of(cache, scales)
    result = result_of(out, queries, cache, blocks, queries.shape[2], factors, options["sinks"])
    decode(frozen(queries), Cache.of(cache, factors), frozen(blocks), spans, result, **options)
    return same_kind(q, result) if out is None else out


@work_of(decode_attention)
def decode_attention_work(
    heads: int, kv_heads: int, head_dim: int, context: int, rows: int, kv_itemsize: int, itemsize: int = 4
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 4 H D context,  bytes = 2 K (D kv_itemsize + s) context + 2 itemsize H D rows

    where s is 4 for int8, the size of a row's scale, and 0 for other caches.

    Parameters
    ----------
    heads, kv_heads, head_dim : int
        H, K and D.
    context : int
        Sum of the lengths [tokens].
    rows : int
        B, the number of sequences; q is read once and out is written once.
    kv_itemsize : int
        Size of a number of the cache: 4 for fp32, 2 for bfloat16 and fp16, 1 for int8 [byte].
    itemsize : int
        Size of a number of q [byte].

    Examples
    --------
    >>> decode_attention_work(heads=32, kv_heads=8, head_dim=128, context=1000, rows=2, kv_itemsize=2)
    (16384000, 4161536)
    """
    flops = 4 * heads * head_dim * context
    row = row_bytes(head_dim, kv_itemsize)
    return flops, 2 * kv_heads * row * context + 2 * itemsize * heads * head_dim * rows


@reference_of(decode_attention)
def decode_attention_reference(
    q: Operand,
    kv: Operand,
    table: Operand,
    lengths: Operand,
    *,
    scales: Operand | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Operand | None = None,
    softcap: float | None = None,
) -> NDArray[np.float64]:
    """Compute `decode_attention` in float64 with numpy, the oracle of its tests: same operands, -> (B, H, D) float64.

    Examples
    --------
    >>> kv = np.zeros((1, 1, 2, 4, 2), np.float32)
    >>> kv[0, 0, 1, :2] = [[3, 5], [5, 7]]
    >>> decode_attention_reference(np.ones((1, 1, 2)), kv, np.zeros((1, 1), np.int32), np.array([2]))
    array([[[4., 6.]]])
    """
    queries = float64("q", q)
    cache = host_array("kv", kv)
    group = queries.shape[1] // cache.shape[1]
    block = cache.shape[3]
    factor = queries.shape[2] ** -0.5 if scale is None else scale
    out = np.empty_like(queries)
    for s, length in enumerate(host_array("lengths", lengths)):
        token = np.arange(0 if window is None else max(0, length - window), length)
        pages = host_array("table", table)[s, token // block]
        rows = float64("kv", cache[pages, :, :, token % block])
        if scales is not None:
            rows *= host_array("scales", scales)[pages, :, :, token % block, None]
        rows = rows.repeat(group, axis=1)
        scores = factor * np.einsum("hd,thd->ht", queries[s], rows[:, :, 0])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        out[s] = _softmax_reference(scores, rows[:, :, 1], sinks)
    return out


def _softmax_reference(scores: NDArray[Any], values: NDArray[Any], sinks: Operand | None) -> NDArray[np.float64]:
    """The softmax of scores (H, T) over t, with one sink per head, times values (T, H, D): -> (H, D)."""
    sink = np.full(len(scores), -np.inf) if sinks is None else host_array("sinks", sinks).astype(np.float64)
    high = np.maximum(scores.max(axis=1), sink)[:, None]
    weights = np.exp(scores - high)
    whole = weights.sum(axis=1, keepdims=True) + np.exp(sink[:, None] - high)
    result: NDArray[np.float64] = np.einsum("ht,thd->hd", weights, values) / whole
    return result


def warm_up(group: int = 1, head_dim: int = 1) -> None:
    """Compile append_kv and decode_attention for fp32 and bfloat16 caches; vector code is compiled per shape.

    Parameters
    ----------
    group, head_dim : int
        H / K and D of the calls to follow.

    Examples
    --------
    >>> warm_up()
    """
    row = np.ones((1, 1, head_dim), np.float32)
    queries = np.ones((1, group, head_dim), np.float32)
    for dtype in (np.float32, np.uint16):
        kv = np.zeros((1, 1, 2, 1, head_dim), dtype)
        append_kv(kv, np.zeros(1, np.int64), row, row)
        decode_attention(queries, kv, np.zeros((1, 1), np.int32), np.ones(1, np.int64))
