"""MoE-Lens' resource-aware scheduler, greedy: as many prefill tokens beside the decodes as GPU and KV memory carry."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
        """See `Scheduler.open`."""
        return ResourceAwareQueue(workload, blocks, token_budget, layers)


class ResourceAwareQueue:
    """Running, preempted and new requests of one served workload."""

    def __init__(self, workload: Workload, blocks: BlockManager, token_budget: float, layers: int) -> None:
        self.preemptions = self.recomputed = 0
        self._blocks, self._budget, self._layers = blocks, token_budget, layers
        self._prompt, self._output = workload.prompt_len, workload.output_len
        self._new, self._preempted = 0, deque[int]()
        self._emitted: Ids = np.zeros(len(workload), dtype=np.int64)
        self._finished = 0
        # The running sequences in the order of admission, and what each still needs to know, side by side.
        self._running, self._context, self._left = NONE, NONE, NONE

    def next(self) -> Batch | None:
        """See `Queue.next`."""
        new_block = self._context % self._blocks.block_size == 0
        keep = self._make_room(new_block)
        preempted = keep < len(self._running)
        if preempted:
            self._preempt(keep)
        decodes, context = self._running, self._context
        self._blocks.append(decodes[new_block[:keep]])
        self._context = context + 1
        budget, nothing_runs = self._budget - len(decodes), not len(decodes)
        prefills, lengths = (NONE, NONE) if preempted else self._admit(budget, nothing_runs=nothing_runs)
        if nothing_runs and not len(prefills):
            return None
        self._run(prefills, lengths)
        return Batch(prefills, lengths, decodes, context, self._layers)

    def _make_room(self, new_block: npt.NDArray[np.bool_]) -> int:
        """How many running sequences may stay, the oldest first, so that those that need a new block find one."""
        need, free, keep = int(np.count_nonzero(new_block)), self._blocks.free, len(self._running)
        while need > free:
            keep -= 1
            free += int(self._blocks.held[self._running[keep]])
            need -= int(new_block[keep])
        return keep

    def _preempt(self, keep: int) -> None:
        """Take everything from the sequences past the first `keep`; the oldest of them will be first in line."""
        victims = self._running[keep:]
        self._emitted[victims] = self._output[victims] - self._left[keep:]
        self._preempted.extendleft(reversed(victims.tolist()))
        self.preemptions += len(victims)
        self._blocks.release(victims)
        self._running, self._context, self._left = self._running[:keep], self._context[:keep], self._left[:keep]

    def _admit(self, budget: float, *, nothing_runs: bool) -> tuple[Ids, Ids]:
        """Whole prompts from the head of the line, and their lengths, while budget and blocks last.

        Preempted requests stand before new ones. If nothing runs, the first is admitted whatever the budget.
        """
        free = self._blocks.free
        waiting = np.fromiter(self._preempted, dtype=np.int64, count=len(self._preempted))
        reach = self._new + max(0, free - len(waiting))  # each takes a block, so no more than these can be admitted
        line = np.concatenate((waiting, np.arange(self._new, min(len(self._prompt), reach))))
        if not len(line):
            return NONE, NONE
        lengths = self._prompt[line] + self._emitted[line]
        tokens, blocks = np.cumsum(lengths), np.cumsum(-(-lengths // self._blocks.block_size))
        fits = blocks <= free
        fits &= (tokens <= budget) | (nothing_runs & (np.arange(len(line)) == 0))
        count = len(line) if fits.all() else int(fits.argmin())
        again = min(count, len(waiting))
        for _ in range(again):
            self._preempted.popleft()
        self.recomputed += int(lengths[:again].sum())
        self._new += count - again
        return line[:count], lengths[:count]

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
        finished = self._running[over] if np.count_nonzero(over) else NONE
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
