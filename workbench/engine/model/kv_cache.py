"""The paged KV cache where decode attention reads it, and the copy of a part of it that `fetch(kv)` streams."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from workbench.engine.lanes.affinity import pin_elsewhere
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.lanes import Copy, Transfer
from workbench.engine.model.checkpoint import TORCH_DTYPES
from workbench.engine.model.ops import Part
from workbench.engine.model.weights import as_numpy, host_memory
from workbench.hardware import usable_cores
from workbench.kernels import append_kv, decode_attention
from workbench.models import ModelConfig

STEP_BYTES = 2e9
"""Keys and values that attention reads before it looks whether its run was stopped: in about half a second."""


class KVCache:
    """Blocks of keys and values: pool (L, P, K, 2, b, D), keys beside values within a block.

    Parameters
    ----------
    model : ModelConfig
    blocks, block_size : int
    dtype : str
        "fp32" or "bf16".
    """

    def __init__(
        self, model: ModelConfig, blocks: int, block_size: int, dtype: str, control: Control | None = None
    ) -> None:
        shape = (model.num_hidden_layers, blocks, model.num_key_value_heads, 2, block_size, model.head_dim)
        self.pool = host_memory(shape, TORCH_DTYPES[dtype])
        self._model = model
        self._control = control or Control()
        for layer in self.pool:
            self._control.check()
            layer.zero_()  # touches every page, so that no lane pays for mapping them
        self._team = ThreadPoolExecutor(max(1, usable_cores() - 1), "attention", initializer=pin_elsewhere)

    def close(self) -> None:
        """End the threads among which attention is shared out."""
        self._team.shutdown()

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.pool.shape[4]

    def append(self, layer: int, slots: npt.NDArray[np.int64], k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the keys and values (T, K D) of new rows."""
        _append(self.pool[layer], self._model, slots, k, v)

    def attend(self, layer: int, part: Part, q: torch.Tensor) -> torch.Tensor:
        """Decode attention of q (B, H D) over the cached entries of its sequences, on as many threads as torch has."""
        return _attend(self.pool[layer], self._model, part, q, self._team, self._control)

    def before(self, layer: int, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (T, K D) that earlier pieces of a part's prompts wrote, prompt after prompt."""
        tables = part.pieces.table if part.pieces is not None else ()
        return _entries(self.pool[layer], zip(tables, part.before.tolist(), strict=True))

    def fetched_bytes(self, part: Part) -> int:
        """Bytes of the blocks that a part reads, where they are copied to."""
        return int((-(-_read(part)[0] // self.block_size)).sum()) * self.pool[0, 0].nbytes

    def fetch(self, layer: int, part: Part) -> tuple[FetchedKV, Transfer]:
        """The cached entries that a part reads, to be copied beside it; blocks are renumbered in order."""
        lengths, old_table = _read(part)
        size = self.block_size
        places = np.arange(old_table.shape[1])
        width = -(-lengths // size)
        used = places < width[:, None]
        table = np.where(used, (np.cumsum(width) - width)[:, None] + places, 0).astype(np.int32)
        filled = np.clip(lengths[:, None] - 1 - places * size, 0, size)
        there = torch.zeros((int(width.sum()), *self.pool.shape[2:]), dtype=self.pool.dtype)
        copies: list[Copy] = []
        for new, old, tokens in zip(*(column[used].tolist() for column in (table, old_table, filled)), strict=True):
            copies += self._block(there[new], self.pool[layer, old], tokens)
        return FetchedKV(there, table, self._model, self._team, self._control), Transfer(copies)

    def _block(self, target: torch.Tensor, source: torch.Tensor, tokens: int) -> list[Copy]:
        """Copies of the first tokens of a block (K, 2, b, D): one piece if it is full, else one per head."""
        if tokens == self.block_size:
            return [(as_numpy(target), as_numpy(source))]
        pieces = zip(target.flatten(0, 1), source.flatten(0, 1), strict=True)
        return [(as_numpy(to[:tokens]), as_numpy(of[:tokens])) for to, of in pieces if tokens]


class FetchedKV:
    """Blocks of one layer and part that were copied to where attention runs."""

    def __init__(
        self,
        pool: torch.Tensor,
        table: npt.NDArray[np.int32],
        model: ModelConfig,
        team: ThreadPoolExecutor,
        control: Control,
    ) -> None:
        self.pool = pool
        self._table = table
        self._model = model
        self._team = team
        self._control = control

    def before(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """As `KVCache.before`."""
        lengths = part.before[part.before > 0].tolist()
        return _entries(self.pool, zip(self._table[len(part.lengths) :], lengths, strict=True))

    def attend(self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append the decodes' own k and v (B, K D) and attend."""
        size = self.pool.shape[3]
        last = part.lengths - 1
        slots = self._table[np.arange(len(last)), last // size].astype(np.int64) * size + last % size
        _append(self.pool, self._model, slots, k, v)
        return _attend(self.pool, self._model, replace(part, table=self._table), q, self._team, self._control)


def _read(part: Part) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Lengths, one more than what is read, and tables of the decodes and after them of the prefills' earlier pieces."""
    pieces = part.pieces
    if pieces is None or not pieces.start.any():
        return part.lengths, part.table
    some = pieces.start > 0
    width = max(part.table.shape[1], pieces.table.shape[1])
    tables = (np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in (part.table, pieces.table[some]))
    return np.concatenate((part.lengths, pieces.start[some] + 1)), np.concatenate(tuple(tables))


def _entries(
    pool: torch.Tensor, sequences: Iterable[tuple[npt.NDArray[np.int32], int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first entries of sequences, gathered from their blocks (P, K, 2, b, D)."""
    found = []
    for table, tokens in sequences:
        blocks = pool[torch.from_numpy(table[: -(-tokens // pool.shape[3])].astype(np.int64))]
        found.append(blocks.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :tokens])
    k, v = torch.cat(found, dim=1).flatten(2)
    return k, v


def _append(
    pool: torch.Tensor, model: ModelConfig, slots: npt.NDArray[np.int64], k: torch.Tensor, v: torch.Tensor
) -> None:
    shape = (len(slots), model.num_key_value_heads, model.head_dim)
    append_kv(pool, slots, k.float().view(shape), v.float().view(shape))


def _attend(
    pool: torch.Tensor, model: ModelConfig, part: Part, q: torch.Tensor, team: ThreadPoolExecutor, control: Control
) -> torch.Tensor:
    """Share the sequences out over the team and this thread, each with about as many KV entries as the others."""
    steps = math.ceil(part.lengths.sum() * pool[0].nbytes / pool.shape[3] / STEP_BYTES)
    queries = q.float().view(len(q), model.num_attention_heads, model.head_dim)
    out = torch.empty_like(queries)

    def attend(low: int, high: int) -> None:
        mine = slice(low, high)
        decode_attention(queries[mine], pool, part.table[mine], part.lengths[mine], threads=1, out=out[mine])

    for first, last in _shares(part.lengths, steps):
        control.check()
        shares = _shares(part.lengths[first:last], torch.get_num_threads())
        (own, *rest) = [(first + low, first + high) for low, high in shares]
        others = [team.submit(attend, *share) for share in rest]
        try:
            attend(*own)
        finally:
            wait(others)
        for other in others:
            other.result()
    return out.view(len(q), -1).to(q.dtype)


def _shares(lengths: npt.NDArray[np.int64], count: int) -> list[tuple[int, int]]:
    """At most so many runs of sequences, each with about as many KV entries as the others; none is empty."""
    total = np.cumsum(lengths)
    edges = np.searchsorted(total, total[-1] * np.arange(1, count) / count, side="right").tolist()
    return [(low, high) for low, high in pairwise([0, *edges, len(lengths)]) if low < high]
