"""The interface of schedulers: a frozen policy that opens a queue, and a queue that forms batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Protocol

from workbench.core.errors import CapacityError
from workbench.core.units import is_whole
from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.scheduler.block_manager import BlockCounts
from workbench.workload import Workload


class Queue(Protocol):
    """The state of one served workload."""

    preemptions: int
    recomputed: int

    def add(self, requests: Ids, prompt_len: Ids, output_len: Ids) -> None:
        """Let these requests, with prompts and outputs of these lengths, wait behind all others: they have arrived.

        Each is one of the workload, or a further one that has the next number.
        """

    def cancel(self, requests: Ids) -> None:
        """Forget these requests, which were added and are not finished, and release their blocks.

        It is called between `complete` and `next`.
        """

    def next(self) -> Batch | None:
        """The next iteration's batch, its KV blocks already allocated; None if every added request is finished."""

    def complete(self, batch: Batch, ended: Ids = NONE) -> Ids:
        """Account for a batch that ran: return the requests that finished with it, and release their blocks.

        Those of the batch that `ended` with the token which it gave them are finished, whatever their output length.
        """

    def ends_with(self, batch: Batch) -> bool:
        """True if every added request will be finished after this batch, even if none ends before its output length."""

    def close(self) -> None:
        """Release every block, also after an error."""


class Scheduler(Protocol):
    """A policy that chooses the requests of each iteration's batch.

    One that has a number `max_running` never lets more sequences run at once; see `LimitedScheduler`.
    """

    @property
    def token_budget(self) -> float | None:
        """Tokens per iteration, or None for as many as the GPU computes while one pass of weights streams."""

    def splits(self, longest: int, layers: int) -> bool:
        """True if a prefill of `longest` tokens may be cut into chunks, which read the KV of the chunks before."""

    def open(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> Queue:
        """Begin to serve a workload with `token_budget` tokens per iteration; no request of it is there yet."""


@dataclass(frozen=True, repr=False)
class LimitedScheduler:
    """The base of the schedulers of this package: the number of sequences that run at once may be limited.

    Parameters
    ----------
    max_running : int, optional
        Most sequences that run at once: those that decode and those whose prefill has begun. None for as many as the
        KV cache and the policy allow.

    Raises
    ------
    CapacityError
        If `max_running` is no whole number from 1 on.

    Notes
    -----
    vLLM calls this limit ``max_num_seqs``.
    """

    max_running: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        most = self.max_running
        if most is None:
            return
        if not is_whole(most) or most < 1:
            raise CapacityError(f"max_running must be a whole number of sequences from 1 on, or None, not {most!r}.")
        object.__setattr__(self, "max_running", int(most))

    def __repr__(self) -> str:
        """The fields, `max_running` last and only if it is given: saved digests without it are made of this text."""
        names = [known.name for known in fields(self) if known.name != "max_running"]
        if self.max_running is not None:
            names.append("max_running")
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({told})"


def most_running(scheduler: Scheduler) -> float:
    """Most sequences that a scheduler lets run at once; infinite without a limit."""
    most: int | None = getattr(scheduler, "max_running", None)
    return math.inf if most is None else most


def check_budget(name: str, budget: object) -> None:
    """Refuse a budget that is no number of tokens per iteration.

    Raises
    ------
    CapacityError
        If it is not at least 1.
    """
    number = isinstance(budget, Real) and not isinstance(budget, bool)
    if not (number and budget >= 1):  # type: ignore[operator]
        raise CapacityError(f"{name} must be at least 1 token per iteration, not {budget!r}.")
