"""Timing of other attention tiles on the GPU at hand, to find the best entries of `attention_tiles.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from kernels_triton.backend.ceilings import timed
from workbench.kernels import AttentionTiles, decode_attention, mla_decode, prefill_attention

_PREFILL = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2)]
_DECODE = [(64, 4, 3), (64, 4, 4), (128, 4, 3), (32, 4, 4), (64, 8, 3)]
_LATENTS = [(32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 3), (32, 16, 8, 3), (64, 16, 8, 3), (16, 32, 4, 2)]
_CHUNKS = (256, 512, 1024)
_CHUNKS_OF_LATENTS = (1024, 2048, 4096)


def tune_attention(device: torch.device, rehearsal: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield names and functions that time the candidates, for 16-bit heads of 64 and 128 dims, and latents of 576."""
    for dim in (16,) if rehearsal else (64, 128):
        yield f"prefill, D {dim}", partial(_prefill, device, dim, rehearsal)
        yield f"decode, D {dim}", partial(_decode, device, dim, rehearsal)
    yield "decode of latents", partial(_decode_latents, device, rehearsal)


def _prefill(device: torch.device, dim: int, rehearsal: bool) -> dict[str, Any]:
    length, heads = (5, 2) if rehearsal else (4096, 32)
    q, k, v = torch.randn(3, length, heads, dim, device=device).bfloat16()
    starts = torch.tensor([0, length], device=device)
    shapes = [AttentionTiles(16, 16, 4, 1)] if rehearsal else [AttentionTiles(*sizes) for sizes in _PREFILL]
    backend = "triton-interpret" if rehearsal else "triton"
    return _best(shapes, lambda tiles: prefill_attention(q, k, v, starts, tiles=tiles, backend=backend), device)


def _decode(device: torch.device, dim: int, rehearsal: bool) -> dict[str, Any]:
    rows, blocks = (1, 2) if rehearsal else (64, 256)
    kv = torch.randn(rows * blocks, 1 if rehearsal else 8, 2, 16, dim, device=device).bfloat16()
    table = torch.randperm(rows * blocks, device=device).int().view(rows, blocks)
    q = torch.randn(rows, 2 if rehearsal else 32, dim, device=device).bfloat16()
    lengths = torch.full((rows,), 16 * blocks, device=device)
    backend = "triton-interpret" if rehearsal else "triton"
    shapes = [AttentionTiles(16, *sizes, chunk) for sizes in _DECODE for chunk in _CHUNKS]
    shapes = [AttentionTiles(16, 16, 4, 1, 32)] if rehearsal else shapes
    return _best(shapes, lambda tiles: decode_attention(q, kv, table, lengths, tiles=tiles, backend=backend), device)


def _decode_latents(device: torch.device, rehearsal: bool) -> dict[str, Any]:
    rows, blocks = (1, 2) if rehearsal else (64, 256)
    dim, value_dim = (48, 32) if rehearsal else (576, 512)
    kv = torch.randn(rows * blocks, 16, dim, device=device).bfloat16()
    table = torch.randperm(rows * blocks, device=device).int().view(rows, blocks)
    q = torch.randn(rows, 2 if rehearsal else 128, dim, device=device).bfloat16()
    lengths = torch.full((rows,), 16 * blocks, device=device)
    how: dict[str, Any] = {"value_dim": value_dim, "scale": 192**-0.5}
    how["backend"] = "triton-interpret" if rehearsal else "triton"
    shapes = [AttentionTiles(*sizes, chunk) for sizes in _LATENTS for chunk in _CHUNKS_OF_LATENTS]
    shapes = [AttentionTiles(16, 16, 4, 1, 32)] if rehearsal else shapes
    return _best(shapes, lambda tiles: mla_decode(q, kv, table, lengths, tiles=tiles, **how), device)


def _best(
    shapes: list[AttentionTiles], launch: Callable[[AttentionTiles], object], device: torch.device
) -> dict[str, Any]:
    """The fastest candidate and the seconds of all; a candidate that does not compile gives its error instead."""
    seconds: dict[str, float | str] = {}
    for tiles in shapes:
        try:
            seconds[str(_sizes(tiles))] = median(timed(partial(launch, tiles), device, seconds=0.1))
        except Exception as error:  # too much shared memory, most often: the next may fit
            seconds[str(_sizes(tiles))] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    done = {name: took for name, took in seconds.items() if isinstance(took, float)}
    return {"best": min(done, key=done.__getitem__) if done else None, "tiles": seconds}


def _sizes(tiles: AttentionTiles) -> list[int]:
    return [size for size in (tiles.m, tiles.n, tiles.warps, tiles.stages, tiles.chunk) if size]
