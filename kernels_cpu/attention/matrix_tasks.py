"""The loop of one thread of a decode with matrix registers: as `tasks.decoder`, with tiles of 32 tokens."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..codegen.compiled import compiled
from ..codegen.matrix_ir import ROWS, TERMS, release
from ..codegen.numerics import aligned_floats
from ..codegen.vector_ir import Storage
from ..machine.features import CodePath, has_matrices
from ..threads.task_counts import next_task, task_done
from .addresses import rows_and_order, rows_of_task
from .matrices import STEP, VALUES_FIRST, copy_keys, copy_values, query_terms, scores, start, weight_terms, weighted
from .partials import clear, conclude, per_head
from .portable import cap_scores
from .vectors import padded_heads, softmax

TOKENS = 128
"""Tokens that a KV head computes before the next head does; its queries and sums stay in L1 meanwhile."""


def fits_matrices(path: CodePath, storage: Storage, group: int, dim: int, value_dim: int) -> bool:
    """True if this computer's matrix registers can compute a shape, and do so faster than vectors.

    Fractions of the sequential read rate on one core of a Xeon, with vectors and with matrices:

                 4 heads         6 heads         7 heads         8 heads         12 heads        16 heads
        D  64    0.92  0.85      0.81  0.86      0.77  0.86      0.73  0.86      0.46  0.81      0.41  0.77
        D  96       -            0.86  0.87      0.82  0.87      0.80  0.86      0.48  0.82      0.44  0.79
        D 128    0.95  0.91      0.88  0.89      0.84  0.88      0.81  0.88      0.51  0.81      0.46  0.78
        D 192    0.90  0.87      0.87  0.84         -            0.80  0.83      0.52  0.75      0.46  0.71
        D 256       -            0.88  0.80         -            0.80  0.79      0.52  0.71      0.47  0.64

    Latent attention with 128 heads: 134 and 276 GFLOP/s.
    """
    if path is not CodePath.AVX512 or storage is not Storage.BF16 or dim % STEP or value_dim % STEP:
        return False
    least = 6 if dim <= 128 else 8 if dim < 256 else 9
    return group >= least and group % -(-group // ROWS) == 0 and has_matrices()


@functools.cache
def matrix_decoder(group: int, dim: int, value_dim: int, capped: bool) -> Any:
    """Compile the loop of one thread over tasks for a shape; `group` query heads share a KV head.

    The heads of a group are computed in equal chunks. Several chunks read the copied keys and values again. With one
    chunk the values are copied over the keys, so that all operands stay in L1: 1.05 to 1.25 times as fast at D 128 with
    8 and 16 heads.
    """
    chunks = -(-group // ROWS)
    heads = group // chunks
    padded = padded_heads(heads)
    stored = int(Storage.BF16)
    words = dim // STEP * TERMS * ROWS * padded

    @compiled()
    def serve(
        counter: int, q: Any, geometry: Any, scale_geometry: Any, table: Any, tasks: Any, first: Any, left: Any,
        scale: Any, cap: Any, sinks: Any, partial_tops: Any, partial_totals: Any, partial_sums: Any, out: Any,
    ) -> None:  # fmt: skip
        head_bytes = geometry[4]
        value_bytes = geometry[5]
        kv_heads = geometry[6]
        all_heads = q.shape[1]
        all_chunks = geometry[6] * chunks
        top = aligned_floats(all_chunks * ROWS)
        total = aligned_floats(all_chunks * ROWS)
        queries = aligned_floats(all_chunks * words)
        sums = aligned_floats(all_heads * value_dim)
        tile = aligned_floats(STEP * padded)
        weights = aligned_floats(TERMS * heads * ROWS)
        keys = aligned_floats(ROWS * max(dim, value_dim))
        values = keys if chunks == 1 else aligned_floats(ROWS * value_dim)
        top_of = np.empty(all_heads, np.float32)
        total_of = np.empty(all_heads, np.float32)
        rows = np.empty(2 * TOKENS, np.int64)
        coming = np.empty(2 * TOKENS, np.int64)
        start(heads)
        index = next_task(counter)
        rows_of_task(table, tasks, index, geometry, rows)
        while index < len(tasks):
            following = next_task(counter)
            s = tasks[index, 0]
            token = tasks[index, 1]
            end = tasks[index, 2]
            place = tasks[index, 3]
            for c in range(all_chunks):
                query_terms(
                    dim, heads, scale, q[s].ctypes.data + 4 * dim * heads * c, queries.ctypes.data + 4 * words * c
                )
            clear(top, total, sums)
            while token < end:
                count = min(TOKENS, end - token)
                if token + TOKENS < end:
                    rows_and_order(table[s], token + TOKENS, end, geometry, coming)
                else:
                    rows_of_task(table, tasks, following, geometry, coming)
                for h in range(kv_heads):
                    offset = h * head_bytes
                    soon = offset + head_bytes if h + 1 < kv_heads else 0
                    value = offset + value_bytes
                    later = soon + value_bytes
                    for done in range(0, count, STEP):
                        here = rows.ctypes.data + 8 * done
                        there = (rows if h + 1 < kv_heads else coming).ctypes.data + 8 * (TOKENS + done)
                        live = min(STEP, count - done) * padded
                        # Addresses are taken here: Numba frees an array after its last use and ignores its address.
                        keys_at = keys.ctypes.data
                        values_at = values.ctypes.data
                        tile_at = tile.ctypes.data
                        weights_at = weights.ctypes.data
                        copy_keys(dim, here, offset, keys_at, there, soon)
                        for c in range(h * chunks, (h + 1) * chunks):
                            sums_at = sums.ctypes.data + 4 * value_dim * heads * c
                            scores(dim, heads, keys_at, queries.ctypes.data + 4 * words * c, tile_at, there, soon)
                            if c == h * chunks:
                                copy_values(value_dim, heads, here, value, values_at, there, later)
                            if capped:
                                cap_scores(tile, live, cap)
                            for x in range(live, STEP * padded):
                                tile[x] = -np.inf
                            top_at = top.ctypes.data + 64 * c
                            total_at = total.ctypes.data + 64 * c
                            softmax(
                                ROWS, stored, value_dim, heads, padded, 1, STEP, tile_at, top_at, total_at, sums_at,
                                there + 8 * VALUES_FIRST, later,
                            )  # fmt: skip
                            weight_terms(dim, heads, tile_at, weights_at, there, soon)
                            weighted(value_dim, heads, weights_at, values_at, sums_at, there, soon, later)
                token += TOKENS
                rows, coming = coming, rows
            per_head(top, total, group, heads, padded, ROWS, top_of, total_of)
            conclude(
                ROWS, stored, value_dim, s, place, top_of, total_of, sums, first, left,
                partial_tops, partial_totals, partial_sums, sinks, out,
            )  # fmt: skip
            index = following
            task_done(counter)
        release()

    return serve
