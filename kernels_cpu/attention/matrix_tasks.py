"""One thread's share of a decode with matrix registers: as `tasks.decoder`, 32 tokens at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..codegen.compiled import compiled
from ..codegen.matrix_ir import PARTS, ROWS, release
from ..codegen.numerics import aligned_floats
from ..codegen.vector_ir import Kind
from ..machine.features import CodePath, has_matrices
from ..threads.task_counts import next_task, task_done
from .addresses import rows_and_order, rows_of_task
from .matrices import STEP, VALUES_FIRST, cut_queries, cut_weights, scores, start, take_keys, take_values, weighted
from .parts import clear, conclude, per_head
from .portable import cap_scores
from .vectors import slots, softmax

TOKENS = 128
"""Tokens of a KV head before the next head's: its queries and sums stay in L1 meanwhile."""


def fits_matrices(path: CodePath, kind: Kind, group: int, dim: int, value_dim: int) -> bool:
    """True if this computer's matrix registers can compute a shape, and faster than vectors.

    Shares of sequential reading on one core of a Xeon, vectors and matrices:

                 4 heads         6 heads         7 heads         8 heads         12 heads        16 heads
        D  64    0.92  0.85      0.81  0.86      0.77  0.86      0.73  0.86      0.46  0.81      0.41  0.77
        D  96       -            0.86  0.87      0.82  0.87      0.80  0.86      0.48  0.82      0.44  0.79
        D 128    0.95  0.91      0.88  0.89      0.84  0.88      0.81  0.88      0.51  0.81      0.46  0.78
        D 192    0.90  0.87      0.87  0.84         -            0.80  0.83      0.52  0.75      0.46  0.71
        D 256       -            0.88  0.80         -            0.80  0.79      0.52  0.71      0.47  0.64

    and 134 and 276 GFLOP/s of latent attention with 128 heads.
    """
    if path is not CodePath.AVX512 or kind is not Kind.BF16 or dim % STEP or value_dim % STEP:
        return False
    least = 6 if dim <= 128 else 8 if dim < 256 else 9
    return group >= least and group % -(-group // ROWS) == 0 and has_matrices()


@functools.cache
def matrix_decoder(group: int, dim: int, value_dim: int, capped: bool) -> Any:
    """The loop of one thread over tasks, compiled for a shape; `group` query heads share a KV head.

    They are computed in equal chunks. What several chunks read again is kept; with one chunk the values of a tile take
    the place of its keys: 1.05 to 1.25 times as fast at D 128 with 8 and 16 heads, because all stays in L1.
    """
    chunks = -(-group // ROWS)
    heads = group // chunks
    room = slots(heads)
    form = int(Kind.BF16)
    words = dim // STEP * PARTS * ROWS * room

    @compiled()
    def serve(
        counter: int, q: Any, geometry: Any, scale_geometry: Any, table: Any, tasks: Any, first: Any, left: Any,
        scale: Any, cap: Any, sinks: Any, tops: Any, totals: Any, parts: Any, out: Any,
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
        tile = aligned_floats(STEP * room)
        weights = aligned_floats(PARTS * heads * ROWS)
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
                cut_queries(
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
                        live = min(STEP, count - done) * room
                        # Numba frees an array after its last use, and does not know of its address: so here, not above.
                        keys_at = keys.ctypes.data
                        values_at = values.ctypes.data
                        tile_at = tile.ctypes.data
                        weights_at = weights.ctypes.data
                        take_keys(dim, here, offset, keys_at, there, soon)
                        for c in range(h * chunks, (h + 1) * chunks):
                            sums_at = sums.ctypes.data + 4 * value_dim * heads * c
                            scores(dim, heads, keys_at, queries.ctypes.data + 4 * words * c, tile_at, there, soon)
                            if c == h * chunks:
                                take_values(value_dim, heads, here, value, values_at, there, later)
                            if capped:
                                cap_scores(tile, live, cap)
                            for x in range(live, STEP * room):
                                tile[x] = -np.inf
                            top_at = top.ctypes.data + 64 * c
                            total_at = total.ctypes.data + 64 * c
                            softmax(
                                ROWS, form, value_dim, heads, room, 1, STEP, tile_at, top_at, total_at, sums_at,
                                there + 8 * VALUES_FIRST, later,
                            )  # fmt: skip
                            cut_weights(dim, heads, tile_at, weights_at, there, soon)
                            weighted(value_dim, heads, weights_at, values_at, sums_at, there, soon, later)
                token += TOKENS
                rows, coming = coming, rows
            per_head(top, total, group, heads, room, ROWS, top_of, total_of)
            conclude(
                ROWS, form, value_dim, s, place, top_of, total_of, sums, first, left, tops, totals, parts, sinks, out
            )
            index = following
            task_done(counter)
        release()

    return serve
