"""The paged KV cache, and the copies of its blocks that `fetch(kv)` streams to the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from workbench.engine.devices.driver import Driver, Stream
from workbench.engine.devices.host import HostDriver
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.transfer import Copy, Transfer, bytes_of
from workbench.engine.loading.checkpoint import TORCH_DTYPES
from workbench.engine.loading.stored import host_memory
from workbench.engine.model.ops import EVERYTHING, Attention, RowLayout
from workbench.kernels import PagedDecode, append_kv, copy_blocks, decode_attention, gather_kv
from workbench.models import ModelConfig
from workbench.stages.ops import BUFFERS

Indices: TypeAlias = npt.NDArray[Any] | torch.Tensor
STEP_BYTES = 2e9
"""Bytes of keys and values that attention reads between two checks for a stop request: about half a second's."""


class Blocks(NamedTuple):
    """Blocks of one layer, and the kernel that holds them where Numba has one for them."""

    pool: torch.Tensor
    held: PagedDecode | None


class KVCache:
    """Blocks of keys and values, layer by layer: (P, K, 2, b, D); a block holds b keys of a head, then their values.

    Parameters
    ----------
    model : ModelConfig
    blocks, block_size : int
    dtype : str
        "fp32" or "bf16".
    driver : Driver, optional
        The device of the gpu lane; the host unless given.
    on_gpu : sequence of int
        The layers whose blocks are there.

    Attributes
    ----------
    pools : list of Tensor
    """

    def __init__(
        self,
        model: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: str,
        control: Control | None = None,
        *,
        driver: Driver | None = None,
        on_gpu: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._control = control or Control()
        self._driver = driver or HostDriver()
        self.block_size = block_size
        self.pools = self._allocate(self._shape(blocks), TORCH_DTYPES[dtype], set(on_gpu))
        self._blocks = [self.blocks_of(pool) for pool in self.pools]

    def _shape(self, blocks: int) -> tuple[int, ...]:
        """Shape of one layer's blocks."""
        return blocks, self._model.num_key_value_heads, 2, self.block_size, self._model.head_dim

    def held(self, layer: int) -> PagedDecode | None:
        """The kernel that holds a layer's blocks, where Numba has one for them."""
        return self._blocks[layer].held

    def blocks_of(self, pool: torch.Tensor) -> Blocks:
        """A layer's blocks for `append_to` and `attend_to`."""
        on_host = pool.device.type == "cpu"
        return Blocks(pool, PagedDecode(pool, self._model.num_attention_heads) if on_host else None)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, on_gpu: set[int]) -> list[torch.Tensor]:
        every = range(self._model.num_hidden_layers)
        there = {layer for layer in on_gpu if not self._driver.on_host}
        host = iter(host_memory((len(every) - len(there), *shape), dtype))
        pools = list[torch.Tensor]()
        for layer in every:
            self._control.check()
            pool = torch.empty(shape, dtype=dtype, device=self._driver.device) if layer in there else next(host)
            pools.append(pool.zero_())  # maps every page now, so that no lane pays for it
        return pools

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for rows of a type."""
        one = RowLayout.smallest()
        q, k, v = (torch.zeros(1, BUFFERS[name].width(self._model), dtype=dtype) for name in "qkv")
        self.append(0, one, k, v)
        self.attend(0, one, q, EVERYTHING)
        if (held := self._blocks[0].held) is not None:
            held.warm_up(q)

    def append(self, layer: int, layout: RowLayout, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the keys and values (T, K D) of new rows."""
        self.append_to(self._blocks[layer], layout, k, v)

    def attend(self, layer: int, layout: RowLayout, q: torch.Tensor, attention: Attention = EVERYTHING) -> torch.Tensor:
        """Decode attention of q (B, H D) over the cached entries of its sequences, on as many threads as torch uses."""
        return self.attend_to(self._blocks[layer], layout, q, attention)

    def before(self, layer: int, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (T, K D) of the tokens before each chunk of a part, chunk after chunk."""
        table = np.zeros((len(layout.before), 0), np.int32) if layout.chunks is None else layout.chunks.table
        return self.entries_of(self.pools[layer], table, layout.before)

    def append_to(self, blocks: Blocks, layout: RowLayout, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values (T, K D) of rows in the blocks of a layout, all on one device."""
        if not len(layout.slots):
            return
        if blocks.held is not None:
            blocks.held.append(layout.slots, k.contiguous(), v.contiguous())
            return
        slots = layout.on(blocks.pool.device).slots
        shape = (len(slots), self._model.num_key_value_heads, self._model.head_dim)
        append_kv(blocks.pool, slots, k.view(shape), v.view(shape))

    def attend_to(self, blocks: Blocks, layout: RowLayout, q: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Decode attention of q (B, H D) over blocks, where they are -> (B, H D).

        On the host it goes in steps between which the run can be stopped, on as many threads as torch uses.
        """
        pool = blocks.pool
        if pool.device.type != "cpu":
            there = layout.on(pool.device)
            return self._decode(blocks, there.table, there.lengths, q, attention)
        found = []
        for low, high in steps(layout.lengths, pool[0].nbytes / self.block_size):
            self._control.check()
            mine = slice(low, high)
            found.append(self._decode(blocks, layout.table[mine], layout.lengths[mine], q[mine], attention))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _decode(
        self, blocks: Blocks, table: Indices, lengths: Indices, q: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """The kernel of `attend_to`."""
        found: torch.Tensor
        if blocks.held is not None:
            found = blocks.held(q.contiguous(), table, lengths, **attention._asdict(), threads=torch.get_num_threads())
            return found
        queries = q.view(len(q), self._model.num_attention_heads, -1).to(blocks.pool.dtype)
        found = decode_attention(queries, blocks.pool, table, lengths, **attention._asdict())
        return found.flatten(1).to(q.dtype)

    def entries_of(
        self, pool: torch.Tensor, table: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (T, K D) of the first tokens (N,) of sequences with a table (N, W) of blocks."""
        k, v = gather_kv(pool, slots_of(table, tokens, self.block_size).to(pool.device))
        return k.flatten(1), v.flatten(1)

    def fetched_bytes(self, layout: RowLayout) -> int:
        """Bytes of the copies of all blocks that a part reads."""
        return int((-(-_read(layout)[0] // self.block_size)).sum()) * self.pools[0][0].nbytes

    def fetch(self, layer: int, layout: RowLayout) -> tuple[FetchedKV, Transfer]:
        """The blocks that a part reads, numbered anew in order, and the transfer that copies them there."""
        lengths, old_table = _read(layout)
        size = self.block_size
        places = np.arange(old_table.shape[1])
        used = places < -(-lengths // size)[:, None]
        width = used.sum(axis=1)
        table = np.where(used, (np.cumsum(width) - width)[:, None] + places, 0).astype(np.int32)
        filled = np.clip(lengths[:, None] - 1 - places * size, 0, size)
        pool = self.pools[layer]
        there = torch.zeros((int(width.sum()), *pool.shape[1:]), dtype=pool.dtype, device=self._driver.device)
        copy: Copy
        if self._driver.on_host:
            copy = BlockCopy(there, pool, old_table[used], filled[used])
        else:
            staged = self._driver.pinned("fetched KV", there.shape, there.dtype)
            gathered = BlockCopy(staged, pool, old_table[used], filled[used])
            copy = GatheredCopy(gathered, there)
        return FetchedKV(there, table, self), Transfer([copy])


@dataclass(frozen=True)
class BlockCopy:
    """Copy of the first `tokens` entries of some blocks (N,) of a layer's cache into a cache of these blocks alone."""

    target: torch.Tensor
    source: torch.Tensor
    blocks: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """See `Copy.nbytes`."""
        return int(self.tokens.sum()) * self._entry

    @property
    def _entry(self) -> int:
        """Bytes of one token's keys and values."""
        return self.source[0].nbytes // self.source.shape[-2]

    def pieces(self, size: int, stream: Stream) -> Iterator[int]:
        """See `Copy.pieces`."""
        blocks = max(1, size // self.source[0].nbytes)
        for low in range(0, len(self.blocks), blocks):
            some = slice(low, low + blocks)
            copy_blocks(self.target[some], self.source, self.blocks[some], self.tokens[some])
            yield int(self.tokens[some].sum()) * self._entry


@dataclass(frozen=True)
class GatheredCopy:
    """Copy of blocks to a card: gathered in pinned memory, and sent from there piece by piece.

    Whole blocks are sent; `nbytes` counts their filled part, as the plan does.
    """

    gathered: BlockCopy
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """See `Copy.nbytes`."""
        return self.gathered.nbytes

    def pieces(self, size: int, stream: Stream) -> Iterator[int]:
        """See `Copy.pieces`."""
        begin = 0
        step = max(1, size // self.target[0].nbytes) if len(self.target) else 1
        for moved in self.gathered.pieces(size, stream):
            some = slice(begin, begin + step)
            begin += step
            stream.copy(bytes_of(self.target[some]), bytes_of(self.gathered.target[some]))
            yield moved


class FetchedKV:
    """Blocks of one layer and part that were copied to where attention runs."""

    def __init__(self, pool: torch.Tensor, table: npt.NDArray[np.int32], cache: KVCache) -> None:
        self.pool = pool
        self._blocks = cache.blocks_of(pool)
        self._table = table
        self._cache = cache

    def before(self, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVCache.before`."""
        return self._cache.entries_of(self.pool, self._table[len(layout.lengths) :], layout.before[layout.before > 0])

    def attend(
        self, layout: RowLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Append the decodes' own k and v (B, K D) and attend."""
        size = self._cache.block_size
        last = layout.lengths - 1
        slots = self._table[np.arange(len(last)), last // size].astype(np.int64) * size + last % size
        own = layout.renumbered(self._table[: len(last)], slots)
        self._cache.append_to(self._blocks, own, k, v)
        return self._cache.attend_to(self._blocks, own, q, attention)


def _read(layout: RowLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Lengths and block tables of all that a part reads: of the decodes, then of the tokens before each chunk.

    A length is one more than the entries that are read: of a decode it counts its own entry, which is not in the cache.
    """
    chunks = layout.chunks
    if chunks is None or not chunks.start.any():
        return layout.lengths, layout.table
    some = chunks.start > 0
    width = max(layout.table.shape[1], chunks.table.shape[1])
    tables = [np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in (layout.table, chunks.table[some])]
    return np.concatenate((layout.lengths, chunks.start[some] + 1)), np.concatenate(tables)


def slots_of(table: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64], size: int) -> torch.Tensor:
    """Slots (T,) of the first tokens (N,) of sequences with a block table (N, W), in blocks of `size` tokens."""
    places = np.arange(table.shape[1] * size)
    slots = table[:, places // size].astype(np.int64) * size + places % size
    return torch.from_numpy(slots[places < tokens[:, None]])


def steps(lengths: npt.NDArray[np.int64], entry_bytes: float) -> list[tuple[int, int]]:
    """Ranges of sequences, none empty, each with at most about `STEP_BYTES` of keys and values."""
    total = np.cumsum(lengths)
    count = math.ceil(total[-1] * entry_bytes / STEP_BYTES)
    edges = np.searchsorted(total, total[-1] * np.arange(1, count) / count, side="right").tolist() if count > 1 else []
    return [(low, high) for low, high in pairwise([0, *edges, len(lengths)]) if low < high]
