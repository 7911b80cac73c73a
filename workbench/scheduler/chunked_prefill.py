"""Chunked prefill: every iteration carries as many prompt tokens beside its decodes as a fixed budget leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workbench.scheduler.base import check_budget
from workbench.scheduler.batch import Batch, Cut
from workbench.scheduler.block_manager import BlockCounts
from workbench.scheduler.paged_queue import Flight, PagedQueue
from workbench.workload import Workload


@dataclass(frozen=True)
class ChunkedPrefill:
    """Decodes first, then prompts in pieces, in order, until the iteration has its tokens.

    All running sequences decode in every iteration, so that none waits for a long prompt; what is left of the budget
    goes to the prompt at the head of the line, the rest of which comes in the next iterations, and to those behind it.
    Each piece passes all layers, and reads the weights of the experts anew. A prompt's KV blocks are reserved when it
    is admitted.

    Parameters
    ----------
    token_budget : float
        Tokens per iteration, decodes included.

    Notes
    -----
    Sarathi-Serve (OSDI 2024), as Layered Prefill compares itself with.
    """

    example: ClassVar[dict[str, int]] = {"token_budget": 128}

    token_budget: float = 512

    def __post_init__(self) -> None:
        check_budget("token_budget", self.token_budget)

    def splits(self, longest: int, layers: int) -> bool:
        """True: where a prompt is cut depends on how many decode beside it, and even short ones can be."""
        return longest > 1

    def open(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> ChunkedQueue:
        """See `Scheduler.open`."""
        return ChunkedQueue(workload, blocks, token_budget, layers)


class ChunkedQueue(PagedQueue):
    """Prefills in flight, the oldest first, beside all decodes."""

    def __init__(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> None:
        super().__init__(workload, blocks, layers)
        self._budget = token_budget

    def _choose(self) -> Batch:
        decodes, context, preempted = self._decode()
        starts, sizes = self._pieces(int(min(self._budget - len(decodes), 2**62)), admit=not preempted)
        pieces = self._flights[: len(sizes)]
        over = np.array([flight.done == flight.length for flight in pieces], dtype=np.bool_)
        prefills = np.array([flight.request for flight in pieces], dtype=np.int64)
        lengths = np.array([flight.length for flight in pieces], dtype=np.int64)
        self._flights = self._flights[int(np.count_nonzero(over)) :]
        self._run(prefills[over], lengths[over])
        cut = Cut(np.array(starts, dtype=np.int64), range(self._layers), over) if len(pieces) else None
        return Batch(prefills, np.array(sizes, dtype=np.int64), decodes, context, self._layers, cut)

    def _pieces(self, room: int, *, admit: bool) -> tuple[list[int], list[int]]:
        """Starts and lengths of this iteration's chunks, for the first of the prefills in flight."""
        starts = list[int]()
        sizes = list[int]()
        while room > 0 and (len(sizes) < len(self._flights) or (admit and self._take_one())):
            flight = self._flights[len(sizes)]
            starts.append(flight.done)
            sizes.append(min(room, flight.length - flight.done))
            flight.done += sizes[-1]
            room -= sizes[-1]
        return starts, sizes

    def _take_one(self) -> bool:
        """Admit the head of the line, if there is one and its blocks are free."""
        head = self._line(1)[:1]
        if not len(head) or not self._fitting(head, 0, at_least_one=True):
            return False
        self._flights.append(Flight(int(head[0]), int(self._admit(head)[0])))
        return True
