"""Decode attention over the paged caches and the append into them, by Numba, torch or Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import kernels_cpu
from kernels_cpu.arguments import writeable
from workbench.kernels.arrays import computed, directly, for_tensors

if TYPE_CHECKING:
    from kernels_cpu import CodePath
    from kernels_cpu.arguments import Operand, SameKind
    from kernels_triton import AttentionTiles

__all__ = ["append_kv", "decode_attention", "decode_attention_reference", "mla_decode", "mla_decode_reference"]


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
    tiles: AttentionTiles | None = None,
    backend: str | None = None,
) -> SameKind:
    """Attend with one new token per sequence over its paged KV cache.

        out[s, h] = softmax(scale * q[s, h] . K[s, h // G]) V[s, h // G],  G = H / K

    On the CPU Numba passes once over KV per KV head for all its G query heads; the result does not depend on the number
    of threads, and the GIL is released. On a GPU one kernel computes the chunks of a sequence in parallel, which begin
    at fixed tokens, and another combines them in order. Sums are in fp32. A sequence's result is the same whatever else
    is in the batch.

    Parameters
    ----------
    q : (B, H, D) fp32, fp16 or bf16; fp32 where `scales`, `threads`, `path` or `out` is given
        Query heads of the new tokens: a numpy array, of which uint16 holds bfloat16 bits, or a tensor on any device. On
        a GPU D >= 16.
    kv : (P, K, 2, b, D) fp32, fp16, bf16 (uint16 that holds its bits in arrays), or on the CPU int8; contiguous
        The cache: per block and KV head, b rows of K and then b rows of V. Slots past a length are never read.
    table : (B, W) int32, contiguous
        Blocks of each sequence in order; entries past ceil(length / b), or before the window, are never read.
    lengths : (B,) int32 or int64
        Tokens in each sequence [tokens], in 0 .. W * b, with zeros for 0; from 1 where `scales`, `threads`, `path` or
        `out` is given. On a GPU table and lengths are not checked.
    scales : (P, K, 2, b) fp32, contiguous
        Only for a cache of int8: the factor of each of its rows, as `append_kv` stored it.
    scale : float, optional
        Factor of the scores, by default 1 / sqrt(D).
    window : int, optional
        Number of last tokens to attend to (sliding window), by default all.
    sinks : (H,) fp32, optional
        A score per head that adds to the softmax' denominator only (GPT-OSS).
    softcap : float, optional
        Scores become softcap * tanh(score / softcap).
    threads : int, optional
        Number of threads on the CPU, by default that of the cores that this process may use.
    path : CodePath, optional
        Code path on the CPU, by default this computer's (`features`).
    out : (B, H, D) fp32, contiguous, optional
        Memory for the result, on the CPU; may be q itself.
    tiles : AttentionTiles, optional
        Sizes of the Triton launch, by default from the table.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton on a GPU, Numba on the CPU, torch where an operand requires a gradient. With a backend, arrays
        are taken as CPU tensors of the same memory.

    Returns
    -------
    (B, H, D) of q's kind and type
        `out` if given. Max abs error 2e-6 against float64 for fp32 on the CPU and operands of unit variance; relative
        Frobenius error 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32 elsewhere. The error of int8 is not included.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, an option or (on the CPU) a length or a used block is out of
        range, or an argument is given that the kernel for these operands does not take.

    Examples
    --------
    A sequence of one token returns that token's value.

    >>> kv = np.zeros((1, 1, 2, 4, 2), np.float32)
    >>> kv[0, 0, 1, 0] = [3, 5]
    >>> decode_attention(np.ones((1, 1, 2), np.float32), kv, np.zeros((1, 1), np.int32), np.ones(1, np.int64))
    array([[[3., 5.]]], dtype=float32)
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks, "softcap": softcap}
    numba = {"scales": scales, "threads": threads, "path": path, "out": out}
    others = {"tiles": tiles, "backend": backend}
    plain = all(value is None for value in (numba | others).values())
    through_torch = plain and (_half(q) or _has_empty(q, lengths))
    if not through_torch and directly(q, numba, others, kv, table, lengths, sinks):
        return kernels_cpu.decode_attention(
            q, kv, table, lengths, **options, scales=scales, threads=threads, path=path, out=out
        )
    attend = for_tensors("decode_attention")
    found: SameKind = computed(attend, q, kv, table, lengths, **options, tiles=tiles, backend=backend)
    return found


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
) -> Any:
    """Compute `decode_attention` in float64, the oracle of its tests: -> (B, H, D) float64 of q's kind.

    The result is an array where `scales` are given.

    Examples
    --------
    >>> kv = np.zeros((1, 1, 2, 4, 2), np.float32)
    >>> kv[0, 0, 1, :2] = [[3, 5], [5, 7]]
    >>> decode_attention_reference(np.ones((1, 1, 2)), kv, np.zeros((1, 1), np.int32), np.array([2]))
    array([[[4., 6.]]])
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks, "softcap": softcap}
    if scales is not None or isinstance(q, np.ndarray):
        return kernels_cpu.decode_attention_reference(q, kv, table, lengths, scales=scales, **options)
    import kernels_triton

    return kernels_triton.decode_attention_reference(q, kv, table, lengths, **options)  # type: ignore[arg-type]


def mla_decode(
    q: SameKind,
    kv: Operand,
    table: Operand,
    lengths: Operand,
    *,
    value_dim: int = 512,
    scale: float,
    threads: int | None = None,
    path: CodePath | None = None,
    out: SameKind | None = None,
    tiles: AttentionTiles | None = None,
    backend: str | None = None,
) -> SameKind:
    """Multi-head latent attention of one new token per sequence, with absorbed projections (DeepSeek).

        out[s, h] = softmax(scale * q[s, h] . C[s]) C[s][:, :value_dim]

    All heads share one cached row per token: the compressed latent, which is also the value, then the rotated key.
    Numba and Triton compute it as `decode_attention`, with one KV head.

    Parameters
    ----------
    q : (B, H, D) fp32, fp16 or bf16; fp32 where `threads`, `path` or `out` is given
        Absorbed queries: `value_dim` latent dims, then the rotated ones; D = 576 for DeepSeek-V2 and V3. On a GPU
        D >= 16.
    kv : (P, b, D) fp32, fp16, bf16 (uint16 that holds its bits in arrays); contiguous
        The cache: b rows per block. Slots past a length are never read.
    table : (B, W) int32, contiguous
        Blocks of each sequence in order; entries past ceil(length / b) are never read.
    lengths : (B,) int32 or int64
        Tokens in each sequence [tokens], in 0 .. W * b, with zeros for 0; from 1 where `threads`, `path` or `out` is
        given. On a GPU table and lengths are not checked.
    value_dim : int
        Number of leading dims of a row that are its value.
    scale : float
        Factor of the scores. There is no default, since it depends on the dims before absorption: 1 / sqrt(192) for
        DeepSeek-V2 and V3 without YaRN's factor.
    threads, path, tiles, backend
        As of `decode_attention`.
    out : (B, H, value_dim) fp32, contiguous, optional
        Memory for the result, on the CPU.

    Returns
    -------
    (B, H, value_dim) of q's kind and type
        `out` if given. Errors as of `decode_attention`.

    Raises
    ------
    TypeError, ValueError
        As `decode_attention`.

    Examples
    --------
    >>> kv = np.zeros((1, 4, 3), np.float32)
    >>> kv[0, 0] = [3, 5, 7]
    >>> q, table = np.ones((1, 1, 3), np.float32), np.zeros((1, 1), np.int32)
    >>> mla_decode(q, kv, table, np.ones(1, np.int64), value_dim=2, scale=1.0)
    array([[[3., 5.]]], dtype=float32)
    """
    options: dict[str, Any] = {"value_dim": value_dim, "scale": scale}
    numba = {"threads": threads, "path": path, "out": out}
    others = {"tiles": tiles, "backend": backend}
    plain = all(value is None for value in (numba | others).values())
    through_torch = plain and (_half(q) or _has_empty(q, lengths))
    if not through_torch and directly(q, numba, others, kv, table, lengths):
        return kernels_cpu.mla_decode(q, kv, table, lengths, **options, threads=threads, path=path, out=out)
    attend = for_tensors("mla_decode")
    found: SameKind = computed(attend, q, kv, table, lengths, **options, tiles=tiles, backend=backend)
    return found


def mla_decode_reference(
    q: Operand, kv: Operand, table: Operand, lengths: Operand, *, value_dim: int = 512, scale: float
) -> Any:
    """Compute `mla_decode` in float64, the oracle of its tests: -> (B, H, value_dim) float64 of q's kind.

    Examples
    --------
    >>> q, kv = np.ones((1, 1, 3)), np.arange(3, dtype=np.float32).reshape(1, 1, 3)
    >>> mla_decode_reference(q, kv, np.zeros((1, 1), np.int32), np.ones(1, np.int64), value_dim=2, scale=1.0)
    array([[[0., 1.]]])
    """
    if isinstance(q, np.ndarray):
        return kernels_cpu.mla_decode_reference(q, kv, table, lengths, value_dim=value_dim, scale=scale)
    import kernels_triton

    reference: Any = kernels_triton.mla_decode_reference
    return reference(q, kv, table, lengths, value_dim=value_dim, scale=scale)


def append_kv(
    kv: Operand,
    slots: Operand,
    k: Operand,
    v: Operand,
    *,
    scales: Operand | None = None,
    backend: str | None = None,
) -> None:
    """Store one K row and one V row per new token into the slots of a paged cache, in place.

        kv[slot // b, h, 0, slot % b] = k[t, h];  kv[slot // b, h, 1, slot % b] = v[t, h];  slot = slots[t]

    A cache of 16 bits rounds to nearest, ties to even; numbers out of the range of fp16 become infinite. A cache of
    int8 rounds each row of D numbers to multiples of its scale, 1/127 of its largest magnitude; a row that is not
    finite becomes NaN. Nothing is stored if any slot is out of range (on the CPU; on a GPU they are not checked).

    Parameters
    ----------
    kv : (P, K, 2, b, D) fp32, fp16, bf16 (uint16 that holds its bits in arrays), or on the CPU int8; contiguous
        The cache as of `decode_attention`, an array or a tensor on any device; written in place.
    slots : (T,) int64, contiguous
        block * b + offset of each row, in 0 .. P * b - 1. No slot may occur twice, except for fp32 rows that Numba
        stores, of which the last one wins.
    k, v : (T, K, D) fp32, fp16 or bf16, both of one type; fp32 for a cache of int8
        New rows, each contiguous; they may be strided as in a slice of a fused qkv.
    scales : (P, K, 2, b) fp32, contiguous
        Only for a cache of int8: the rows' scales, written in place.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton on a GPU; on the CPU Numba for fp32 rows and torch for others. With a backend, arrays are
        taken as CPU tensors of the same memory.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, an operand overlaps the cache or requires a gradient, a slot is
        out of range, or an argument is given that the kernel for these operands does not take.

    Examples
    --------
    >>> kv = np.zeros((2, 1, 2, 4, 1), np.float32)
    >>> append_kv(kv, np.array([5]), np.full((1, 1, 1), 3, np.float32), np.full((1, 1, 1), 7, np.float32))
    >>> kv[1, 0, :, 1, 0]
    array([3., 7.], dtype=float32)
    """
    through_torch = _half(k) and isinstance(kv, np.ndarray) and scales is None
    if not through_torch and directly(kv, {"scales": scales}, {"backend": backend}, slots, k, v):
        kernels_cpu.append_kv(kv, slots, k, v, scales=scales)
        return
    if isinstance(kv, np.ndarray):
        writeable("kv", kv)
    computed(for_tensors("append_kv"), kv, slots, k, v, backend=backend)


def _half(operand: object) -> bool:
    """True for an array of 16 bits, which Numba's wrappers take only as the cache."""
    return isinstance(operand, np.ndarray) and operand.dtype in (np.float16, np.uint16)


def _has_empty(q: object, lengths: object) -> bool:
    """True for arrays with a sequence of no token, which Numba's wrapper does not take."""
    if not isinstance(q, np.ndarray) or not isinstance(lengths, np.ndarray):
        return False
    return lengths.dtype.kind == "i" and not lengths.all()
