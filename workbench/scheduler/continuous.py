"""Continuous batching: requests come and go at every iteration, and prefills go first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.scheduler.base import LimitedScheduler, check_budget
from workbench.scheduler.batch import NONE, Batch
from workbench.scheduler.block_manager import BlockCounts
from workbench.scheduler.paged_queue import PagedQueue
from workbench.workload import Workload


@dataclass(frozen=True, repr=False)
class ContinuousBatching(LimitedScheduler):
    """Prefill whole prompts as soon as budget and KV blocks allow, and decode in the iterations between.

    An iteration prefills waiting prompts, in order, and nothing else. All running sequences decode when no prompt
    waits or fits. First tokens come early, and every new prompt delays the decodes.

    Parameters
    ----------
    token_budget : float, optional
        Limit on the prompt tokens of an iteration, and on the sequences that run at a time [tokens]; by default those
        that the GPU computes while one pass of weights streams, or two mean prompts where that is more. A
        longer prompt is prefilled alone.
    max_running : int, optional
        See `LimitedScheduler`.

    Notes
    -----
    Iteration-level scheduling as in Orca (OSDI 2022), prefill first as in vLLM (SOSP 2023).
    """

    example: ClassVar[dict[str, int]] = {}

    token_budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget is not None:
            check_budget("token_budget", self.token_budget)

    def splits(self, longest: int, layers: int) -> bool:
        """See `Scheduler.splits`."""
        return False

    def open(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> ContinuousQueue:
        """See `Scheduler.open`."""
        return ContinuousQueue(workload, blocks, token_budget, layers, self.max_running)


class ContinuousQueue(PagedQueue):
    """A queue whose batches hold prefills or decodes, never both."""

    def __init__(
        self,
        workload: Workload,
        blocks: BlockCounts,
        token_budget: float,
        layers: int,
        max_running: int | None = None,
    ) -> None:
        super().__init__(workload, blocks, layers, max_running)
        self.budget = token_budget

    def _choose(self) -> Batch:
        running = len(self._running)
        waiting = self._waiting()
        if len(waiting) and (not running or running < self.budget):
            fit = self._fitting(waiting, self.budget, at_least_one=True)
            prefills = waiting[: int(max(1, min(fit, self.budget - running)))] if fit else NONE
            if len(prefills):
                lengths = self._admit(prefills)
                self._start_decoding(prefills, lengths)
                return Batch(prefills, lengths, NONE, NONE, self._layers)
        decodes, context, _ = self._decode()
        return Batch(NONE, NONE, decodes, context, self._layers)
