"""Layered prefill: a prompt passes one group of layers per iteration, so that its experts are loaded once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from workbench.core.errors import CapacityError
from workbench.core.units import is_whole
from workbench.scheduler.batch import NONE, Batch, Cut, Ids
from workbench.scheduler.block_manager import BlockCounts
from workbench.scheduler.paged_queue import Flight, PagedQueue
from workbench.workload import Workload


@dataclass(frozen=True)
class LayeredPrefill:
    """One prefill in flight, whose tokens pass one group of layers per iteration beside all decodes.

    A prompt of L tokens takes G(L) = min(n_layers, max(1, ceil(L / granularity))) iterations, one for each of G
    contiguous groups of layers. Waiting prompts join the head of the line while their sum stays within `granularity`.
    A prompt of more than granularity x n_layers tokens comes in pieces of that many, each a pass of its own. The KV
    blocks of the whole prompt are reserved at admission; a preempted prefill begins again at the first group.

    Parameters
    ----------
    granularity : int
        Tokens that pass all layers in one iteration; also the most sequences that run at a time.

    Notes
    -----
    Layered Prefill sections 4.2 to 4.4, G clamped.
    """

    example: ClassVar[dict[str, int]] = {"granularity": 128}

    granularity: int = 512

    def __post_init__(self) -> None:
        if not is_whole(self.granularity) or self.granularity < 1:
            raise CapacityError(f"granularity must be a whole number of tokens from 1 on, not {self.granularity!r}.")

    @property
    def token_budget(self) -> float:
        """Tokens of an iteration in units of whole passes."""
        return float(self.granularity)

    def splits(self, longest: int, layers: int) -> bool:
        """See `Scheduler.splits`."""
        return longest > self.granularity * layers

    def open(self, workload: Workload, blocks: BlockCounts, token_budget: float, layers: int) -> LayeredQueue:
        """See `Scheduler.open`."""
        return LayeredQueue(workload, blocks, self.granularity, layers)


def group_bounds(layers: int, groups: int) -> tuple[tuple[int, int], ...]:
    """First layer, and the one after the last, of each of the contiguous groups: floor(g n / G).

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
    """At most one prefill in flight, of one long prompt or of several short ones."""

    def __init__(self, workload: Workload, blocks: BlockCounts, granularity: int, layers: int) -> None:
        super().__init__(workload, blocks, layers)
        self._granularity = granularity
        self._steps = deque[tuple[int, int, range]]()  # tokens from, to, and layers of every iteration still to make

    def _choose(self) -> Batch:
        decodes, context, preempted = self._decode()
        if not self._flights and not preempted and len(decodes) < self._granularity:
            self._take(self._granularity - len(decodes))
        if not self._flights:
            return Batch(NONE, NONE, decodes, context, self._layers)
        return self._step(decodes, context)

    def _take(self, most: int) -> None:
        """Admit the head of the line, and those behind it while they fit together."""
        line = self._line()
        fit = self._fitting(line, self._granularity, at_least_one=True) if len(line) else 0
        requests = line[: min(fit, most)]
        if len(requests):
            lengths = self._admit(requests)
            self._flights = [Flight(*pair) for pair in zip(requests.tolist(), lengths.tolist(), strict=True)]
            self._steps = deque(self._plan(int(lengths.sum())))

    def _plan(self, tokens: int) -> list[tuple[int, int, range]]:
        """Every iteration of a prefill: the tokens that pass, and the layers that they pass."""
        most = self._granularity * self._layers
        pieces = [(start, min(start + most, tokens)) for start in range(0, tokens, most)]
        groups = [min(self._layers, -(-(stop - start) // self._granularity)) for start, stop in pieces]
        return [
            (start, stop, range(*bounds))
            for (start, stop), count in zip(pieces, groups, strict=True)
            for bounds in group_bounds(self._layers, count)
        ]

    def _step(self, decodes: Ids, context: Ids) -> Batch:
        start, stop, layers = self._steps.popleft()
        prefills = np.array([flight.request for flight in self._flights])
        lengths = np.array([flight.length for flight in self._flights])
        several = len(prefills) > 1  # in one pass, each whole
        sizes = lengths if several else np.array([stop - start])
        starts = np.zeros_like(lengths) if several else np.array([start])
        if layers.stop == self._layers:
            for flight, done in zip(self._flights, (starts + sizes).tolist(), strict=True):
                flight.done = done
        over = not self._steps
        if over:
            self._flights = []
            self._run(prefills, lengths)
        cut = Cut(starts, layers, np.full(len(prefills), over))
        return Batch(prefills, sizes, decodes, context, self._layers, cut)
