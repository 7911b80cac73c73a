"""Attention of prompts: packed sequences of any length, whose first tokens may already be in the paged cache."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operands import INDEX, check_operand
from ..backend.operators import check_tensor, operator
from ..declarations import operation, reference_of, work_of
from ..moe.tiles import arch_of
from . import torch_path
from .options import (
    AttentionTiles,
    Options,
    Prefix,
    attention_tiles,
    check_blocks,
    check_cache,
    check_dim,
    check_heads,
    head_blocks,
    reference_row,
)


@operation
def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    *,
    key_starts: torch.Tensor | None = None,
    prefix: Prefix | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    tiles: AttentionTiles | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Causal attention within each of several sequences.

        out[t, h] = softmax(scale * q[t, h] . K[.., h // G]) V[.., h // G],  G = H / K

    A token t attends to the cached tokens of its sequence and to the sequence's keys up to t; the queries of a sequence
    belong to the last of its keys. Online softmax and sums are in fp32; weights are rounded to q's type before they are
    multiplied with values. For a chunk of a prompt, pass the cached tokens as `prefix`; for latent attention (MLA),
    expand them to keys and values and pass `key_starts`.

    Parameters
    ----------
    q : (T, H, D) fp32, fp16 or bf16; D and Dv >= 16 for Triton
        Queries of all sequences, one after the other. Rows and heads may be strided, here and in k and v.
    k, v : (S, K, D) and (S, K, Dv) of q's type
        Keys and values of the sequences.
    starts : (B + 1,) int32 or int64
        First query of each sequence, and T. On a GPU neither it nor the integer operands below are checked.
    key_starts : (B + 1,) of the same type, optional
        First key of each sequence, and S, if there are more keys than queries; by default `starts`.
    prefix : Prefix, optional
        Cached tokens before the first query, for D = Dv. Slots past a length, and table entries that no query needs,
        are not read.
    scale, window, sinks, softcap
        As of `decode_attention`.
    tiles : AttentionTiles, optional
        Sizes of the Triton launch, by default from the table.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (T, H, Dv) of q's type
        Relative Frobenius error against float64: 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, an option or (on the CPU) a start, length or block is out of
        range, or the backend cannot compute here.

    Examples
    --------
    The first token of a sequence sees itself alone.

    >>> v = torch.arange(32.0).reshape(2, 1, 16)
    >>> out = prefill_attention(torch.ones(2, 1, 16), torch.ones(2, 1, 16), v, torch.tensor([0, 2]))
    >>> out[:, 0, 0].tolist()
    [0.0, 8.0]
    """
    ends = starts if key_starts is None else key_starts
    _check(q, k, v, starts, ends, prefix)
    options = Options.checked(q, scale, window, sinks, softcap)
    cached = (None,) * 3 if prefix is None else prefix
    chosen = choose_backend(backend, q, k, v, cached[0], sinks)
    for name, rows in (("q", q), ("v", v)):
        check_dim(name, rows, chosen)
    sizes = None if tiles is None else tiles.sizes
    out: torch.Tensor = _prefill(q, k, v, starts, ends, *cached, *options.operands, sizes, str(chosen))
    return out


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    kv: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    tiles: list[int] | None,
    backend: str,
) -> torch.Tensor:
    options = Options(scale, window, sinks, softcap)
    prefix = None if kv is None or table is None or lengths is None else Prefix(kv, table, lengths)
    if q.device.type == "cpu":
        _check_values(q, k, starts, key_starts, prefix, window)
    if backend == Backend.TORCH:
        return torch_path.prefill(q, k, v, starts, key_starts, prefix, options)
    enter_mode(Backend(backend))
    widest = max(q.shape[2], v.shape[2])
    chosen = AttentionTiles(*tiles) if tiles else attention_tiles("prefill", arch_of(q.device), q.dtype, widest)
    return _launch(q, k, v, starts, key_starts, prefix, options, chosen)


_prefill = operator("prefill_attention", _compute, lambda q, k, v, *_rest: q.new_empty(*q.shape[:2], v.shape[2]))


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    prefix: Prefix | None,
) -> None:
    for name, rows in (("q", q), ("k", k), ("v", v)):
        check_heads(name, rows)
        if rows.dtype is not q.dtype or rows.device != q.device:
            raise ValueError(
                f"{name} must be {q.dtype} on {q.device} as q, not {rows.dtype} on {rows.device}: move it."
            )
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k and v must be (S, K, {q.shape[2]}) and (S, K, Dv) with {q.shape[1]} a multiple of K, not "
            f"{tuple(k.shape)} and {tuple(v.shape)}: pass one model's."
        )
    for name, given in (("starts", starts), ("key_starts", key_starts)):
        check_tensor(name, given)
    if starts.ndim != 1 or not len(starts):
        raise ValueError(f"starts must be (B + 1,), not {tuple(starts.shape)}: put 0 first and T last.")
    check_operand("starts", starts, tuple(starts.shape), INDEX, q)
    check_operand("key_starts", key_starts, tuple(starts.shape), (starts.dtype,), q)
    if prefix is None:
        return
    for name, given in zip(Prefix._fields, prefix, strict=True):
        check_tensor(f"prefix.{name}", given)
    check_cache(prefix.kv, prefix.table, q, len(starts) - 1)
    check_operand("prefix.lengths", prefix.lengths, (len(starts) - 1,), INDEX, q)
    if prefix.kv.shape[1] != k.shape[1] or v.shape[2] != q.shape[2]:
        raise ValueError(
            f"prefix.kv must have the {k.shape[1]} KV heads of k, and v its head dim, not {tuple(prefix.kv.shape)} and "
            f"{tuple(v.shape)}: pass one model's."
        )


def _check_values(
    q: torch.Tensor,
    k: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    prefix: Prefix | None,
    window: int | None,
) -> None:
    edges = starts.tolist()
    key_edges = edges if key_starts is starts else key_starts.tolist()
    for name, given, rows in (("starts", edges, len(q)), ("key_starts", key_edges, len(k))):
        if given[0] or given[-1] != rows or given != sorted(given):
            raise ValueError(f"{name} must rise from 0 to {rows}, not be {given}: sum up the lengths.")
    if any(d - c < b - a for (a, b), (c, d) in zip(pairwise(edges), pairwise(key_edges), strict=True)):
        raise ValueError(
            f"key_starts must give each sequence as many keys as queries, not {key_edges}: sum lengths up."
        )
    if prefix is not None:
        check_blocks(prefix.table, prefix.lengths, prefix.kv, window, ahead=1)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    prefix: Prefix | None,
    options: Options,
    tiles: AttentionTiles,
) -> torch.Tensor:
    from .jit_attention import prefill

    tokens, heads, dim = q.shape
    value_dim = v.shape[2]
    sequences = len(starts) - 1
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    page = (None, 0, 0) if prefix is None else (prefix.kv, prefix.kv.stride(0), prefix.kv.shape[3])
    prefill[(tokens // tiles.m + sequences, heads)](
        q,
        k,
        v,
        page[0],
        out,
        options.sinks,
        starts,
        key_starts,
        None if prefix is None else prefix.table,
        None if prefix is None else prefix.lengths,
        *options.factors,
        sequences,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        page[1],
        0 if prefix is None else prefix.table.stride(0),
        GROUP=heads // k.shape[1],
        **head_blocks(dim, value_dim),
        PAGE=page[2],
        **options.constants,
        SINKS=options.sinks is not None,
        BLOCK_M=tiles.m,
        BLOCK_N=tiles.n,
        BLOCK_B=1 << (sequences - 1).bit_length(),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


@work_of(prefill_attention)
def prefill_attention_work(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, pairs: int, queries: int, keys: int, itemsize: int
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 2 H (D + Dv) pairs,  bytes = itemsize (D + Dv) (H T + K S)

    Parameters
    ----------
    heads, kv_heads, head_dim, value_dim : int
        H, K, D and Dv.
    pairs : int
        Number of pairs of a query and a key that it sees: L (L + 1) / 2 for a prompt of L tokens.
    queries, keys : int
        T and S, including cached tokens [tokens].
    itemsize : int
        Size of a number [byte].

    Examples
    --------
    >>> prefill_attention_work(32, 8, 128, 128, pairs=10, queries=4, keys=4, itemsize=2)
    (163840, 81920)
    """
    width = head_dim + value_dim
    return 2 * heads * width * pairs, itemsize * width * (heads * queries + kv_heads * keys)


@reference_of(prefill_attention)
def prefill_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    *,
    key_starts: torch.Tensor | None = None,
    prefix: Prefix | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `prefill_attention` in float64, query by query, the oracle of its tests: -> (T, H, Dv) float64.

    Examples
    --------
    >>> x = torch.ones(1, 1, 16)
    >>> prefill_attention_reference(x, x, 3 * x, torch.tensor([0, 1]))[0, 0, 0].item()
    3.0
    """
    options = Options.checked(q, scale, window, sinks, softcap)
    key_edges = starts if key_starts is None else key_starts
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for s in range(len(starts) - 1):
        low, high = starts[s : s + 2].tolist()
        first, last = key_edges[s : s + 2].tolist()
        past = 0 if prefix is None else int(prefix.lengths[s])
        for t in range(low, high):
            end = past + last - first - (high - 1 - t)
            seen = range(0 if window is None else max(0, end - window), end)
            keys: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            for at in seen:
                if prefix is not None and at < past:
                    key, value = _cached_row(prefix, s, at)
                else:
                    key = k[first + at - past]
                    value = v[first + at - past]
                keys.append(key.double())
                values.append(value.double())
            out[t] = reference_row(q[t], torch.stack(keys), torch.stack(values), options)
    return out


def _cached_row(prefix: Prefix, s: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value (K, D) of a cached token."""
    size = prefix.kv.shape[3]
    both = prefix.kv[int(prefix.table[s, at // size]), :, :, at % size]
    return both[:, 0], both[:, 1]
