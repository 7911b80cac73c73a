"""The queue that all schedulers share: waiting, in-flight and running requests, and preemption of the newest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.scheduler.block_manager import BlockCounts
from workbench.workload import Workload


@dataclass
class InFlight:
    """A prefill that takes several iterations: `length` tokens, of which `done` have passed all layers."""

    request: int
    length: int
    done: int = 0


def longer(column: Ids, requests: int) -> Ids:
    """The column with so many zeros behind it."""
    return np.concatenate((column, np.zeros(requests, dtype=np.int64)))


class Standing(NamedTuple):
    """The state of a queue without prefills in flight between two iterations; see `PagedQueue` for its columns.

    Attributes
    ----------
    columns : tuple of ndarray (requests,) int64
        Prompts, outputs, tokens emitted before, offset, full at, ends at, and blocks held: the queue's own.
    running, preempted, new : ndarray int64
        Requests.
    decoded, free, preemptions, recomputed, finished : int
    """

    columns: tuple[Ids, ...]
    running: Ids
    preempted: Ids
    new: Ids
    decoded: int
    free: int
    preemptions: int
    recomputed: int
    finished: int


class PagedQueue(ABC):
    """Requests of one served workload over one block manager, preempted by recomputation.

    Running sequences take blocks as they grow. Where too few are free, the newest become victims and lose their
    blocks: in-flight prefills first, then running sequences. Victims wait, the oldest first, ahead of all new requests,
    and begin again from their first token. New requests wait in the order in which they were added; those that were not
    are not seen.

    The state is kept in lists of requests, and in columns with one entry per request of the workload. Here 0 and 1
    run, 2 is in flight, 3 was preempted, 4 and 5 have not begun, and 6 has not been added::

        request        0     1     2     3     4     5     6
        _running       0  <- 1                                  sequences that decode, the oldest first
        _in_flight                 2                            prefills of several iterations, the oldest first
        _preempted                       3                      waiting victims, the oldest first
        _new                                   4  <- 5          new requests that wait, the first to come in front
        _emitted       0     4     0     0     0     0     0    tokens emitted before the latest preemption
        _offset       88    90                                  context is `_offset + _decoded`
        _full_at       8    22                                  the last block is full once `_decoded` is this
        _ends_at      31    19                                  the last token is emitted once `_decoded` is this

    Either all running sequences decode in an iteration or none does. `_decoded` counts the iterations in which they
    do: only this number changes with every iteration, and the columns stay as they are.

    At most `max_running` sequences run or are in flight at once; None is no limit.
    """

    def __init__(self, workload: Workload, blocks: BlockCounts, layers: int, max_running: int | None = None) -> None:
        self.preemptions = 0
        self.recomputed = 0
        self.blocks = blocks
        self.max_running = max_running
        self._layers = layers
        self._prompt: Ids = np.zeros(len(workload), dtype=np.int64)
        self._output: Ids = np.zeros(len(workload), dtype=np.int64)
        self._new = NONE
        self._added = 0
        self._preempted = deque[int]()
        self._emitted: Ids = np.zeros(len(workload), dtype=np.int64)
        self._finished = 0
        self._in_flight: list[InFlight] = []
        self._running = NONE
        self._decoded = 0
        self._offset: Ids = np.zeros(len(workload), dtype=np.int64)
        self._full_at: Ids = np.zeros(len(workload), dtype=np.int64)
        self._ends_at: Ids = np.zeros(len(workload), dtype=np.int64)

    def add(self, requests: Ids, prompt_len: Ids, output_len: Ids) -> None:
        """See `Queue.add`."""
        further = int(requests.max(initial=-1)) + 1 - len(self._prompt)
        if further > 0:
            self._grow(further)
        self._prompt[requests] = prompt_len
        self._output[requests] = output_len
        self._new = np.concatenate((self._new, requests))
        self._added += len(requests)

    def _grow(self, requests: int) -> None:
        """Make every column longer, by so many requests."""
        self.blocks.grow(requests)
        for name in ("_prompt", "_output", "_emitted", "_offset", "_full_at", "_ends_at"):
            setattr(self, name, longer(getattr(self, name), requests))

    def cancel(self, requests: Ids) -> None:
        """See `Queue.cancel`."""
        gone = set(requests.tolist())
        self._new = self._new[~np.isin(self._new, requests)]
        self._running = self._running[~np.isin(self._running, requests)]
        self._preempted = deque(request for request in self._preempted if request not in gone)
        self._in_flight = [prefill for prefill in self._in_flight if prefill.request not in gone]
        self.blocks.release(requests)
        self._added -= len(requests)

    def next(self) -> Batch | None:
        """See `Queue.next`."""
        batch = self._choose()
        return batch if len(batch) else None

    @abstractmethod
    def _choose(self) -> Batch:
        """The next batch, its blocks taken; empty if there is nothing to do."""

    # ------------------------------------------------------------------------------------------------ running sequences

    def _decode(self) -> tuple[Ids, Ids, bool]:
        """Let every running sequence decode, and preempt the newest where too few blocks are free.

        Returns
        -------
        decodes, context : ndarray
            The sequences that decode, and the tokens in the KV cache of each.
        preempted : bool
            True if a request was preempted.
        """
        before = self.preemptions
        full = (self._full_at.take(self._running) == self._decoded).nonzero()[0]
        kept = self._make_room(full)
        if kept < len(self._running):
            self._preempt(self._running[kept:])
            full = full[: full.searchsorted(kept)]
        decodes = self._running
        growing = self._running.take(full)
        self.blocks.append(growing)
        self._full_at[growing] += self.blocks.block_size
        context = self._offset.take(decodes) + self._decoded
        self._decoded += 1
        return decodes, context, self.preemptions > before

    def _make_room(self, full: Ids) -> int:
        """Preempt in-flight prefills, then count the running sequences that can stay, the oldest first.

        `full` are the places in `_running` of the sequences that need another block.
        """
        blocks_needed = len(full)
        kept = len(self._running)
        while blocks_needed > self.blocks.free and self._in_flight:
            self._preempt_prefill(self._in_flight.pop())
        free = self.blocks.free
        while blocks_needed > free:
            kept -= 1  # the newest that is left becomes a victim: its blocks are free, and it needs none
            free += int(self.blocks.held[self._running[kept]])
            blocks_needed -= int(full[blocks_needed - 1] == kept)
        return kept

    def _preempt_prefill(self, victim: InFlight) -> None:
        """Take every block from the newest in-flight prefill and let it wait first in line."""
        self._preempted.appendleft(victim.request)
        self.preemptions += 1
        self.recomputed += victim.done
        self.blocks.release(np.array([victim.request]))

    def _preempt(self, victims: Ids) -> None:
        """Take every block from the newest running sequences and let them wait first in line, the oldest first."""
        self._emitted[victims] = self._output[victims] - (self._ends_at[victims] - self._decoded)
        self._preempted.extendleft(reversed(victims.tolist()))
        self.preemptions += len(victims)
        self.recomputed += int((self._lengths(victims) - 1).sum())  # the model has not seen the last token of each
        self.blocks.release(victims)
        self._running = self._running[: len(self._running) - len(victims)]

    # ------------------------------------------------------------------------------------------------ waiting requests

    def _lengths(self, requests: Ids) -> Ids:
        """Tokens that each request prefills: its prompt, and the tokens that it had emitted before a preemption."""
        lengths: Ids = self._prompt[requests] + self._emitted[requests]
        return lengths

    def _waiting(self, most_new: float = math.inf) -> Ids:
        """Waiting requests, first come first served: preempted ones, then at most `most_new` new ones.

        No more are listed than may run beside those that do, or than blocks are free: each takes one at least.
        """
        room = self.blocks.free
        if self.max_running is not None:
            room = min(room, self.max_running - len(self._running) - len(self._in_flight))
        again = min(len(self._preempted), room)
        preempted = np.fromiter(self._preempted, dtype=np.int64, count=again)
        return np.concatenate((preempted, self._new[: int(min(len(self._new), room - again, most_new))]))

    def _fitting(self, waiting: Ids, budget: float, *, at_least_one: bool) -> int:
        """Number of waiting requests, from the first on, whose whole prompts fit the token budget and the free blocks.

        With `at_least_one` the first one may exceed the budget.
        """
        lengths = self._lengths(waiting)
        tokens = lengths.cumsum()
        blocks_needed = (-(-lengths // self.blocks.block_size)).cumsum()
        in_budget = max(int(tokens.searchsorted(budget, "right")), int(at_least_one))
        return min(in_budget, int(blocks_needed.searchsorted(self.blocks.free, "right")))

    def _admit(self, requests: Ids) -> Ids:
        """Admit the first waiting requests: give each the blocks of all that it prefills, and return these lengths."""
        lengths = self._lengths(requests)
        again = min(len(requests), len(self._preempted))
        for _ in range(again):
            self._preempted.popleft()
        self._new = self._new[len(requests) - again :]
        self.blocks.allocate(requests, lengths)
        return lengths

    def _start_decoding(self, prefills: Ids, lengths: Ids) -> None:
        """Add sequences to the running ones: they emit a token with this batch and decode from the next one on."""
        if len(prefills):
            block = self.blocks.block_size
            self._running = np.concatenate((self._running, prefills))
            self._offset[prefills] = lengths - self._decoded
            self._full_at[prefills] = -(-lengths // block) * block - lengths + self._decoded
            self._ends_at[prefills] = self._output[prefills] - self._emitted[prefills] - 1 + self._decoded

    # ------------------------------------------------------------------------------------------------ finished requests

    def complete(self, batch: Batch, ended: Ids = NONE) -> Ids:
        """See `Queue.complete`."""
        self._ends_at[ended] = self._decoded
        going_on = self._ends_at.take(self._running) != self._decoded
        if np.count_nonzero(going_on) == len(going_on):
            return NONE
        finished: Ids = self._running[~going_on]
        self._running = self._running[going_on]
        self.blocks.release(finished)
        self._finished += len(finished)
        return finished

    def ends_with(self, batch: Batch) -> bool:
        """See `Queue.ends_with`."""
        all_run = self._finished + len(self._running) == self._added
        return all_run and bool((self._ends_at[self._running] == self._decoded).all())

    # --------------------------------------------------------------------------------------------------------- standing

    def standing(self) -> Standing:
        """The state between two iterations, whose columns are the queue's own."""
        columns = (self._prompt, self._output, self._emitted, self._offset, self._full_at, self._ends_at)
        return Standing(
            (*columns, self.blocks.held),
            self._running,
            np.array(self._preempted, dtype=np.int64),
            self._new,
            self._decoded,
            self.blocks.free,
            self.preemptions,
            self.recomputed,
            self._finished,
        )

    def resume(self, standing: Standing) -> None:
        """Go on from a state whose columns are the queue's own."""
        self._running = standing.running
        self._preempted = deque(standing.preempted.tolist())
        self._new = standing.new
        self._decoded = standing.decoded
        self.blocks.free = standing.free
        self.preemptions = standing.preemptions
        self.recomputed = standing.recomputed
        self._finished = standing.finished

    def close(self) -> None:
        """See `Queue.close`."""
        in_flight = [prefill.request for prefill in self._in_flight]
        self.blocks.release(np.concatenate((self._running, in_flight)).astype(int))
        self._running = NONE
        self._in_flight = []
