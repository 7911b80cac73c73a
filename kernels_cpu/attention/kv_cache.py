"""Append new keys and values to the paged KV cache that `decode_attention` reads, and copy its blocks."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import (
    CACHED,
    STORAGES,
    Operand,
    check_apart,
    checked,
    contiguous,
    frozen,
    host_array,
    in_rows,
    scales_of,
    writeable,
)
from ..codegen.compiled import compiled
from ..codegen.numerics import ROUND
from ..codegen.rounding import bfloat16
from ..declarations import operation, reference_of, work_of
from .portable import BF16, FP32


@compiled()
def _float16(bits: Any) -> Any:
    """Round fp32 bits to the bits of the nearest fp16, ties to even; NaN becomes a quiet NaN.

    Numbers below fp16's normal ones are rounded by adding 1/2 in fp32, whose last bit there equals fp16's smallest
    number.
    """
    size = np.uint32(bits & 0x7FFFFFFF)
    small = np.uint32(np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
    normal = (size + 0xFFF + ((size >> 13) & 1) - 0x38000000) >> 13
    finite = small if size < 0x38800000 else normal
    special = 0x7E00 | (size >> 13) & 0x3FF if size > 0x7F800000 else 0x7C00
    return (finite if size < 0x47800000 else special) | (bits >> 16) & 0x8000


@compiled()
def _store(storage: int, source: Any, target: Any) -> None:
    """Copy fp32 bits, or round them to the cache's 16-bit format."""
    if storage == FP32:
        for x in range(source.size):
            target[x] = source[x]
    elif storage == BF16:
        for x in range(source.size):
            target[x] = bfloat16(source[x])
    else:
        for x in range(source.size):
            target[x] = _float16(source[x])


@compiled()
def _store_numbers(source: Any, target: Any) -> Any:
    """Round a row to integers in -127 .. 127 and return its scale; a row that is not finite is read back as NaN."""
    values = source.view(np.float32)
    most = np.float32(0)
    for x in range(values.size):
        size = abs(values[x])
        most = size if size > most or size != size else most
    scale = np.float32(most / np.float32(127))
    if 0 < scale < np.inf:
        for x in range(values.size):
            number = np.float32(np.float32(values[x] / scale + ROUND) - ROUND)
            target[x] = np.int8(min(max(number, np.float32(-127)), np.float32(127)))
    else:
        target[:] = 0
    return scale


@compiled()
def _append_numbers(kv: Any, scales: Any, slots: Any, k: Any, k_stride: int, v: Any, v_stride: int) -> None:
    """Store rows of K and V into an int8 cache, with their scales."""
    kv_heads = kv.shape[1]
    block = kv.shape[3]
    dim = kv.shape[4]
    for t in range(slots.size):
        page = slots[t] // block
        offset = slots[t] - page * block
        for h in range(kv_heads):
            key = k[t * k_stride + h * dim :]
            value = v[t * v_stride + h * dim :]
            scales[page, h, 0, offset] = _store_numbers(key[:dim], kv[page, h, 0, offset])
            scales[page, h, 1, offset] = _store_numbers(value[:dim], kv[page, h, 1, offset])


@compiled()
def _append(storage: int, kv: Any, slots: Any, k: Any, k_stride: int, v: Any, v_stride: int) -> None:
    """Store rows of K and V into a cache of fp32 or 16 bits."""
    kv_heads = kv.shape[1]
    block = kv.shape[3]
    dim = kv.shape[4]
    for t in range(slots.size):
        page = slots[t] // block
        offset = slots[t] - page * block
        for h in range(kv_heads):
            _store(storage, k[t * k_stride + h * dim : t * k_stride + (h + 1) * dim], kv[page, h, 0, offset])
            _store(storage, v[t * v_stride + h * dim : t * v_stride + (h + 1) * dim], kv[page, h, 1, offset])


def _rows(name: str, operand: Operand, shape: tuple[int, int, int]) -> tuple[NDArray[np.uint32], int]:
    """The bits of `operand` as a flat array, and the stride of its rows in elements.

    A slice of a fused qkv projection has strided rows; with a flat array and a stride the kernel is compiled once and
    still vectorised.
    """
    array = checked(name, operand, "T K D", np.float32)
    if array.shape != shape:
        raise ValueError(
            f"{name} must have shape (T, K, D) = {shape} of slots and kv, not {array.shape}: pass one batch."
        )
    for row in array[:1]:
        contiguous(f"each row of {name}", row)
    flat, strides = in_rows(name, array)
    return flat.view(np.uint32), strides[0]


@operation
def append_kv(kv: Operand, slots: Operand, k: Operand, v: Operand, *, scales: Operand | None = None) -> None:
    """Store one K row and one V row per new token into the slots of a paged cache, in place.

        kv[slot // b, h, 0, slot % b] = k[t, h];  kv[slot // b, h, 1, slot % b] = v[t, h];  slot = slots[t]

    One thread stores, with the GIL released. Caches of 16 bits hold the nearest number, ties to even; NaN stays NaN,
    and numbers beyond the range of fp16 become infinite. A cache of int8 holds each row of D in multiples of the row's
    scale, 1/127 of its largest magnitude, with an error of at most half a scale; a row that is not finite becomes NaN.
    If a slot occurs twice, the last row is kept. Nothing is stored if any slot is out of range.

    Parameters
    ----------
    kv : (P, K, 2, b, D) fp32, fp16, torch.bfloat16, uint16 that holds bfloat16 bits, or int8, C-contiguous
        The cache, written in place.
    slots : (T,) int64, C-contiguous
        block * b + offset of each row, in 0 .. P * b - 1.
    k, v : (T, K, D) fp32
        New rows; each row (K, D) is contiguous, rows may be strided as in a slice of a fused qkv.
    scales : (P, K, 2, b) fp32, C-contiguous
        Scales of the rows of an int8 cache, written in place; not for other caches.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes disagree, an operand is not contiguous or overlaps the cache, or a slot is out of range.

    Examples
    --------
    >>> kv = np.zeros((2, 1, 2, 4, 1), np.float32)
    >>> append_kv(kv, np.array([5]), np.full((1, 1, 1), 3, np.float32), np.full((1, 1, 1), 7, np.float32))
    >>> kv[1, 0, :, 1, 0]
    array([3., 7.], dtype=float32)
    """
    cache = writeable("kv", checked("kv", kv, "P K 2 b D", *CACHED, np.int8))
    where = contiguous("slots", checked("slots", slots, "T", np.int64))
    blocks, kv_heads, halves, block, dim = cache.shape
    if halves != 2 or 0 in cache.shape[1:]:
        raise ValueError(
            f"kv must have shape (P, K, 2, b, D) with K, b and D >= 1, not {cache.shape}: reshape the cache."
        )
    bad = np.flatnonzero((where < 0) | (where >= blocks * block))
    if bad.size:
        raise ValueError(
            f"slots[{bad[0]}] must be in [0, {blocks * block}), the slots of kv, not {where[bad[0]]}: "
            "pass block * b + offset of an allocated block."
        )
    shape = (where.size, kv_heads, dim)
    k_bits, k_stride = _rows("k", k, shape)
    v_bits, v_stride = _rows("v", v, shape)
    factors = scales_of(cache, scales)
    check_apart("kv", cache, slots=where, k=k_bits, v=v_bits)
    if factors is not None:
        check_apart("scales", factors, kv=cache, slots=where, k=k_bits, v=v_bits)
        _append_numbers(
            cache, writeable("scales", factors), frozen(where), k_bits, k_stride, v_bits, v_stride
        )  # fmt: skip
        return
    cells = cache.view(np.uint32 if cache.itemsize == 4 else np.uint16)
    _append(int(STORAGES[cache.dtype.type]), cells, frozen(where), k_bits, k_stride, v_bits, v_stride)


@work_of(append_kv)
def append_kv_work(kv_heads: int, head_dim: int, rows: int, kv_itemsize: int, itemsize: int = 4) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]); rows are read and stored once.

        flops = 0,  bytes = 2 K (itemsize D + kv_itemsize D + s) rows

    where s is 4 for int8, the size of a row's scale, and 0 for other caches.

    Examples
    --------
    >>> append_kv_work(kv_heads=8, head_dim=128, rows=2, kv_itemsize=2)
    (0, 24576)
    """
    return 0, 2 * kv_heads * (itemsize * head_dim + row_bytes(head_dim, kv_itemsize)) * rows


def row_bytes(head_dim: int, kv_itemsize: int) -> int:
    """Bytes of a row of K or V in the cache, including its scale in an int8 cache."""
    return head_dim * kv_itemsize + (4 if kv_itemsize == 1 else 0)


@reference_of(append_kv)
def append_kv_reference(kv: Operand, slots: Operand, k: Operand, v: Operand) -> NDArray[Any]:
    """Compute `append_kv` for fp32 or 16 bits in plain numpy, the oracle of its tests: -> a new cache.

    Examples
    --------
    >>> row = np.ones((1, 1, 1), np.float32)
    >>> append_kv_reference(np.zeros((1, 1, 2, 1, 1), np.uint16), np.array([0]), row, 2 * row).ravel()
    array([16256, 16384], dtype=uint16)
    """
    cache = host_array("kv", kv).copy()
    for half, operand in enumerate((k, v)):
        rows = host_array("kv row", operand)
        if cache.dtype == np.uint16:
            bits = np.ascontiguousarray(rows).view(np.uint32).astype(np.uint64)
            even = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            rows = np.where(np.isnan(rows), bits >> 16 | 0x40, even).astype(np.uint16)
        rows = rows.astype(cache.dtype)
        for slot, row in zip(host_array("slots", slots), rows, strict=True):
            cache[slot // cache.shape[3], :, half, slot % cache.shape[3]] = row
    return cache


@compiled()
def _copy(target: Any, source: Any, blocks: Any, counts: Any) -> None:
    """Copy the first counts[n] bytes of each row of block blocks[n] (P, R, S) to block n."""
    rows = source.shape[1]
    for n in range(blocks.size):
        for row in range(rows):
            into = target[n, row]
            of = source[blocks[n], row]
            for x in range(counts[n]):
                into[x] = of[x]


@operation
def copy_blocks(target: Operand, source: Operand, blocks: Operand, tokens: Operand) -> None:
    """Copy the first entries of blocks of a paged cache to another cache, one block behind the other.

        target[n, .., :tokens[n], :] = source[blocks[n], .., :tokens[n], :]

    One thread copies, with the GIL released. The other entries of the target stay as they are. A block may be copied
    several times.

    Parameters
    ----------
    target : (N, K, 2, b, D) fp32, fp16, torch.bfloat16, uint16 that holds bfloat16 bits, or int8, C-contiguous
        The cache that is written, of the source's dtype; of latents, as `mla_decode` reads them, (N, b, D). Scales
        (P, K, 2, b) of an int8 cache are copied as a cache with D = 1.
    source : (P, K, 2, b, D), or (P, b, D), C-contiguous
    blocks : (N,) int32, C-contiguous
        Blocks of the source, in 0 .. P - 1.
    tokens : (N,) int64, C-contiguous
        Entries to copy of each block, in 0 .. b.

    Raises
    ------
    TypeError
        If an operand is neither array nor tensor, or has another dtype.
    ValueError
        If shapes disagree, an operand is not contiguous or overlaps the target, or a block or a number of entries is
        out of range.

    Examples
    --------
    >>> source = np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2, 1)
    >>> target = np.zeros((1, 1, 2, 2, 1), np.float32)
    >>> copy_blocks(target, source, np.array([1], np.int32), np.array([1]))
    >>> target.ravel()
    array([4., 0., 6., 0.], dtype=float32)
    """
    latents = getattr(source, "ndim", 5) == 3
    axes = "b D" if latents else "K 2 b D"
    into = writeable("target", checked("target", target, f"N {axes}", *CACHED, np.int8))
    of = contiguous("source", checked("source", source, f"P {axes}", into.dtype))
    numbers = contiguous("blocks", checked("blocks", blocks, "N", np.int32))
    counts = contiguous("tokens", checked("tokens", tokens, "N", np.int64))
    size = len(of)
    block, dim = of.shape[-2:]
    if 0 in of.shape[1:] or not (latents or of.shape[2] == 2):
        raise ValueError(
            f"source must have shape (P, K, 2, b, D) with K, b and D >= 1, not {of.shape}: reshape the cache."
        )
    if into.shape != (numbers.size, *of.shape[1:]):
        raise ValueError(
            f"target must have shape {(numbers.size, *of.shape[1:])} of blocks and source, not "
            f"{into.shape}: allocate one block for each that is copied."
        )
    if counts.shape != numbers.shape:
        raise ValueError(f"tokens must have shape {numbers.shape} of blocks, not {counts.shape}: pass one per block.")
    for name, array, most in (("blocks", numbers, size - 1), ("tokens", counts, block)):
        bad = np.flatnonzero((array < 0) | (array > most))
        if bad.size:
            raise ValueError(
                f"{name}[{bad[0]}] must be in 0 .. {most} for a source of shape {of.shape}, not {array[bad[0]]}: pass "
                "blocks of source, and at most b entries of each."
            )
    check_apart("target", into, source=of, blocks=numbers, tokens=counts)
    rows = math.prod(of.shape[1:-2])
    entry = dim * of.itemsize
    _copy(
        into.view(np.uint8).reshape(numbers.size, rows, block * entry),
        frozen(of.view(np.uint8).reshape(size, rows, block * entry)),
        frozen(numbers),
        frozen(counts * entry),
    )


@work_of(copy_blocks)
def copy_blocks_work(kv_heads: int, head_dim: int, tokens: int, kv_itemsize: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]); every entry is read and stored once.

        flops = 0,  bytes = 4 K D kv_itemsize tokens

    where `tokens` is the number of entries of all blocks together.

    Examples
    --------
    >>> copy_blocks_work(kv_heads=8, head_dim=128, tokens=2, kv_itemsize=2)
    (0, 16384)
    """
    return 0, 4 * kv_heads * head_dim * kv_itemsize * tokens


@reference_of(copy_blocks)
def copy_blocks_reference(target: Operand, source: Operand, blocks: Operand, tokens: Operand) -> NDArray[Any]:
    """Compute `copy_blocks` in plain numpy, the oracle of its tests: -> a new cache.

    Examples
    --------
    >>> source = np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2, 1)
    >>> copy_blocks_reference(np.zeros_like(source[:1]), source, np.array([0]), np.array([2])).ravel()
    array([0., 1., 2., 3.], dtype=float32)
    """
    cache = host_array("target", target).copy()
    of = host_array("source", source)
    pairs = zip(host_array("blocks", blocks), host_array("tokens", tokens), strict=True)
    for n, (block, count) in enumerate(pairs):
        cache[n, ..., :count, :] = of[block, ..., :count, :]
    return cache
