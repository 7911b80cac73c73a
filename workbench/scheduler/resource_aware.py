"""MoE-Lens' resource-aware scheduler: as many prefill tokens beside the decodes as GPU and KV memory carry."""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from numbers import Real

import numpy as np
import numpy.typing as npt

from workbench.errors import CapacityError, ScenarioError
from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.scheduler.block_manager import BlockManager, block_iterations
from workbench.workload import Workload


class Admission(enum.Enum):
    """How fast new requests come in while budget and blocks allow it."""

    GREEDY = "greedy"
    """As many as fit. What they will need later is not looked at, so that the newest are preempted in waves."""
    PACED = "paced"
    """At most as many as the cache carries in steady state, q = N / S per iteration on average."""

    def __repr__(self) -> str:
        return f"Admission.{self.name}"


@dataclass(frozen=True)
class ResourceAware:
    """Overlap prefill and decode, preempt the newest by recomputation.

    In every iteration all running sequences decode. If their next tokens need more blocks than are free, the newest
    sequences lose theirs and wait, oldest victim first, ahead of all new requests; nothing is admitted then.
    Otherwise whole prompts are admitted in order while they fit the rest of the token budget and the free blocks.

    Parameters
    ----------
    token_budget : float, optional
        Tokens per iteration; by default what the GPU computes while one pass of weights streams.
    admission : Admission
        GREEDY, or PACED at q = N / S requests per iteration: N blocks over the mean of what a request of this
        workload holds over its life, S = sum over i < g of ceil((p + i) / b).

    Notes
    -----
    MoE-Lens, section 6.2, and for the pace Eq. 8 with the sum to g - 1; SPEC 1.6. No prompt is split. The check of
    free blocks at admission is ours.
    """

    token_budget: float | None = None
    admission: Admission = Admission.GREEDY

    def __post_init__(self) -> None:
        budget = self.token_budget
        number = isinstance(budget, Real) and not isinstance(budget, bool)
        if budget is not None and not (number and budget >= 1):
            raise CapacityError(f"token_budget must be at least 1 token per iteration, not {budget!r}.")
        if not isinstance(self.admission, Admission):
            raise ScenarioError(f"admission must be Admission.GREEDY or Admission.PACED, not {self.admission!r}.")

    def open(self, workload: Workload, blocks: BlockManager, token_budget: float, layers: int) -> ResourceAwareQueue:
        """See `Scheduler.open`."""
        paced = self.admission is Admission.PACED
        pace = steady_pace(workload, blocks.total, blocks.block_size) if paced else math.inf
        return ResourceAwareQueue(workload, blocks, token_budget, layers, pace)


def steady_pace(workload: Workload, blocks: int, block: int) -> float:
    """Requests per iteration that keep a cache of so many blocks full and never ask for more: q = N / S."""
    return blocks / float(block_iterations(workload.prompt_len, workload.output_len, block).mean())


class ResourceAwareQueue:
    """Running, preempted and new requests of one served workload; `pace` new ones per iteration, or infinity."""

    def __init__(self, workload: Workload, blocks: BlockManager, token_budget: float, layers: int, pace: float) -> None:
        self.preemptions = self.recomputed = 0
        self._blocks, self._budget, self._layers = blocks, token_budget, layers
        self._pace, self._due = pace, 0.0
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
        # Only a fraction of a request is carried over: what did not fit when it was due is not made up for in a burst.
        self._due = self._pace + min(self._due, math.modf(self._due)[0])
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

        Preempted requests stand before new ones, which the pace does not hold back. If nothing runs, the first is
        admitted whatever the budget and the pace.
        """
        free = self._blocks.free
        waiting = np.fromiter(self._preempted, dtype=np.int64, count=len(self._preempted))
        reach = self._new + max(0, free - len(waiting))  # each takes a block, so no more than these can be admitted
        due = max(self._due, float(nothing_runs and not len(waiting)))
        last = int(min(len(self._prompt), reach, self._new + due))
        line = np.concatenate((waiting, np.arange(self._new, last)))
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
        self._due -= count - again
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
