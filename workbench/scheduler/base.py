"""What every scheduler offers: a frozen policy that opens a queue, and a queue that hands out batches."""

from __future__ import annotations

from typing import Protocol

from workbench.scheduler.batch import Batch, Ids
from workbench.scheduler.block_manager import BlockManager
from workbench.workload import Workload


class Queue(Protocol):
    """The state of one served workload."""

    preemptions: int
    recomputed: int

    def next(self) -> Batch | None:
        """The next iteration's batch, its KV blocks already taken; None when every request is finished."""

    def complete(self, batch: Batch) -> Ids:
        """Account for a batch that ran: the requests that finished with it, their blocks given back."""

    def ends_with(self, batch: Batch) -> bool:
        """True if nothing will be left to do after this batch."""

    def close(self) -> None:
        """Give back every block, whatever happened."""


class Scheduler(Protocol):
    """Who is in each iteration's batch."""

    @property
    def token_budget(self) -> float | None:
        """Tokens per iteration, or None for what the GPU computes while one pass of weights streams."""

    def open(self, workload: Workload, blocks: BlockManager, token_budget: float, layers: int) -> Queue:
        """Start serving with this many tokens per iteration."""
