"""MoE-Lens' resource-aware scheduler, greedy: as many prefill tokens beside the decodes as GPU and KV memory carry."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from workbench.errors import CapacityError
from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.scheduler.block_manager import BlockManager
from workbench.workload import Workload


@dataclass(frozen=True)
class ResourceAware:
    """Overlap prefill and decode, admit greedily, preempt the newest by recomputation.

    In every iteration all running sequences decode. If their next tokens need more blocks than are free, the newest
    sequences lose theirs and wait, oldest victim first, ahead of all new requests; nothing is admitted then.
    Otherwise whole prompts are admitted in order while they fit the rest of the token budget and the free blocks.

    Parameters
    ----------
    token_budget : float, optional
        Tokens per iteration; by default what the GPU computes while one pass of weights streams.

    Notes
    -----
    MoE-Lens, section 6.2. No prompt is split. The check of free blocks at admission is ours.
    """

    token_budget: float | None = None

    def __post_init__(self) -> None:
        if self.token_budget is not None and self.token_budget < 1:
            raise CapacityError(f"token_budget must be at least 1 token per iteration, not {self.token_budget}.")

    def open(self, workload: Workload, blocks: BlockManager, token_budget: float, layers: int) -> ResourceAwareQueue:
        """Start serving `workload`; see `Scheduler.open`."""
        return ResourceAwareQueue(workload, blocks, self.token_budget or token_budget, layers)


class ResourceAwareQueue:
    """Running, preempted and new requests of one served workload."""

    def __init__(self, workload: Workload, blocks: BlockManager, token_budget: float, layers: int) -> None:
        self.preemptions = self.recomputed = 0
        self._blocks, self._budget, self._layers = blocks, token_budget, layers
        self._prompt, self._output = workload.prompt_len.tolist(), workload.output_len
        self._new, self._preempted = 0, deque[int]()
        self._emitted: Ids = np.zeros(len(workload), dtype=np.int64)
        self._finished = 0
        # The running sequences in the order of admission, and what each still needs to know, side by side.
        self._running, self._context, self._left = NONE, NONE, NONE

    def next(self) -> Batch | None:
        """See `Queue.next`."""
        preempted = self._make_room()
        decodes, context = self._running, self._context
        self._blocks.append(decodes[context % self._blocks.block_size == 0])
        self._context = context + 1
        admitted = [] if preempted else self._admit(self._budget - len(decodes), nothing_runs=not len(decodes))
        if not (len(decodes) or admitted):
            return None
        prefills = np.array([request for request, _ in admitted], dtype=np.int64)
        lengths = np.array([length for _, length in admitted], dtype=np.int64)
        self._run(prefills, lengths)
        return Batch(prefills, lengths, decodes, context, self._layers)

    def _make_room(self) -> bool:
        """Preempt from the newest end until the decodes' new blocks fit; True if anything was preempted."""
        size, running = self._blocks.block_size, self._running
        new_block = self._context % size == 0
        need, free, keep = int(new_block.sum()), self._blocks.free, len(running)
        if need <= free:
            return False
        while need > free:
            keep -= 1
            victim = int(running[keep])
            free += int(self._blocks.held[victim])
            need -= int(new_block[keep])
            self._emitted[victim] = self._output[victim] - self._left[keep]
            self._preempted.appendleft(victim)
        self.preemptions += len(running) - keep
        self._blocks.release(running[keep:])
        self._running, self._context, self._left = running[:keep], self._context[:keep], self._left[:keep]
        return True

    def _admit(self, budget: float, *, nothing_runs: bool) -> list[tuple[int, int]]:
        """Whole prompts from the head of the line while budget and blocks last; at least one if nothing else runs."""
        admitted: list[tuple[int, int]] = []
        free, size = self._blocks.free, self._blocks.block_size
        while (request := self._head()) is not None:
            length = self._prompt[request] + int(self._emitted[request])
            count = -(-length // size)
            forced = nothing_runs and not admitted
            if (length > budget and not forced) or count > free:
                break
            self._take_head(length)
            admitted.append((request, length))
            budget, free = budget - length, free - count
        return admitted

    def _head(self) -> int | None:
        if self._preempted:
            return self._preempted[0]
        return self._new if self._new < len(self._prompt) else None

    def _take_head(self, length: int) -> None:
        if self._preempted:
            self._preempted.popleft()
            self.recomputed += length
        else:
            self._new += 1

    def _run(self, prefills: Ids, lengths: Ids) -> None:
        if not len(prefills):
            return
        self._blocks.allocate(prefills, lengths)
        self._running = np.concatenate((self._running, prefills))
        self._context = np.concatenate((self._context, lengths))
        self._left = np.concatenate((self._left, self._output[prefills] - self._emitted[prefills]))

    def complete(self, batch: Batch) -> Ids:
        """See `Queue.complete`."""
        self._left = self._left - 1
        over = self._left == 0
        finished = self._running[over] if over.any() else NONE
        if len(finished):
            self._blocks.release(finished)
            self._finished += len(finished)
            going = ~over
            self._running, self._context, self._left = self._running[going], self._context[going], self._left[going]
        return finished

    def ends_with(self, batch: Batch) -> bool:
        """See `Queue.ends_with`."""
        return self._finished + len(self._running) == len(self._prompt) and bool((self._left == 1).all())

    def close(self) -> None:
        """See `Queue.close`."""
        self._blocks.release(self._running)
        self._running, self._context, self._left = NONE, NONE, NONE
