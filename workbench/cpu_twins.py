"""Doors of the gpu lane that lead CPU tensors to Numba: attention of decodes, norms, rotations, activations.

Where no backend is named, and the tensors are in CPU memory and of a type that Numba's kernel takes; everything else
goes to `kernels_triton`. On one AVX-512 core torch took 5 to 23 times as long for decodes of 512 to 1024 tokens; for
rows of 4096 numbers 1.6 to 3 times at 64 rows of bf16 and 1 to 3 of fp32 (GeGLU the least), at 2048 rows 7 to 18 and 2
to 8. What torch has a kernel of its own for stays there: LayerNorm, embedding, attention of prompts.
"""

from __future__ import annotations

from functools import partial

import torch

import kernels_cpu
import kernels_triton
from kernels_triton import AttentionTiles

_ROWS = torch.float32, torch.bfloat16
_HEADS = *_ROWS, torch.float16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, backend: str | None = None) -> torch.Tensor:
    """`kernels_triton.rms_norm`, in Numba for CPU tensors."""
    if _in_numba(backend, x, _ROWS):
        return kernels_cpu.rms_norm(x, weight, eps=eps)
    return kernels_triton.rms_norm(x, weight, eps=eps, backend=backend)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels_triton.add_rms_norm`, in Numba for CPU tensors."""
    if _in_numba(backend, x, _ROWS):
        return kernels_cpu.add_rms_norm(x, residual, weight, eps=eps)
    return kernels_triton.add_rms_norm(x, residual, weight, eps=eps, backend=backend)


def gated(x: torch.Tensor, *, activation: str = "swiglu", backend: str | None = None) -> torch.Tensor:
    """`kernels_triton.gated`, in Numba for CPU tensors."""
    if _in_numba(backend, x, _ROWS):
        return kernels_cpu.gated(x, activation=activation)
    return kernels_triton.gated(x, activation=activation, backend=backend)


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """`kernels_triton.rope`, in Numba for CPU tensors."""
    if _in_numba(backend, x, _ROWS):
        return kernels_cpu.rope(x, positions, table, interleaved=interleaved, weight=weight, eps=eps)
    return kernels_triton.rope(x, positions, table, interleaved=interleaved, weight=weight, eps=eps, backend=backend)


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
    """`kernels_triton.decode_attention`, for CPU tensors by `flash_decode`: the cache's blocks are the same."""
    if not _in_numba(backend, q, _HEADS) or kv.dtype not in _HEADS:
        return kernels_triton.decode_attention(
            q,
            kv,
            table,
            lengths,
            scale=scale,
            window=window,
            sinks=sinks,
            softcap=softcap,
            tiles=tiles,
            backend=backend,
        )
    attend = partial(kernels_cpu.flash_decode, scale=scale, window=window, sinks=sinks, softcap=softcap)
    queries, some = q.float().contiguous(), lengths != 0
    if bool(some.all()):
        return attend(queries, kv, table, lengths).to(q.dtype)
    out = torch.zeros(q.shape, dtype=q.dtype)
    out[some] = attend(queries[some], kv, table[some], lengths[some]).to(q.dtype)
    return out


def _in_numba(backend: str | None, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    return backend is None and not x.is_cuda and x.dtype in dtypes
