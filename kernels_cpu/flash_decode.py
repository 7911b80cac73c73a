"""Paged flash-decode: one query token per sequence against its cached keys and values, on one thread."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import Operand, SameKind, checked, contiguous, frozen, host_array, same_kind, writeable
from .flash_decode_kernel import attend
from .kv_cache import append_kv

LOG2_E = math.log2(math.e)


def _check_shapes(q: NDArray[Any], kv: NDArray[Any], table: NDArray[Any], lengths: NDArray[Any]) -> None:
    rows, heads, dim = q.shape
    if kv.shape[2] != 2 or 0 in kv.shape[1:]:
        raise ValueError(f"kv must have shape (P, K, 2, b, D) with K, b and D >= 1, not {kv.shape}: reshape the cache.")
    if kv.shape[4] != dim:
        raise ValueError(f"kv must have the head dim of q, {dim}, not {kv.shape[4]}: pass q and kv of one model.")
    if heads == 0 or heads % kv.shape[1]:
        raise ValueError(
            f"q must have a multiple of the {kv.shape[1]} KV heads of kv, not {heads}: pass q and kv of one model."
        )
    for name, array in (("table", table), ("lengths", lengths)):
        if array.shape[0] != rows:
            raise ValueError(
                f"{name} must have one row per row of q, {rows}, not {array.shape[0]}: pass the same batch."
            )


def _check_blocks(table: NDArray[Any], lengths: NDArray[Any], blocks: int, block: int) -> None:
    short = np.flatnonzero(lengths < 1)
    if short.size:
        row = short[0]
        raise ValueError(f"lengths[{row}] must be >= 1, not {lengths[row]}: leave sequences without tokens out.")
    room = table.shape[1] * block
    over = np.flatnonzero(lengths > room)
    if over.size:
        row = over[0]
        raise ValueError(
            f"lengths[{row}] must be <= {room}, the tokens that a table row holds, not {lengths[row]}: widen the table."
        )
    used = np.arange(table.shape[1]) * block < lengths[:, None]
    bad = np.argwhere(used & ((table < 0) | (table >= blocks)))
    if bad.size:
        row, column = bad[0]
        raise ValueError(
            f"table[{row}, {column}] must be a block of kv in [0, {blocks}), not {table[row, column]}: "
            "allocate the block before decoding."
        )


def _result(out: Operand | None, q: NDArray[Any]) -> NDArray[Any]:
    if out is None:
        return np.empty(q.shape, np.float32)
    result = writeable("out", checked("out", out, "B H D", np.float32))
    if result.shape != q.shape:
        raise ValueError(f"out must have the shape of q, {q.shape}, not {result.shape}: pass numpy.empty_like(q).")
    return result


def flash_decode(
    q: SameKind,
    kv: Operand,
    table: Operand,
    lengths: Operand,
    *,
    scale: float | None = None,
    out: SameKind | None = None,
) -> SameKind:
    """Attention of one new token per sequence over its paged KV cache.

        out[s, h] = softmax(scale * q[s, h] . K[s, h // G]) V[s, h // G],  G = H / K

    One pass over KV per KV head, shared by its G query heads; online softmax; fp32 accumulation; one thread, with the
    GIL released. Numpy arrays and CPU torch tensors are both read in place.

    Parameters
    ----------
    q : (B, H, D) fp32, C-contiguous
        Query heads of the new tokens.
    kv : (P, K, 2, b, D) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits, C-contiguous
        The cache: per block and KV head, b rows of K and then b rows of V. Slots past a length are never read.
    table : (B, W) int32, C-contiguous
        Blocks of each sequence in order; entries past ceil(length / b) are never read.
    lengths : (B,) int32 or int64
        Tokens in each sequence [tokens], in 1 .. W * b.
    scale : float, optional
        Factor of the scores; 1 / sqrt(D) unless given.
    out : (B, H, D) fp32, C-contiguous, optional
        Where to store the result.

    Returns
    -------
    (B, H, D) fp32
        `out` if given, else new and of the kind of `q`; max abs error 2e-6 against
        float64 for operands of unit variance (1e-5 at scores near 100, where fp32 scores themselves round).

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes disagree, an operand is not contiguous, or a length or a used block is out of range.

    Examples
    --------
    A sequence of one token returns that token's value.

    >>> kv = np.zeros((1, 1, 2, 4, 2), np.float32)
    >>> kv[0, 0, 1, 0] = [3, 5]
    >>> flash_decode(np.ones((1, 1, 2), np.float32), kv, np.zeros((1, 1), np.int32), np.ones(1, np.int64))
    array([[[3., 5.]]], dtype=float32)
    """
    queries = contiguous("q", checked("q", q, "B H D", np.float32))
    cache = contiguous("kv", checked("kv", kv, "P K 2 b D", np.float32, np.uint16))
    blocks = contiguous("table", checked("table", table, "B W", np.int32))
    spans = checked("lengths", lengths, "B", np.int32, np.int64).astype(np.int64)
    _check_shapes(queries, cache, blocks, spans)
    _check_blocks(blocks, spans, cache.shape[0], cache.shape[3])
    factor = 1 / math.sqrt(queries.shape[2]) if scale is None else scale
    if not math.isfinite(factor):
        raise ValueError(f"scale must be finite, not {factor}: leave it out for 1 / sqrt(D).")
    result = _result(out, queries)
    cells = cache if cache.dtype == np.uint16 else cache.view(np.uint32)
    # The kernel's softmax is to the base 2, where the exponent is a shift.
    attend(frozen(queries), frozen(cells), frozen(blocks), frozen(spans), np.float32(factor * LOG2_E), result)
    return same_kind(q, result) if out is None else out


def flash_decode_work(
    heads: int, kv_heads: int, head_dim: int, context: int, rows: int, kv_itemsize: int
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 4 H D context,  bytes = 2 K D kv_itemsize context + 2 * 4 H D rows

    Parameters
    ----------
    heads, kv_heads, head_dim : int
        H, K and D.
    context : int
        Sum of the lengths [tokens].
    rows : int
        B, the sequences; q is read and out written once each in fp32.
    kv_itemsize : int
        4 for fp32, 2 for bfloat16 [byte].

    Examples
    --------
    >>> flash_decode_work(heads=32, kv_heads=8, head_dim=128, context=1000, rows=2, kv_itemsize=2)
    (16384000, 4161536)
    """
    flops = 4 * heads * head_dim * context
    return flops, 2 * kv_heads * head_dim * kv_itemsize * context + 2 * 4 * heads * head_dim * rows


def flash_decode_reference(
    q: Operand, kv: Operand, table: Operand, lengths: Operand, scale: float | None = None
) -> NDArray[np.float64]:
    """`flash_decode` in float64 numpy, the oracle of its tests: same operands, -> (B, H, D) float64.

    Examples
    --------
    >>> kv = np.zeros((1, 1, 2, 4, 2), np.float32)
    >>> kv[0, 0, 1, :2] = [[3, 5], [5, 7]]
    >>> flash_decode_reference(np.ones((1, 1, 2)), kv, np.zeros((1, 1), np.int32), np.array([2]))
    array([[[4., 6.]]])
    """
    queries, cache = host_array("q", q).astype(np.float64), host_array("kv", kv)
    if cache.dtype == np.uint16:
        cache = (cache.astype(np.uint32) << np.uint32(16)).view(np.float32)
    group, block = queries.shape[1] // cache.shape[1], cache.shape[3]
    factor = queries.shape[2] ** -0.5 if scale is None else scale
    out = np.empty_like(queries)
    for s, length in enumerate(host_array("lengths", lengths)):
        token = np.arange(length)
        pages = host_array("table", table)[s, token // block]
        rows = cache[pages, :, :, token % block].astype(np.float64).repeat(group, axis=1)
        scores = factor * np.einsum("hd,thd->ht", queries[s], rows[:, :, 0])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[s] = np.einsum("ht,thd->hd", weights, rows[:, :, 1]) / weights.sum(axis=1, keepdims=True)
    return out


def warm_up() -> None:
    """Compile append_kv and flash_decode for fp32 and bfloat16 caches; shapes do not matter to the compiler.

    Examples
    --------
    >>> warm_up()
    """
    row = np.ones((1, 1, 1), np.float32)
    for dtype in (np.float32, np.uint16):
        kv = np.zeros((1, 1, 2, 1, 1), dtype)
        append_kv(kv, np.zeros(1, np.int64), row, row)
        flash_decode(row, kv, np.zeros((1, 1), np.int32), np.ones(1, np.int64))
