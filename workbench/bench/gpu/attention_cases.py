"""Cases of attention and the KV cache."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from workbench import kernels
from workbench.bench.gpu import peers as gpu_peers
from workbench.bench.gpu.case import EXACT, TWICE, Call, Size, host, normal
from workbench.kernels import Prefix


def prefill(
    size: Size,
    device: torch.device,
    *,
    prompts: int,
    length: int,
    heads: int = 32,
    kv_heads: int = 8,
    dims: tuple[int, int] = (128, 128),
    cached: int = 0,
    window: int | None = None,
    full: bool = False,
) -> Call:
    count = size.of(2, 2, prompts)
    rows = size.of(5, 37, length)
    past = size.of(9, 33, cached) if cached else 0
    H = size.of(2, heads, heads)
    K = size.of(1, kv_heads, kv_heads)
    D, Dv = (size.of(16, dim, dim) for dim in dims)
    q = normal(device, count * rows, H, D)
    k = normal(device, count * rows, K, D)
    v = normal(device, count * rows, K, Dv)
    starts = torch.arange(0, count * rows + 1, rows, device=device)
    prefix = None
    if cached:
        blocks = -(-past // 16)
        table = torch.randperm(count * blocks, device=device).int().view(count, blocks)
        lengths = torch.full((count,), past, device=device)
        prefix = Prefix(normal(device, count * blocks, K, 2, 16, D), table, lengths)
    seen = [min(past + at + 1, window or past + at + 1) for at in range(rows)]
    keys = count * (rows + (min(past, window) if window else past))
    flops, moved = kernels.prefill_attention_work(H, K, D, Dv, count * sum(seen), count * rows, keys, 2)

    options = _score_options(H, device) if full else _ScoreOptions()

    def exact() -> torch.Tensor:
        there = None if prefix is None else Prefix(*host(*prefix))
        return kernels.prefill_attention_reference(
            *host(q, k, v, starts), prefix=there, window=window, **options.on_host()
        )

    plain = not cached and window is None and not full
    peers = gpu_peers.prefill(q, k, v, count) if plain else {}
    attend = partial(kernels.prefill_attention, q, k, v, starts, prefix=prefix, window=window, **options._asdict())
    return Call(lambda backend: attend(backend=backend), exact, flops, moved, TWICE, peers)


class _ScoreOptions(NamedTuple):
    """Options that change the scores: their soft cap, and attention sinks, (H,) fp32 scores without a value."""

    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def on_host(self) -> dict[str, Any]:
        """Keyword arguments of the reference, on the CPU."""
        return self._asdict() | {"sinks": None if self.sinks is None else self.sinks.cpu()}


def _score_options(heads: int, device: torch.device) -> _ScoreOptions:
    return _ScoreOptions(30.0, torch.randn(heads, device=device))


def decode(
    size: Size,
    device: torch.device,
    *,
    rows: int,
    context: int,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    full: bool = False,
) -> Call:
    B = size.of(2, 3, rows)
    S = size.of(19, 700, context)
    H = size.of(2, heads, heads)
    K = size.of(1, kv_heads, kv_heads)
    D = size.of(16, dim, dim)
    width = -(-S // 16)
    kv = normal(device, B * width, K, 2, 16, D)
    table = torch.randperm(B * width, device=device).int().view(B, width)
    q = normal(device, B, H, D)
    lengths = torch.full((B,), S, device=device)
    flops, moved = kernels.decode_attention_work(H, K, D, B * S, B, 2, 2)
    options = _score_options(H, device) if full else _ScoreOptions()
    return Call(
        lambda backend: kernels.decode_attention(q, kv, table, lengths, **options._asdict(), backend=backend),
        lambda: kernels.decode_attention_reference(*host(q, kv, table, lengths), **options.on_host()),
        flops,
        moved,
        TWICE,
        {} if full else gpu_peers.decode(q, kv, table, S),
    )


def latents(size: Size, device: torch.device, *, rows: int, context: int, heads: int = 128) -> Call:
    """Decode attention to DeepSeek's latents."""
    B = size.of(2, 3, rows)
    S = size.of(19, 700, context)
    H = size.of(2, heads, heads)
    D, value_dim = size.of(48, 576, 576), size.of(32, 512, 512)
    width = -(-S // 16)
    kv = normal(device, B * width, 16, D)
    table = torch.randperm(B * width, device=device).int().view(B, width)
    q = normal(device, B, H, D)
    lengths = torch.full((B,), S, device=device)
    how = {"value_dim": value_dim, "scale": 192**-0.5}
    return Call(
        lambda backend: kernels.mla_decode(q, kv, table, lengths, **how, backend=backend),
        lambda: kernels.mla_decode_reference(*host(q, kv, table, lengths), **how),
        *kernels.mla_decode_work(H, D, value_dim, B * S, B, 2, 2),
        TWICE,
        gpu_peers.latents(q, kv, table, S, **how),
    )


def move(size: Size, device: torch.device, *, out: bool) -> Call:
    T = size.of(5, 100, 1 << 16)
    K = size.of(1, 8, 8)
    D = size.of(16, 128, 128)
    P = size.of(4, 64, 1 << 13)
    kv = normal(device, P, K, 2, 16, D)
    slots = torch.randperm(P * 16, device=device)[:T]
    k, v = normal(device, 2, T, K, D)

    def ours(backend: str | None) -> torch.Tensor:
        if out:
            return torch.stack(kernels.gather_kv(kv, slots, backend=backend))
        kernels.append_kv(kv, slots, k, v, backend=backend)
        return kv

    def exact() -> torch.Tensor:
        cache, places, keys, values = host(kv, slots, k, v)
        if out:
            return torch.stack(kernels.gather_kv(cache, places, backend="torch")).double()
        kernels.append_kv(cache, places, keys, values, backend="torch")
        return cache.double()

    return Call(ours, exact, *kernels.gather_kv_work(K, D, T, 2, 2), EXACT)
