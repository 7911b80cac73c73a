"""Baselines of decode attention that a user could write without these kernels: plain loops in Numba, and torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kernels_cpu.threads.team import side_by_side
from workbench.bench.cpu.work import Implementation

Gathered = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V (K, S, D) of each sequence, contiguous in memory as torch needs them."""


def gathered(kv: npt.NDArray[np.uint16], table: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> Gathered:
    """Copy the sequences' KV out of their blocks; the copies do not count in torch's time."""
    rows = []
    for blocks, length in zip(table, lengths.tolist(), strict=True):
        own = kv[blocks[: -(-length // kv.shape[3])]].transpose(2, 1, 0, 3, 4)
        both = torch.from_numpy(own.reshape(2, kv.shape[1], -1, kv.shape[4])).view(torch.bfloat16)
        rows.append((both[0, :, :length].contiguous(), both[1, :, :length].contiguous()))
    return rows


def eager(q: npt.NDArray[np.float32], rows: Gathered, out: npt.NDArray[np.float32]) -> Implementation:
    """Attention by torch in bf16: scores, softmax and weighted sum, sequence by sequence."""

    def compute(threads: int) -> None:
        torch.set_num_threads(threads)
        for row, (k, v) in enumerate(rows):
            heads = torch.from_numpy(q[row]).bfloat16().view(len(k), -1, q.shape[2])
            values = torch.softmax(heads @ k.transpose(1, 2) * q.shape[2] ** -0.5, dim=-1) @ v
            out[row] = values.float().reshape(q.shape[1:]).numpy()

    return compute


def naive(
    q: npt.NDArray[np.float32],
    kv: npt.NDArray[np.uint16],
    table: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    out: npt.NDArray[np.float32],
) -> Implementation:
    """Attention by Numba's loops over heads and tokens, written as the definition; only the compiler vectorises."""

    def compute(threads: int) -> None:
        starts = iter(range(threads))
        side_by_side(lambda: _naive(q, kv, table, lengths, next(starts), threads, out), threads)

    return compute


@njit(nogil=True, fastmath=True, cache=True)
def _naive(q, kv, table, lengths, begin, step, out):  # type: ignore[no-untyped-def]
    heads = q.shape[1]
    dim = q.shape[2]
    group = heads // kv.shape[1]
    block = kv.shape[3]
    scale = np.float32(1 / math.sqrt(dim))
    total = np.empty(dim, np.float32)
    for row in range(begin, len(lengths) * heads, step):
        s = row // heads
        h = row % heads
        total[:] = 0
        top = np.float32(-1e30)
        weights = np.float32(0)
        for t in range(lengths[s]):
            k = kv[table[s, t // block], h // group, 0, t % block]
            v = kv[table[s, t // block], h // group, 1, t % block]
            score = np.float32(0)
            for d in range(dim):
                score += q[s, h, d] * np.uint32(np.uint32(k[d]) << np.uint32(16)).view(np.float32)
            score *= scale
            if score > top:
                shrink = np.float32(math.exp(top - score))
                top = score
                weights = weights * shrink
                for d in range(dim):
                    total[d] *= shrink
            weight = np.float32(math.exp(score - top))
            weights += weight
            for d in range(dim):
                total[d] += weight * np.uint32(np.uint32(v[d]) << np.uint32(16)).view(np.float32)
        for d in range(dim):
            out[s, h, d] = total[d] / weights
