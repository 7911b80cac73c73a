"""MoE-Lens' resource-aware scheduler: beside the decodes as many prefill tokens as GPU and KV memory allow."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import ClassVar

from workbench.core.errors import ScenarioError
from workbench.scheduler.base import LimitedScheduler, check_budget
from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.scheduler.block_manager import BlockCounts, block_iterations
from workbench.scheduler.paged_queue import PagedQueue
from workbench.workload import Workload


class Admission(enum.Enum):
    """Pace of admission while token budget and free blocks allow it."""

    GREEDY = "greedy"
    """Admit as many requests as fit. Their later need for blocks is ignored, so the newest are preempted in waves."""
    PACED = "paced"
    """Admit at most as many as the cache holds in steady state, q = N / S per iteration on average."""

    def __repr__(self) -> str:
        return f"Admission.{self.name}"


@dataclass(frozen=True, repr=False)
class ResourceAware(LimitedScheduler):
    """Overlap prefill and decode, and preempt the newest sequences by recomputation.

    All running sequences decode in every iteration. If their next tokens need more blocks than are free, the newest
    sequences lose their blocks and wait, the oldest victim first, ahead of all new requests; such an iteration admits
    nobody. Otherwise whole prompts are admitted in order while they fit the rest of the token budget and the free
    blocks.

    Parameters
    ----------
    token_budget : float, optional
        Tokens per iteration [tokens]; by default those that the GPU computes while one pass of weights streams, or
        two mean prompts where that is more.
    admission : Admission
        GREEDY, or PACED at q = N / S requests per iteration: N blocks over the mean of what a request of this
        workload holds over its life, S = sum over i < g of ceil((p + i) / b).
    max_running : int, optional
        See `LimitedScheduler`.

    Notes
    -----
    MoE-Lens, section 6.2; the pace is its Eq. 8 with the sum to g - 1. No prompt is split. The check of free blocks at
    admission is ours.
    """

    example: ClassVar[dict[str, int]] = {}

    token_budget: float | None = None
    admission: Admission = Admission.GREEDY

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget is not None:
            check_budget("token_budget", self.token_budget)
        if not isinstance(self.admission, Admission):
            raise ScenarioError(f"admission must be Admission.GREEDY or Admission.PACED, not {self.admission!r}.")

    def splits(self, longest: int, layers: int) -> bool:
        """See `Scheduler.splits`."""
        return False

    def open(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> ResourceAwareQueue:
        """See `Scheduler.open`."""
        paced = self.admission is Admission.PACED
        pace = steady_pace(workload, blocks.total, blocks.block_size) if paced else math.inf
        return ResourceAwareQueue(workload, blocks, token_budget, layers, pace, self.max_running)


def steady_pace(workload: Workload, blocks: int, block: int) -> float:
    """Requests per iteration that keep a cache of N blocks full without preemption: q = N / S."""
    return blocks / float(block_iterations(workload.prompt_len, workload.output_len, block).mean())


class ResourceAwareQueue(PagedQueue):
    """A queue whose batches hold all decodes and whole prompts, on average at most `pace` new ones per iteration."""

    def __init__(
        self,
        workload: Workload,
        blocks: BlockCounts,
        token_budget: float,
        layers: int,
        pace: float,
        max_running: int | None = None,
    ) -> None:
        super().__init__(workload, blocks, layers, max_running)
        self.budget = token_budget
        self.pace = pace
        self.due = 0.0  # new requests that the pace allows now
        self.shortest = int(workload.prompt_len.min())

    def add(self, requests: Ids, prompt_len: Ids, output_len: Ids) -> None:
        """See `Queue.add`."""
        super().add(requests, prompt_len, output_len)
        self.shortest = min(self.shortest, int(prompt_len.min(initial=self.shortest)))

    def _choose(self) -> Batch:
        decodes, context, preempted = self._decode()
        # Only a fraction of a request is carried over: requests that were due and did not fit do not come in a burst.
        self.due = self.pace + min(self.due, math.modf(self.due)[0])
        nothing_runs = not len(decodes)
        prefills = NONE if preempted else self._admissible(self.budget - len(decodes), nothing_runs=nothing_runs)
        lengths = self._admit(prefills) if len(prefills) else NONE
        self._start_decoding(prefills, lengths)
        return Batch(prefills, lengths, decodes, context, self._layers)

    def _admissible(self, budget: float, *, nothing_runs: bool) -> Ids:
        """Waiting requests to admit; if nothing runs, the first one whatever the budget and the pace.

        The pace does not hold back preempted requests.
        """
        most = budget / self.shortest + 1  # no more prompts can fit the budget
        waiting = self._waiting(min(most, max(self.due, float(nothing_runs and not self._preempted))))
        admitted = waiting[: self._fitting(waiting, budget, at_least_one=nothing_runs)] if len(waiting) else NONE
        self.due -= max(0, len(admitted) - len(self._preempted))
        return admitted
