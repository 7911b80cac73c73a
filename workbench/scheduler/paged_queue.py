"""The queue that all schedulers share: waiting, prefilling and decoding requests, and the victims of preemption."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np

from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.scheduler.block_manager import BlockCounts
from workbench.workload import Workload


@dataclass
class Flight:
    """A prefill that takes several iterations: `length` tokens, of which `done` have passed all layers."""

    request: int
    length: int
    done: int = 0


class PagedQueue(ABC):
    """Requests of one served workload over one block manager, preempted by recomputation.

    Decodes take blocks as they grow. Where too few are free the newest lose theirs: prefills in flight first, then
    sequences that decode. They wait, the oldest first, ahead of all new requests, and begin again from their first
    token. New requests wait in the order of the workload; those that have not arrived are not seen.
    """

    def __init__(self, workload: Workload, blocks: BlockCounts, layers: int) -> None:
        self.preemptions = self.recomputed = 0
        self._blocks = blocks
        self._layers = layers
        self._prompt = workload.prompt_len
        self._output = workload.output_len
        self._arrival = workload.arrival
        self._new = 0
        self._arrived = 0
        self._preempted = deque[int]()
        self._emitted: Ids = np.zeros(len(workload), dtype=np.int64)
        self._finished = 0
        self._flights: list[Flight] = []
        # The running sequences in the order of admission. In an iteration all of them decode or none does, so that
        # three numbers of each stay as they are meanwhile: once `_decoded` such iterations have been made, its context
        # is `_context + _decoded`, it needs a block if that is `_full`, and it has all its tokens if that is `_last`.
        self._running = NONE
        self._decoded = 0
        self._context, self._full, self._last = (np.zeros(len(workload), dtype=np.int64) for _ in range(3))

    def next(self, now: float = math.inf) -> Batch | None:
        """See `Queue.next`."""
        self._arrived = int(self._arrival.searchsorted(now, "right")) if len(self._arrival) else len(self._prompt)
        batch = self._choose()
        return batch if len(batch) else None

    @abstractmethod
    def _choose(self) -> Batch:
        """The next batch, its blocks taken; empty if there is nothing to do."""

    # ------------------------------------------------------------------------------------------------ those that decode

    def _decode(self) -> tuple[Ids, Ids, bool]:
        """All running sequences that may go on, their contexts, and whether somebody was preempted for them."""
        before = self.preemptions
        needy = (self._full.take(self._running) == self._decoded).nonzero()[0]
        keep = self._make_room(needy)
        if keep < len(self._running):
            self._preempt(keep)
            needy = needy[: needy.searchsorted(keep)]
        decodes = self._running
        growing = self._running.take(needy)
        self._blocks.append(growing)
        self._full[growing] += self._blocks.block_size
        context = self._context.take(decodes) + self._decoded
        self._decoded += 1
        return decodes, context, self.preemptions > before

    def _make_room(self, needy: Ids) -> int:
        """Count of running sequences that may stay, the oldest first, so that `needy` ones get a new block."""
        need = len(needy)
        keep = len(self._running)
        while need > self._blocks.free and self._flights:
            self._abandon(self._flights.pop())
        free = self._blocks.free
        while need > free:
            keep -= 1
            free += int(self._blocks.held[self._running[keep]])
            need -= int(needy[need - 1] == keep)
        return keep

    def _abandon(self, flight: Flight) -> None:
        """Take everything from the newest prefill in flight."""
        self._preempted.appendleft(flight.request)
        self.preemptions += 1
        self.recomputed += flight.done
        self._blocks.release(np.array([flight.request]))

    def _preempt(self, keep: int) -> None:
        """Take everything from the sequences past the first `keep`; the oldest of them will be first in line."""
        victims = self._running[keep:]
        self._emitted[victims] = self._output[victims] - (self._last[victims] - self._decoded)
        self._preempted.extendleft(reversed(victims.tolist()))
        self.preemptions += len(victims)
        self.recomputed += int((self._lengths(victims) - 1).sum())  # the last token of each is new to the model
        self._blocks.release(victims)
        self._running = self._running[:keep]

    # ----------------------------------------------------------------------------------------------- those that prefill

    def _lengths(self, requests: Ids) -> Ids:
        """Tokens that these prefill: their prompts, and what they had generated before they were preempted."""
        lengths: Ids = self._prompt[requests] + self._emitted[requests]
        return lengths

    def _line(self, new: float = math.inf) -> Ids:
        """Waiting requests, first come first served: preempted ones, then at most so many new ones.

        Each admitted one takes a block, so that no more than the free ones are of interest.
        """
        again = min(len(self._preempted), self._blocks.free)
        waiting = np.fromiter(self._preempted, dtype=np.int64, count=again)
        until = min(self._arrived, self._new + min(self._blocks.free - again, new))
        return np.concatenate((waiting, np.arange(self._new, int(until))))

    def _fitting(self, line: Ids, budget: float, *, at_least_one: bool) -> int:
        """Count of whole prompts from the head of the queue that fit the budget and the free blocks.

        With `at_least_one` the budget does not keep back the first.
        """
        lengths = self._lengths(line)
        tokens = lengths.cumsum()
        blocks = (-(-lengths // self._blocks.block_size)).cumsum()
        in_budget = max(int(tokens.searchsorted(budget, "right")), int(at_least_one))
        return min(in_budget, int(blocks.searchsorted(self._blocks.free, "right")))

    def _admit(self, requests: Ids) -> Ids:
        """Take these from the head of the line and give them the blocks of all that they prefill; their lengths."""
        lengths = self._lengths(requests)
        again = min(len(requests), len(self._preempted))
        for _ in range(again):
            self._preempted.popleft()
        self._new += len(requests) - again
        self._blocks.allocate(requests, lengths)
        return lengths

    def _run(self, prefills: Ids, lengths: Ids) -> None:
        """These emit their first token with the current batch, and decode from the next one on."""
        if len(prefills):
            block = self._blocks.block_size
            self._running = np.concatenate((self._running, prefills))
            self._context[prefills] = lengths - self._decoded
            self._full[prefills] = -(-lengths // block) * block - lengths + self._decoded
            self._last[prefills] = self._output[prefills] - self._emitted[prefills] - 1 + self._decoded

    # -------------------------------------------------------------------------------------------------------- the ends

    def complete(self, batch: Batch) -> Ids:
        """See `Queue.complete`."""
        going_on = self._last.take(self._running) != self._decoded
        if np.count_nonzero(going_on) == len(going_on):
            return NONE
        finished: Ids = self._running[~going_on]
        self._running = self._running[going_on]
        self._blocks.release(finished)
        self._finished += len(finished)
        return finished

    def ends_with(self, batch: Batch) -> bool:
        """See `Queue.ends_with`."""
        all_run = self._finished + len(self._running) == len(self._prompt)
        return all_run and bool((self._last[self._running] == self._decoded).all())

    def close(self) -> None:
        """See `Queue.close`."""
        self._blocks.release(np.concatenate((self._running, [flight.request for flight in self._flights])).astype(int))
        self._running = NONE
        self._flights = []
