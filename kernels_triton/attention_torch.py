"""Attention in torch, for CPU tensors: one sequence after the other, in fp32."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from .attention import Options

if TYPE_CHECKING:
    from .prefill_attention import Prefix

_QUERIES = 256  # whose scores are held at once


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    prefix: Prefix | None,
    options: Options,
) -> torch.Tensor:
    """`prefill_attention` of checked operands."""
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    edges, key_edges = starts.tolist(), key_starts.tolist()
    for s, (low, high) in enumerate(pairwise(edges)):
        keys, values = (rows[key_edges[s] : key_edges[s + 1]] for rows in (k, v))
        if prefix is not None:
            past = cached(prefix.kv, prefix.table[s], 0, int(prefix.lengths[s]), options.window)
            keys, values = (torch.cat((old.to(q.dtype), new)) for old, new in zip(past, (keys, values), strict=True))
        for first in range(low, high, _QUERIES):
            last = min(first + _QUERIES, high)
            end = len(keys) - (high - last)
            out[first:last] = attend(q[first:last], keys[:end], values[:end], options)
    return out


def decode(
    q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, options: Options
) -> torch.Tensor:
    """`decode_attention` of checked operands."""
    out = torch.empty((*q.shape[:2], kv.shape[4]), dtype=q.dtype, device=q.device)
    for s, length in enumerate(lengths.tolist()):
        low = max(0, length - options.window) if options.window else 0
        out[s] = attend(q[s : s + 1], *cached(kv, table[s], low, length, None), options)[0]
    return out


def cached(
    kv: torch.Tensor, blocks: torch.Tensor, low: int, length: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (S, K, D) of the cached tokens low .. length; zeros before what a window lets be seen."""
    tokens = torch.arange(low, length, device=kv.device)
    needed = tokens > length - window if window else tokens >= 0
    size = kv.shape[3]
    page = torch.where(needed, blocks[tokens // size], 0).long()
    rows = kv[page, :, :, tokens % size].where(needed[:, None, None, None], 0)
    return rows[:, :, 0], rows[:, :, 1]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """Attention of queries (L, H, D), the last of k (S, K, D) and v (S, K, Dv), -> (L, H, Dv) fp32."""
    (length, heads, dim), (keys, shared, _) = q.shape, k.shape
    if not keys:
        return torch.zeros(length, heads, v.shape[2], device=q.device)
    grouped = q.float().reshape(length, shared, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (grouped @ k.float().permute(1, 2, 0) * options.scale).view(heads, length, keys)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    ahead = torch.arange(keys, device=q.device) - torch.arange(keys - length, keys, device=q.device)[:, None]
    hidden = ahead > 0 if options.window is None else (ahead > 0) | (ahead <= -options.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks[:, None, None].expand(-1, length, 1)), dim=2)
    weights = scores.softmax(dim=2)[:, :, :keys]
    mixed = weights.reshape(shared, -1, keys) @ v.float().transpose(0, 1)
    return mixed.view(heads, length, -1).transpose(0, 1)
