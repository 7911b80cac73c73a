"""Paged KV memory: counts of free and held blocks, and the block table of every sequence."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from workbench.core.errors import CapacityError
from workbench.scheduler.batch import Ids

Lengths = TypeVar("Lengths", npt.NDArray[np.int64], npt.NDArray[np.float64])


def blocks_up_to(tokens: Lengths, block: Lengths | int) -> Lengths:
    """Sum of ceil(j / block) for j = 1 .. tokens: blocks that a sequence holds at each length, summed.

    Linear between whole numbers of tokens.
    """
    full = tokens // block
    held: Lengths = block * full * (full + 1) // 2 + (tokens - full * block) * (full + 1)
    return held


def block_iterations(prompt_len: Lengths, output_len: Lengths, block: Lengths | int) -> Lengths:
    """Blocks that each request holds, summed over its iterations: sum over i < g of ceil((p + i) / block)."""
    return blocks_up_to(prompt_len + output_len - 1, block) - blocks_up_to(prompt_len - 1, block)


class BlockCounts:
    """Counts of free KV blocks and of blocks that each sequence holds. Schedulers and the virtual clock need no more.

    Free + used = total after any call, errors included.

    Parameters
    ----------
    blocks : int
        Blocks in the cache.
    block_size : int
        Tokens per block.
    sequences : int
        Sequences that may hold blocks, numbered from 0.
    longest : int
        Most tokens that one sequence will hold.
    """

    def __init__(self, blocks: int, block_size: int, sequences: int, longest: int) -> None:
        self.total = self.free = blocks
        self.block_size = block_size
        self._most = -(-longest // block_size)
        self.held: Ids = np.zeros(sequences, dtype=np.int64)

    def grow(self, sequences: int) -> None:
        """Let so many further sequences hold blocks."""
        self.held = np.concatenate((self.held, np.zeros(sequences, dtype=np.int64)))

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return int(self.held.sum())

    def allocate(self, sequences: Ids, tokens: Ids) -> None:
        """Give each of these distinct, empty sequences the blocks for its first `tokens` tokens.

        Raises
        ------
        CapacityError
            If a sequence holds blocks already, would hold too many or too few are free; nothing is taken then.
        ValueError
            If there is not one length per sequence, or one is negative.
        """
        if sequences.shape != tokens.shape or tokens.min(initial=0) < 0:
            raise ValueError(f"allocate needs one length of at least 0 per sequence, not {tokens} for {sequences}.")
        counts = -(-tokens // self.block_size)
        wanted = int(counts.sum())
        if self.held[sequences].any() or wanted > self.free or counts.max(initial=0) > self._most:
            raise CapacityError(
                f"{len(sequences)} sequences ask for {wanted} blocks; {self.free} are free, a table has "
                f"{self._most} places and a sequence must hold none. Free some sequence first."
            )
        self.free -= wanted
        self.held[sequences] = counts

    def append(self, sequences: Ids) -> None:
        """Give each of these distinct sequences one more block.

        Raises
        ------
        CapacityError
            If too few blocks are free or a table is full; nothing is taken then.
        """
        count = len(sequences)
        if count > self.free or (count and self.held[sequences].max() >= self._most):
            raise CapacityError(
                f"{count} sequences ask for one block each; {self.free} are free. Preempt some sequence first."
            )
        self.free -= count
        self.held[sequences] += 1

    def release(self, sequences: Ids) -> None:
        """Take back every block of these distinct sequences."""
        self.free += int(self.held[sequences].sum())
        self.held[sequences] = 0

    def check(self) -> None:
        """Verify conservation: free and held blocks add up to the total.

        Raises
        ------
        CapacityError
            If a block was lost or allocated twice.
        """
        if self.free + self.used != self.total:
            raise self._not_conserved()

    def _not_conserved(self) -> CapacityError:
        return CapacityError(
            f"KV blocks are not conserved: {self.free} free and {self.used} held of {self.total}; this is a bug."
        )


class BlockManager(BlockCounts):
    """Allocates KV blocks and keeps a block table per sequence."""

    def __init__(self, blocks: int, block_size: int, sequences: int, longest: int) -> None:
        super().__init__(blocks, block_size, sequences, longest)
        self._stack = np.arange(blocks - 1, -1, -1, dtype=np.int32)  # the first `free` entries are the free blocks
        self.table: npt.NDArray[np.int32] = np.empty((sequences, self._most), dtype=np.int32)

    def grow(self, sequences: int) -> None:
        """See `BlockCounts.grow`."""
        super().grow(sequences)
        self.table = np.concatenate((self.table, np.empty((sequences, self._most), dtype=np.int32)))

    def allocate(self, sequences: Ids, tokens: Ids) -> None:
        """See `BlockCounts.allocate`."""
        super().allocate(sequences, tokens)
        places = self._places(sequences)
        self.table[places] = self._stack[self.free : self.free + len(places[0])]

    def append(self, sequences: Ids) -> None:
        """See `BlockCounts.append`."""
        super().append(sequences)
        self.table[sequences, self.held[sequences] - 1] = self._stack[self.free : self.free + len(sequences)]

    def release(self, sequences: Ids) -> None:
        """See `BlockCounts.release`."""
        returned = self.table[self._places(sequences)]
        self._stack[self.free : self.free + len(returned)] = returned
        super().release(sequences)

    def _places(self, sequences: Ids) -> tuple[Ids, Ids]:
        """Rows and columns of the table entries that these sequences hold."""
        counts = self.held[sequences]
        rows = sequences.repeat(counts)
        first = counts.cumsum() - counts
        return rows, np.arange(len(rows)) - first.repeat(counts)

    def check(self) -> None:
        """See `BlockCounts.check`; also verify that every block is free or held exactly once."""
        super().check()
        held = [self.table[s, : self.held[s]] for s in np.flatnonzero(self.held)]
        if len(np.unique(np.concatenate([self._stack[: self.free], *held]))) != self.total:
            raise self._not_conserved()
