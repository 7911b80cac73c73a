"""Layered prefill: a prompt passes one group of layers per iteration, so that its experts are loaded once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from workbench.core.errors import CapacityError
from workbench.core.units import is_whole
from workbench.scheduler.base import LimitedScheduler
from workbench.scheduler.batch import NONE, Batch, Cut, Ids
from workbench.scheduler.block_manager import BlockCounts
from workbench.scheduler.paged_queue import InFlight, PagedQueue
from workbench.workload import Workload


@dataclass(frozen=True, repr=False)
class LayeredPrefill(LimitedScheduler):
    """Pass the tokens of one in-flight prefill through one group of layers per iteration, beside all decodes.

    A prompt of L tokens takes G(L) = min(n_layers, max(1, ceil(L / granularity))) iterations, one for each of G
    contiguous groups of layers. Waiting prompts are prefilled together while their sum stays within `granularity`.
    A prompt of more than granularity x n_layers tokens is cut into chunks of that many, each a pass of its own. The KV
    blocks of the whole prompt are reserved at admission; a preempted prefill begins again at the first group.

    Parameters
    ----------
    granularity : int
        Tokens that pass all layers in one iteration [tokens]; also the most sequences that run at a time.
    max_running : int, optional
        See `LimitedScheduler`.

    Notes
    -----
    Layered Prefill sections 4.2 to 4.4, G clamped.
    """

    example: ClassVar[dict[str, int]] = {"granularity": 128}

    granularity: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.granularity) or self.granularity < 1:
            raise CapacityError(f"granularity must be a whole number of tokens from 1 on, not {self.granularity!r}.")

    @property
    def token_budget(self) -> float:
        """Tokens of an iteration, counted as if they passed all layers."""
        return float(self.granularity)

    def splits(self, longest: int, layers: int) -> bool:
        """See `Scheduler.splits`."""
        return longest > self.granularity * layers

    def open(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> LayeredQueue:
        """See `Scheduler.open`."""
        return LayeredQueue(workload, blocks, self.granularity, layers, self.max_running)


def group_bounds(layers: int, groups: int) -> tuple[tuple[int, int], ...]:
    """First layer of each contiguous group, and the layer after its last: floor(g n / G).

    Raises
    ------
    ValueError
        If there are fewer layers than groups, or no group.
    """
    if not 1 <= groups <= layers:
        raise ValueError(f"groups must be between 1 and the {layers} layers, not {groups}; use layer_groups.")
    edges = [group * layers // groups for group in range(groups + 1)]
    return tuple(pairwise(edges))


class LayeredQueue(PagedQueue):
    """A queue with at most one in-flight prefill, of one long prompt or of several short ones."""

    def __init__(
        self, workload: Workload, blocks: BlockCounts, granularity: int, layers: int, max_running: int | None = None
    ) -> None:
        super().__init__(workload, blocks, layers, max_running)
        self._granularity = granularity
        self._steps = deque[tuple[int, int, range]]()  # of each iteration to come: first token, stop token, layers

    def _choose(self) -> Batch:
        decodes, context, preempted = self._decode()
        if not self._in_flight and not preempted and len(decodes) < self._granularity:
            self._begin_prefill(self._granularity - len(decodes))
        if not self._in_flight:
            return Batch(NONE, NONE, decodes, context, self._layers)
        return self._step(decodes, context)

    def _begin_prefill(self, most: int) -> None:
        """Admit the first waiting request, and those behind it while they fit together."""
        waiting = self._waiting()
        fit = self._fitting(waiting, self._granularity, at_least_one=True) if len(waiting) else 0
        requests = waiting[: min(fit, most)]
        if len(requests):
            lengths = self._admit(requests)
            self._in_flight = [InFlight(*pair) for pair in zip(requests.tolist(), lengths.tolist(), strict=True)]
            self._steps = deque(self._plan(int(lengths.sum())))

    def _plan(self, tokens: int) -> list[tuple[int, int, range]]:
        """Every iteration of a prefill: its first token, the token after its last, and the layers that they pass."""
        most = self._granularity * self._layers
        steps = list[tuple[int, int, range]]()
        for start in range(0, tokens, most):
            stop = min(start + most, tokens)
            groups = min(self._layers, -(-(stop - start) // self._granularity))
            steps += [(start, stop, range(*bounds)) for bounds in group_bounds(self._layers, groups)]
        return steps

    def _step(self, decodes: Ids, context: Ids) -> Batch:
        """The batch of the in-flight prefill's next iteration, beside the decodes."""
        start, stop, layers = self._steps.popleft()
        prefills = np.array([prefill.request for prefill in self._in_flight])
        lengths = np.array([prefill.length for prefill in self._in_flight])
        several = len(prefills) > 1  # several prompts are short: each passes whole, in one chunk
        sizes = lengths if several else np.array([stop - start])
        starts = np.zeros_like(lengths) if several else np.array([start])
        if layers.stop == self._layers:
            for prefill, done in zip(self._in_flight, (starts + sizes).tolist(), strict=True):
                prefill.done = done
        over = not self._steps
        if over:
            self._in_flight = []
            self._start_decoding(prefills, lengths)
        cut = Cut(starts, layers, np.full(len(prefills), over))
        return Batch(prefills, sizes, decodes, context, self._layers, cut)
