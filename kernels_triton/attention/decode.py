"""Attention of one new token per sequence over the paged cache, in the same block layout as the CPU kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operands import INDEX, check_operand
from ..backend.operators import operator
from ..declarations import operation, reference_of, work_of
from ..moe.tiles import arch_of
from . import torch_path
from .options import (
    AttentionTiles,
    Options,
    attention_tiles,
    check_blocks,
    check_cache,
    check_dim,
    check_heads,
    head_blocks,
    power,
    reference_row,
)

_CHUNKS = 16  # chunks that a program of `merge` combines at once
_MOST_SUMS = 1 << 25  # bytes of chunks' sums, if one sequence does not need more; many sequences are computed in parts


@operation
def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    tiles: AttentionTiles | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attend with one new token per sequence over its paged KV cache.

        out[s, h] = softmax(scale * q[s, h] . K[s, h // G]) V[s, h // G],  G = H / K

    On a GPU one kernel computes the chunks of a sequence in parallel, and another combines them. Chunks begin at fixed
    tokens and are combined in order, so the result of a sequence is always the same, whatever else is in the batch.
    Sums are in fp32; cached rows and weights of another type are rounded to q's type.

    Parameters
    ----------
    q : (B, H, D) fp32, fp16 or bf16; D >= 16 for Triton
        Query heads of the new tokens; rows and heads may be strided.
    kv : (P, K, 2, b, D) fp32, fp16 or bf16, contiguous
        The cache: per block and KV head, b rows of K and then b rows of V. Slots past a length are never read.
    table : (B, W) int32, contiguous
        Blocks of each sequence in order; entries past ceil(length / b), or before the window, are never read.
    lengths : (B,) int32 or int64
        Tokens in each sequence, in 0 .. W b; the output is zero where there are none. On a GPU table and lengths are
        not checked.
    scale : float, optional
        Factor of the scores, by default 1 / sqrt(D).
    window : int, optional
        Number of last tokens to attend to (sliding window), by default all.
    sinks : (H,) fp32, optional
        A score per head that adds to the softmax' denominator only (GPT-OSS).
    softcap : float, optional
        Scores become softcap * tanh(score / softcap).
    tiles : AttentionTiles, optional
        Sizes of the Triton launch, by default from the table.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (B, H, D) of q's type
        Relative Frobenius error against float64: 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, an option or (on the CPU) a length or block is out of range, or
        the backend cannot compute here.

    Examples
    --------
    A sequence of one token returns that token's value.

    >>> kv = torch.zeros(1, 1, 2, 4, 16)
    >>> kv[0, 0, 1, 0] = 3
    >>> table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])
    >>> decode_attention(torch.ones(1, 1, 16), kv, table, lengths)[0, 0, 0].item()
    3.0
    """
    check_heads("q", q)
    check_cache(kv, table, q, len(q))
    check_operand("lengths", lengths, (len(q),), INDEX, q)
    options = Options.checked(q, scale, window, sinks, softcap)
    chosen = choose_backend(backend, q, kv, sinks)
    check_dim("q", q, chosen)
    sizes = None if tiles is None else tiles.sizes
    out: torch.Tensor = _decode(q, kv, table, lengths, *options.operands, sizes, str(chosen))
    return out


def _compute(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    tiles: list[int] | None,
    backend: str,
) -> torch.Tensor:
    options = Options(scale, window, sinks, softcap)
    if q.device.type == "cpu":
        check_blocks(table, lengths, kv, window, ahead=0)
    if backend == Backend.TORCH:
        return torch_path.decode(q, kv, table, lengths, options)
    enter_mode(Backend(backend))
    chosen = AttentionTiles(*tiles) if tiles else attention_tiles("decode", arch_of(q.device), q.dtype, q.shape[2])
    _, heads, _, block, dim = kv.shape
    cached = Cached(kv, block, heads, kv.stride(1), kv.stride(2), dim)
    return launch(q, cached, table, lengths, options, chosen)


_decode = operator("decode_attention", _compute, lambda q, *_rest: q.new_empty(q.shape))


def is_shared(blocks: dict[str, int], value_offset: int) -> bool:
    """True if values are the part of keys that a tile holds, so that they need no loads of their own."""
    return not value_offset and blocks["DV"] == blocks["D_MAIN"]


class Cached(NamedTuple):
    """The places of a token's keys and values in a cache.

    Attributes
    ----------
    kv : Tensor
        The cache; its first dim counts blocks.
    block : int
        Tokens in a block [tokens].
    heads : int
        Key-value heads.
    head_stride, value_offset : int
        Numbers between the rows of one KV head and of the next, and between keys and values; 0 where values are the
        first numbers of keys.
    value_dim : int
    """

    kv: torch.Tensor
    block: int
    heads: int
    head_stride: int
    value_offset: int
    value_dim: int


def launch(
    q: torch.Tensor,
    cached: Cached,
    table: torch.Tensor,
    lengths: torch.Tensor,
    options: Options,
    tiles: AttentionTiles,
) -> torch.Tensor:
    """Attend with queries (B, H, D) by Triton's kernels: -> (B, H, value_dim)."""
    rows, heads, _ = q.shape
    chunks = -(-table.shape[1] * cached.block // tiles.chunk)
    out = torch.empty((rows, heads, cached.value_dim), dtype=q.dtype, device=q.device)
    each = 4 * heads * max(1, chunks) * cached.value_dim
    step = max(1, min(rows, _MOST_SUMS // each))
    sums = torch.empty((step, heads, chunks, cached.value_dim), dtype=torch.float32, device=q.device)
    for low in range(0, rows, step):
        some = slice(low, low + step)
        _launch(q[some], cached, table[some], lengths[some], options, tiles, sums, out[some])
    return out


def _launch(
    q: torch.Tensor,
    cached: Cached,
    table: torch.Tensor,
    lengths: torch.Tensor,
    options: Options,
    tiles: AttentionTiles,
    sums: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend with some sequences; `sums` (at least as many, H, chunks, value_dim) is scratch."""
    from .jit_attention import decode, merge

    rows, heads, dim = q.shape
    chunks = sums.shape[2]
    group = heads // cached.heads
    members = min(tiles.m, power(group))
    denominators = sums.new_empty(rows, heads, chunks)
    maxima = sums.new_empty(rows, heads, chunks)
    blocks = head_blocks(dim, cached.value_dim)
    constants = options.constants
    if chunks:
        decode[(cached.heads * -(-group // members), rows, chunks)](
            q,
            cached.kv,
            sums,
            denominators,
            maxima,
            table,
            lengths,
            *options.factors,
            *q.stride()[:2],
            cached.kv.stride(0),
            cached.head_stride,
            cached.value_offset,
            table.stride(0),
            KV_HEADS=cached.heads,
            GROUP=group,
            **blocks,
            PAGE=cached.block,
            **constants,
            SHARED=is_shared(blocks, cached.value_offset),
            CHUNK=tiles.chunk,
            BLOCK_G=members,
            BLOCK_N=tiles.n,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    merge[(rows, heads)](
        sums,
        denominators,
        maxima,
        options.sinks,
        lengths,
        out,
        chunks,
        DV=blocks["DV"],
        BLOCK_DV=blocks["BLOCK_DV"],
        WINDOW=constants["WINDOW"],
        SINKS=options.sinks is not None,
        CHUNK=tiles.chunk,
        BLOCK=_CHUNKS,
    )


@work_of(decode_attention)
def decode_attention_work(
    heads: int, kv_heads: int, head_dim: int, context: int, rows: int, kv_itemsize: int, itemsize: int
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 4 H D context,  bytes = 2 K D kv_itemsize context + 2 itemsize H D rows

    Parameters
    ----------
    heads, kv_heads, head_dim : int
        H, K and D.
    context : int
        Sum of the lengths [tokens].
    rows : int
        B, the number of sequences; q is read once and out is written once.
    kv_itemsize, itemsize : int
        Size of a number of the cache, and of q [byte].

    Examples
    --------
    >>> decode_attention_work(32, 8, 128, context=1000, rows=2, kv_itemsize=2, itemsize=4)
    (16384000, 4161536)
    """
    flops = 4 * heads * head_dim * context
    return flops, 2 * kv_heads * head_dim * kv_itemsize * context + 2 * itemsize * heads * head_dim * rows


@reference_of(decode_attention)
def decode_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `decode_attention` in float64, token by token, the oracle of its tests: -> (B, H, D) float64.

    Examples
    --------
    >>> kv, one = torch.ones(1, 1, 2, 1, 16), torch.tensor([1])
    >>> decode_attention_reference(torch.ones(1, 1, 16), kv, torch.zeros(1, 1).int(), one)[0, 0, 0].item()
    1.0
    """
    options = Options.checked(q, scale, window, sinks, softcap)
    size = kv.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for s, length in enumerate(lengths.tolist()):
        seen = range(max(0, length - window) if window else 0, length)
        cells = [kv[int(table[s, t // size]), :, :, t % size].double() for t in seen]
        if cells:
            rows = torch.stack(cells)
            out[s] = reference_row(q[s], rows[:, :, 0], rows[:, :, 1], options)
    return out
