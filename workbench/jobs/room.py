"""Room for the requests of a job: how many run at once, and how long they may be."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.errors import CapacityError, ScenarioError
from workbench.jobs.llm import LLM
from workbench.scenario import Scenario


@dataclass(frozen=True)
class Room:
    """Room for the requests of a job.

    Attributes
    ----------
    together : int
        Most requests that run at once.
    kv_capacity : str or float or None
        Size of the KV cache; see `LLM.open`.
    """

    together: int
    kv_capacity: str | float | None

    def planned(self, llm: LLM, longest: int) -> Scenario:
        """The scenario of a session for requests of at most so many tokens."""
        return llm.planned(longest, together=self.together, kv_capacity=self.kv_capacity)

    def longest(self, llm: LLM, prompts: Sequence[int], outputs: Sequence[int]) -> int:
        """Most tokens that any of these requests has for which a session fits this computer; the shortest, if none."""
        lengths = sorted(set(map(int.__add__, prompts, outputs)))
        if self._fits(llm, lengths[-1]):
            return lengths[-1]
        fitting = bisect(lengths, False, key=lambda longest: not self._fits(llm, longest))
        return lengths[max(fitting, 1) - 1]

    def _fits(self, llm: LLM, longest: int) -> bool:
        try:
            self.planned(llm, longest)
        except (CapacityError, ScenarioError):
            return False
        return True
