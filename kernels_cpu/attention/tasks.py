"""The loop of one thread of a decode: it takes runs of tokens as tasks and computes them tile by tile."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import literally  # type: ignore[attr-defined]
from numpy.typing import NDArray

from ..arguments import STORAGES
from ..codegen.compiled import compiled
from ..codegen.numerics import LOG2_E, aligned_floats
from ..codegen.vector_ir import Storage
from ..machine.features import CodePath, has
from ..machine.parameters import parameters
from ..threads.pull import pull
from ..threads.runs import split
from ..threads.task_counts import next_task, task_done
from .addresses import address_rows, rows_and_order, rows_of_task
from .matrix_tasks import fits_matrices, matrix_decoder
from .partials import are_bf16, clear, conclude, pack, per_head
from .portable import INT8, cap_scores, read_scales, walk_tile
from .vectors import early, fetches_keys, lines_ahead, padded_heads, scores, softmax, tile_tokens, weighted

_COPIED = 64
"""Tokens per tile on the portable path, which copies them out of the cache."""

_SETTINGS = parameters().attention
_HEADS = _SETTINGS.heads


@compiled()
def _apply(scale: Any, count: int, padded: int, tile: Any) -> None:
    """Multiply each token's scores, or weights, by the token's scale."""
    for t in range(count):
        for x in range(t * padded, (t + 1) * padded):
            tile[x] *= scale[t]


@compiled()
def _scores(
    lanes: int, storage: int, dim: int, heads: int, padded: int, ahead: int, in_pairs: bool, scale: Any,
    q: int, rows: int, offset: int, count: int, tile: int, there: int, soon: int,
) -> None:  # fmt: skip
    """The scores of queries in fp32."""
    literally(lanes), literally(storage), literally(dim), literally(heads), literally(padded), literally(ahead)
    scores(lanes, storage, dim, heads, padded, ahead, False, scale, q, rows, offset, count, tile, there, soon)


@compiled()
def _scores_of_either(
    lanes: int, storage: int, dim: int, heads: int, padded: int, ahead: int, in_pairs: bool, scale: Any,
    q: int, rows: int, offset: int, count: int, tile: int, there: int, soon: int,
) -> None:  # fmt: skip
    """The scores of queries in pairs or in fp32."""
    literally(lanes), literally(storage), literally(dim), literally(heads), literally(padded), literally(ahead)
    if in_pairs:
        scores(lanes, storage, dim, heads, padded, ahead, True, scale, q, rows, offset, count, tile, there, soon)
    else:
        scores(lanes, storage, dim, heads, padded, ahead, False, scale, q, rows, offset, count, tile, there, soon)


@functools.cache
def decoder(lanes: int, storage: Storage, group: int, dim: int, value_dim: int, capped: bool, paired: bool) -> Any:
    """Compile the loop of one thread over tasks for a shape; `group` query heads share a KV head.

    Where `paired`, AVX512_BF16 multiplies the queries of sequences that are bf16 numbers by keys in bf16.
    """
    stored = int(storage)
    chunks = -(-group // _HEADS[lanes])
    size = -(-group // chunks)
    padded = padded_heads(size)
    rest = group - (chunks - 1) * size
    heads = size if chunks > 1 else 0  # no code for chunks that do not occur
    ahead = lines_ahead(group)
    scaled = storage is Storage.INT8
    tokens = tile_tokens(dim * storage.itemsize)
    score = _scores_of_either if paired else _scores
    keys_early = fetches_keys(padded, paired)
    early_at = 8 * (tokens - early(tokens, padded)) if keys_early else 0

    @compiled()
    def serve(
        counter: int, q: Any, geometry: Any, scale_geometry: Any, table: Any, tasks: Any, first: Any, left: Any,
        scale: Any, cap: Any, sinks: Any, partial_tops: Any, partial_totals: Any, partial_sums: Any, out: Any,
    ) -> None:  # fmt: skip
        head_bytes = geometry[4]
        value_bytes = geometry[5]
        kv_heads = geometry[6]
        all_heads = q.shape[1]
        registers = geometry[6] * chunks * lanes
        tile = aligned_floats(tokens * padded)
        top = aligned_floats(registers)
        total = aligned_floats(registers)
        packed = aligned_floats(all_heads * dim)
        sums = aligned_floats(all_heads * value_dim)
        top_of = np.empty(all_heads, np.float32)
        total_of = np.empty(all_heads, np.float32)
        rows = np.empty(2 * tokens, np.int64)
        coming = np.empty(2 * tokens, np.int64)
        places = np.empty(tokens, np.int64)
        key_scale = np.empty(tokens, np.float32)
        value_scale = np.empty(tokens, np.float32)
        index = next_task(counter)
        rows_of_task(table, tasks, index, geometry, rows)
        while index < len(tasks):
            following = next_task(counter)
            s = tasks[index, 0]
            token = tasks[index, 1]
            end = tasks[index, 2]
            place = tasks[index, 3]
            in_pairs = paired and are_bf16(q[s])
            pack(lanes, stored, dim, in_pairs, q[s], scale, packed)
            clear(top, total, sums)
            while token < end:
                count = min(tokens, end - token)
                if token + tokens < end:
                    rows_and_order(table[s], token + tokens, end, geometry, coming)
                else:
                    rows_of_task(table, tasks, following, geometry, coming)
                if scaled:
                    address_rows(table[s], token, end, scale_geometry, places)
                for h in range(kv_heads):
                    if scaled:
                        read_scales(places, h * scale_geometry[4], count, key_scale)
                        read_scales(places, h * scale_geometry[4] + scale_geometry[5], count, value_scale)
                    here = rows.ctypes.data
                    tile_at = tile.ctypes.data
                    offset = h * head_bytes
                    there = (rows if h + 1 < kv_heads else coming).ctypes.data + 8 * tokens
                    soon = offset + head_bytes if h + 1 < kv_heads else 0
                    for c in range(chunks):
                        head = h * group + c * size
                        register = 4 * lanes * (h * chunks + c)
                        q_at = packed.ctypes.data + 4 * dim * head
                        sums_at = sums.ctypes.data + 4 * value_dim * head
                        if c + 1 < chunks:
                            score(
                                lanes, stored, dim, heads, padded, 0, in_pairs, scale, q_at, here, offset, count,
                                tile_at, there, soon,
                            )  # fmt: skip
                        else:
                            score(
                                lanes, stored, dim, rest, padded, ahead, in_pairs, scale, q_at, here, offset, count,
                                tile_at, there, soon,
                            )  # fmt: skip
                        if scaled:
                            _apply(key_scale, count, padded, tile)
                        if capped:
                            cap_scores(tile, count * padded, cap)
                        for x in range(count * padded, tokens * padded):
                            tile[x] = -np.inf
                        top_at = top.ctypes.data + register
                        total_at = total.ctypes.data + register
                        value = offset + value_bytes
                        later = soon + value_bytes
                        early_there = there + early_at
                        early_offset = soon if keys_early else later
                        if c + 1 < chunks:
                            softmax(
                                lanes, stored, value_dim, heads, padded, 0, tokens, tile_at, top_at, total_at,
                                sums_at, early_there, early_offset,
                            )  # fmt: skip
                            if scaled:
                                _apply(value_scale, count, padded, tile)
                            weighted(
                                lanes, stored, value_dim, heads, padded, 0, tokens, paired, tile_at, here, value,
                                count, sums_at, there, later,
                            )  # fmt: skip
                        else:
                            softmax(
                                lanes, stored, value_dim, rest, padded, ahead, tokens, tile_at, top_at, total_at,
                                sums_at, early_there, early_offset,
                            )  # fmt: skip
                            if scaled:
                                _apply(value_scale, count, padded, tile)
                            weighted(
                                lanes, stored, value_dim, rest, padded, ahead, tokens, paired, tile_at, here, value,
                                count, sums_at, there, later,
                            )  # fmt: skip
                token += tokens
                rows, coming = coming, rows
            per_head(top, total, group, size, padded, lanes, top_of, total_of)
            conclude(
                lanes, stored, value_dim, s, place, top_of, total_of, sums, first, left,
                partial_tops, partial_totals, partial_sums, sinks, out,
            )  # fmt: skip
            index = following
            task_done(counter)

    return serve


@compiled()
def serve_portably(
    counter: int, q: Any, geometry: Any, scale_geometry: Any, table: Any, tasks: Any, first: Any, left: Any,
    scale: Any, cap: Any, sinks: Any, partial_tops: Any, partial_totals: Any, partial_sums: Any, out: Any,
) -> None:  # fmt: skip
    """The loop of `decoder` for any shape and CPU."""
    kv_heads = geometry[6]
    storage = geometry[7]
    heads = q.shape[1]
    dim = q.shape[2]
    value_dim = out.shape[2]
    group = heads // kv_heads
    packed = np.empty(heads * dim, np.float32)
    sums = np.empty(heads * value_dim, np.float32)
    top = np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    tile = np.empty((_COPIED, dim), np.uint32)
    scores_ = np.empty((group, _COPIED), np.float32)
    rows = np.empty(_COPIED, np.int64)
    places = np.empty(_COPIED, np.int64)
    row_scale = np.empty(_COPIED, np.float32)
    shape = (kv_heads, group)
    while True:
        index = next_task(counter)
        if index >= len(tasks):
            return
        s = tasks[index, 0]
        token = tasks[index, 1]
        end = tasks[index, 2]
        place = tasks[index, 3]
        pack(0, 0, 0, False, q[s], scale, packed)
        clear(top, total, sums)
        while token < end:
            address_rows(table[s], token, end, geometry, rows)
            if storage == INT8:
                address_rows(table[s], token, end, scale_geometry, places)
            walk_tile(
                storage, cap, rows, geometry, places, scale_geometry, min(_COPIED, end - token),
                packed.reshape((kv_heads, group, dim)), top.reshape(shape), total.reshape(shape),
                sums.reshape((kv_heads, group, value_dim)), tile, scores_, row_scale,
            )  # fmt: skip
            token += _COPIED
        conclude(
            0, 0, 0, s, place, top, total, sums, first, left, partial_tops, partial_totals, partial_sums, sinks, out
        )
        task_done(counter)


@dataclass(frozen=True)
class Cache:
    """Address and strides of a paged cache.

    Attributes
    ----------
    address : int
    storage : Storage
    block : int
        Tokens per block.
    block_bytes, row_bytes, head_bytes, value_bytes : int
        Strides of blocks, rows and KV heads, and the distance from a key to its value [byte].
    kv_heads : int
    scales : int
        Address of the scales (P, K, 2, b) of an INT8 cache.
    """

    address: int
    storage: Storage
    block: int
    block_bytes: int
    row_bytes: int
    head_bytes: int
    value_bytes: int
    kv_heads: int
    scales: int = 0

    @classmethod
    def of(cls, kv: NDArray[Any], scales: NDArray[np.float32] | None = None) -> Cache:
        """Of a cache kv (P, K, 2, b, D), with the scales of an int8 cache."""
        storage = STORAGES[kv.dtype.type]
        _, kv_heads, _, block, dim = kv.shape
        row = dim * storage.itemsize
        at_scales = 0 if scales is None else scales.ctypes.data
        return cls(
            kv.ctypes.data, storage, block, kv.strides[0], row, 2 * block * row, block * row, kv_heads, at_scales
        )

    @property
    def geometry(self) -> NDArray[np.int64]:
        """The fields in the order in which compiled code reads them; `geometry[i]` is used by index."""
        return np.array(
            [self.address, self.block, self.block_bytes, self.row_bytes, self.head_bytes, self.value_bytes,
             self.kv_heads, self.storage],
            np.int64,
        )  # fmt: skip

    @property
    def of_scales(self) -> Cache:
        """Address and strides of the scales, as a cache whose rows are one fp32."""
        half = 4 * self.block
        return Cache(self.scales, Storage.FP32, self.block, self.kv_heads * 2 * half, 4, 2 * half, half, self.kv_heads)


def server(path: CodePath, storage: Storage, group: int, dim: int, value_dim: int, capped: bool) -> Any:
    """The loop of one thread for a code path and a shape; `group` query heads share a KV head."""
    if fits_matrices(path, storage, group, dim, value_dim):
        return matrix_decoder(group, dim, value_dim, capped)
    lanes = even_lanes(path, dim, value_dim)
    if not lanes:
        return serve_portably
    paired = storage is Storage.BF16 and multiplies_pairs(lanes, group)
    return decoder(lanes, storage, group, dim, value_dim, capped, paired)


def multiplies_pairs(lanes: int, group: int) -> bool:
    """True if AVX512_BF16 is there and gains something with `group` query heads per KV head on this CPU."""
    least = _SETTINGS.pairs_from
    return lanes == CodePath.AVX512.value and 0 < least <= group and has("avx512bf16")


def decode(
    q: NDArray[np.float32],
    cache: Cache,
    table: NDArray[np.int32],
    lengths: NDArray[np.int64],
    out: NDArray[np.float32],
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: NDArray[np.float32] | None,
    threads: int,
    path: CodePath,
) -> None:
    """Compute attention of q (B, H, D) over checked operands into out (B, H, D of V)."""
    begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    tasks, first = split(begins, lengths)
    (heads, dim) = q.shape[1:]
    value_dim = out.shape[2]
    several = len(tasks) if len(tasks) > len(lengths) else 0
    arguments = (
        q, cache.geometry, cache.of_scales.geometry, table, tasks, first, np.diff(first),
        np.float32(scale * LOG2_E), np.float32(cap or 0),
        np.empty(0, np.float32) if sinks is None else sinks * np.float32(LOG2_E),
        np.empty((several, heads), np.float32), np.empty((several, heads), np.float32),
        np.empty((several, heads * value_dim), np.float32), out,
    )  # fmt: skip
    serve = server(path, cache.storage, heads // cache.kv_heads, dim, value_dim, cap is not None)
    pull(serve, arguments, min(threads, len(tasks)))


def even_lanes(path: CodePath, *dims: int) -> int:
    """Lanes of the path's widest registers that divide rows of these lengths, or 0."""
    for lanes in (16, 8):
        if lanes <= path.value and all(dim % lanes == 0 for dim in dims):
            return lanes
    return 0
