"""Chunked prefill: every iteration prefills as many prompt tokens beside its decodes as a fixed budget leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workbench.scheduler.base import LimitedScheduler, check_budget
from workbench.scheduler.batch import Batch, Cut
from workbench.scheduler.block_manager import BlockCounts
from workbench.scheduler.paged_queue import InFlight, PagedQueue
from workbench.workload import Workload


@dataclass(frozen=True, repr=False)
class ChunkedPrefill(LimitedScheduler):
    """Decode all running sequences, then prefill chunks of prompts, in order, up to the token budget.

    All running sequences decode in every iteration, so that none waits for a long prompt. The rest of the budget goes
    to the first waiting prompt and to those behind it; what remains of a prompt is prefilled in the next iterations.
    Each chunk passes all layers and reads the weights of the experts anew. The KV blocks of a whole prompt are reserved
    when it is admitted.

    Parameters
    ----------
    token_budget : float
        Tokens per iteration, decodes included [tokens].
    max_running : int, optional
        See `LimitedScheduler`.

    Notes
    -----
    Sarathi-Serve (OSDI 2024), the baseline of Layered Prefill.
    """

    example: ClassVar[dict[str, int]] = {"token_budget": 128}

    token_budget: float = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("token_budget", self.token_budget)

    def splits(self, longest: int, layers: int) -> bool:
        """True for two tokens or more: the decodes of an iteration decide where a prompt is cut."""
        return longest > 1

    def open(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> ChunkedQueue:
        """See `Scheduler.open`."""
        return ChunkedQueue(workload, blocks, token_budget, layers, self.max_running)


class ChunkedQueue(PagedQueue):
    """A queue whose batches hold all decodes and chunks of the in-flight prefills, the oldest first."""

    def __init__(
        self,
        workload: Workload,
        blocks: BlockCounts,
        token_budget: float,
        layers: int,
        max_running: int | None = None,
    ) -> None:
        super().__init__(workload, blocks, layers, max_running)
        self._budget = token_budget

    def _choose(self) -> Batch:
        decodes, context, preempted = self._decode()
        starts, sizes = self._chunks(int(min(self._budget - len(decodes), 2**62)), admit=not preempted)
        chunked = self._in_flight[: len(sizes)]
        over = np.array([prefill.done == prefill.length for prefill in chunked], dtype=np.bool_)
        prefills = np.array([prefill.request for prefill in chunked], dtype=np.int64)
        lengths = np.array([prefill.length for prefill in chunked], dtype=np.int64)
        self._in_flight = self._in_flight[int(np.count_nonzero(over)) :]
        self._start_decoding(prefills[over], lengths[over])
        cut = Cut(np.array(starts, dtype=np.int64), range(self._layers), over) if len(chunked) else None
        return Batch(prefills, np.array(sizes, dtype=np.int64), decodes, context, self._layers, cut)

    def _chunks(self, room: int, *, admit: bool) -> tuple[list[int], list[int]]:
        """Cut this iteration's chunks from the first in-flight prefills; return their starts and lengths."""
        starts = list[int]()
        sizes = list[int]()
        while room > 0 and (len(sizes) < len(self._in_flight) or (admit and self._admit_one())):
            prefill = self._in_flight[len(sizes)]
            starts.append(prefill.done)
            sizes.append(min(room, prefill.length - prefill.done))
            prefill.done += sizes[-1]
            room -= sizes[-1]
        return starts, sizes

    def _admit_one(self) -> bool:
        """Admit the first waiting request; false if there is none that may run or its blocks are not free."""
        first = self._waiting(1)[:1]
        if not len(first) or not self._fitting(first, 0, at_least_one=True):
            return False
        self._in_flight.append(InFlight(int(first[0]), int(self._admit(first)[0])))
        return True
