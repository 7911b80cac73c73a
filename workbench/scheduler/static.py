"""Static batching: a batch is formed and served to its end before the next one is formed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import ClassVar

import numpy as np

from workbench.core.errors import CapacityError
from workbench.core.units import is_whole
from workbench.scheduler.base import LimitedScheduler, check_budget
from workbench.scheduler.batch import NONE, Batch, Hint, Ids
from workbench.scheduler.block_manager import BlockCounts
from workbench.scheduler.paged_queue import PagedQueue, longer
from workbench.scheduler.token_balance import balance
from workbench.workload import Workload


@dataclass(frozen=True, repr=False)
class StaticBatching(LimitedScheduler):
    """Prefill micro-batches of about equal token counts, then decode until the last sequence ends.

    When nothing runs, the waiting requests are divided among micro-batches, the longest first (`token_balance`).
    Requests that do not fit wait for the next batch, and so do preempted ones. A schedule with as many parts uses these
    micro-batches as its parts.

    Parameters
    ----------
    micro_batches : int
        Number of micro-batches, n_ub; fewer where the KV cache is too small to give each room for the longest request.
    size : int, optional
        Requests per micro-batch; by default as many as the KV cache holds to their end.
    token_budget : float, optional
        Limit on the prompt tokens of an iteration, and on the sequences that run at a time [tokens]; by default those
        that the GPU computes while one pass of weights streams, or two mean prompts where that is more. A
        longer prompt is prefilled alone.
    max_running : int, optional
        See `LimitedScheduler`: of the requests that the micro-batches would hold, only so many, those that were dealt
        out first, are in the batch.

    Notes
    -----
    MoE-Lightning, Algorithm 2.
    """

    example: ClassVar[dict[str, int]] = {}

    micro_batches: int = 1
    size: int | None = None
    token_budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("micro_batches", self.micro_batches), ("size", self.size)):
            if value is not None and (not is_whole(value) or value < 1):
                raise CapacityError(f"{name} must be a whole number from 1 on, not {value!r}.")
        if self.token_budget is not None:
            check_budget("token_budget", self.token_budget)

    def splits(self, longest: int, layers: int) -> bool:
        """See `Scheduler.splits`."""
        return False

    def open(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> StaticQueue:
        """See `Scheduler.open`."""
        return StaticQueue(workload, blocks, token_budget, layers, self)


class StaticQueue(PagedQueue):
    """A queue with one batch at a time: its requests that wait for their prefill, and its sequences that run."""

    def __init__(
        self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int, policy: StaticBatching
    ) -> None:
        super().__init__(workload, blocks, layers, policy.max_running)
        self._budget = token_budget
        self._policy = policy
        self._put_off: list[int] = []
        self._count = 1
        self._batch = NONE
        self._micro_batch: Ids = np.zeros(len(workload), dtype=np.int64)

    def _grow(self, requests: int) -> None:
        super()._grow(requests)
        self._micro_batch = longer(self._micro_batch, requests)

    def cancel(self, requests: Ids) -> None:
        """See `Queue.cancel`."""
        super().cancel(requests)
        gone = set(requests.tolist())
        self._put_off = [request for request in self._put_off if request not in gone]
        self._batch = self._batch[~np.isin(self._batch, requests)]

    def _choose(self) -> Batch:
        if not len(self._running) and not len(self._batch):
            self._form()
        prefills = NONE
        if len(self._batch):
            prefills = self._batch[: self._fitting(self._batch, self._budget, at_least_one=True)]
        if len(prefills):
            self._batch = self._batch[len(prefills) :]
            lengths = self._admit(prefills)
            self._start_decoding(prefills, lengths)
            return Batch(prefills, lengths, NONE, NONE, self._layers, hint=self._hint(prefills))
        self._put_off = [*self._batch.tolist(), *self._put_off]
        self._batch = NONE
        decodes, context, _ = self._decode()
        return Batch(NONE, NONE, decodes, context, self._layers, hint=self._hint(decodes))

    def _hint(self, requests: Ids) -> Hint:
        return Hint(self._micro_batch[requests], self._count)

    def _admit(self, requests: Ids) -> Ids:
        """Give requests of the batch the blocks of all that they prefill; return these lengths."""
        lengths = self._lengths(requests)
        self.blocks.allocate(requests, lengths)
        return lengths

    def _form(self) -> None:
        """Divide the waiting requests among micro-batches.

        The batch takes one request of each micro-batch in turn, so that a prefill of only some is balanced too.
        """
        waiting = np.array([*self._preempted, *self._put_off, *self._new], dtype=np.int64)
        self._preempted.clear()
        self._new = NONE
        if not len(waiting):
            return
        lengths = self._lengths(waiting)
        left = self._output[waiting] - self._emitted[waiting]
        cache = self.blocks.total * self.blocks.block_size
        longest = int(lengths.max() + left.max())
        count = max(1, min(self._policy.micro_batches, cache // longest))
        self._count = count
        most = max(1, int(min(self._budget, len(waiting))) // count)
        divided = balance(
            lengths.tolist(),
            micro_batches=count,
            size=min(self._policy.size or most, most),
            output_len=int(left.max()),
            cache=max(cache // count, longest),
        )
        for number, members in enumerate(divided.micro_batches):
            self._micro_batch[waiting[members]] = number
        turns = chain.from_iterable(zip_longest(*divided.micro_batches))
        places = [place for place in turns if place is not None]
        self._batch = waiting[places[: self.max_running]]
        self._put_off = waiting[sorted(divided.aborted + places[len(self._batch) :])].tolist()
