"""Tasks that one action does at once, and the times of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from workbench.engine.lanes.lane import Job


class Together:
    """The action of the first of some tasks that follow one another on a lane; it does the work of all of them.

    The other tasks have no action while the plan runs: they end with the first.

    Parameters
    ----------
    first, past : int
        Place of the first of them in the plan, and that behind the last.
    compute : callable
        Does their work, and gives the times at which each ended, as readings of `time.perf_counter`.
    """

    def __init__(self, first: int, past: int, compute: Callable[[], npt.NDArray[np.float64]]) -> None:
        self.first = first
        self.past = past
        self._compute = compute
        self._ends = list[float]()

    def __call__(self) -> None:
        """Do the work."""
        self._ends = self._compute().tolist()

    def tell(self, jobs: Sequence[Job]) -> None:
        """After the plan, give each job its times, its share of the CPU time by its length, and this action."""
        own = jobs[self.first : self.past]
        edges = [own[0].start, *self._ends[: len(own) - 1], own[0].end]
        cpu = own[0].cpu / (edges[-1] - edges[0])
        for job, (start, end) in zip(own, pairwise(edges), strict=True):
            job.action = self
            job.start = start
            job.end = end
            job.cpu = cpu * (end - start)
