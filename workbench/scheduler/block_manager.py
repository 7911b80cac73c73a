"""Paged KV memory: which blocks are free, and which block holds which tokens of which sequence."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from workbench.errors import CapacityError
from workbench.scheduler.batch import Ids

Lengths = TypeVar("Lengths", npt.NDArray[np.int64], npt.NDArray[np.float64])


def blocks_up_to(tokens: Lengths, block: Lengths | int) -> Lengths:
    """Sum of ceil(j / block) for j = 1 .. tokens: blocks held by a sequence that grows so far, once per length.

    Linear between whole numbers of tokens.
    """
    full = tokens // block
    held: Lengths = block * full * (full + 1) // 2 + (tokens - full * block) * (full + 1)
    return held


def block_iterations(prompt_len: Lengths, output_len: Lengths, block: Lengths | int) -> Lengths:
    """Blocks that each request holds, summed over its iterations: sum over i < g of ceil((p + i) / block)."""
    return blocks_up_to(prompt_len + output_len - 1, block) - blocks_up_to(prompt_len - 1, block)


class BlockManager:
    """Hands out KV blocks and keeps a block table per sequence. Free + used = total after any call, errors included.

    Parameters
    ----------
    blocks : int
        Blocks in the cache.
    block_size : int
        Tokens per block.
    sequences : int
        Sequences that may ever ask, numbered from 0.
    longest : int
        Most tokens that one sequence will hold.
    """

    def __init__(self, blocks: int, block_size: int, sequences: int, longest: int) -> None:
        self.total, self.block_size = blocks, block_size
        self._free = np.arange(blocks - 1, -1, -1, dtype=np.int32)
        self._top = blocks
        self.held: Ids = np.zeros(sequences, dtype=np.int64)
        self.table: npt.NDArray[np.int32] = np.empty((sequences, -(-longest // block_size)), dtype=np.int32)

    @property
    def free(self) -> int:
        """Free blocks."""
        return self._top

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return int(self.held.sum())

    def allocate(self, sequences: Ids, tokens: Ids) -> None:
        """Give each of these distinct, empty sequences the blocks for its first `tokens` tokens.

        Raises
        ------
        CapacityError
            If a sequence holds blocks already, a table is too short or too few are free; nothing is taken then.
        ValueError
            If there is not one length per sequence, or one is negative.
        """
        if sequences.shape != tokens.shape or tokens.min(initial=0) < 0:
            raise ValueError(f"allocate needs one length of at least 0 per sequence, not {tokens} for {sequences}.")
        counts = -(-tokens // self.block_size)
        wanted = int(counts.sum())
        if self.held[sequences].any() or wanted > self._top or counts.max(initial=0) > self.table.shape[1]:
            raise CapacityError(
                f"{len(sequences)} sequences ask for {wanted} blocks; {self._top} are free, a table has "
                f"{self.table.shape[1]} places and a sequence must hold none. Free some sequence first."
            )
        self._top -= wanted
        self.table[self._places(sequences, counts)] = self._free[self._top : self._top + wanted]
        self.held[sequences] = counts

    def append(self, sequences: Ids) -> None:
        """Give each of these distinct sequences one more block.

        Raises
        ------
        CapacityError
            If too few blocks are free or a table is full; nothing is taken then.
        """
        count = len(sequences)
        places = self.held[sequences]
        if count > self._top or (count and places.max() >= self.table.shape[1]):
            raise CapacityError(
                f"{count} sequences ask for one block each; {self._top} are free. Preempt some sequence first."
            )
        self._top -= count
        self.table[sequences, places] = self._free[self._top : self._top + count]
        self.held[sequences] = places + 1

    def release(self, sequences: Ids) -> None:
        """Take back every block of these distinct sequences."""
        returned = self.table[self._places(sequences, self.held[sequences])]
        self._free[self._top : self._top + len(returned)] = returned
        self._top += len(returned)
        self.held[sequences] = 0

    @staticmethod
    def _places(sequences: Ids, counts: Ids) -> tuple[Ids, Ids]:
        """Rows and columns of the first `counts` table places of each sequence."""
        rows, first = sequences.repeat(counts), counts.cumsum() - counts
        return rows, np.arange(len(rows)) - first.repeat(counts)

    def check(self) -> None:
        """Verify conservation: every block is free or held, exactly once.

        Raises
        ------
        CapacityError
            If a block was lost or handed out twice.
        """
        held = [self.table[s, : self.held[s]] for s in np.flatnonzero(self.held)]
        everything = np.concatenate([self._free[: self._top], *held])
        if len(everything) != self.total or len(np.unique(everything)) != self.total:
            raise CapacityError(
                f"KV blocks are not conserved: {self._top} free and {self.used} held of {self.total}; this is a bug."
            )
