"""The time that several runs take, told by their simulations and by those that have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Pace:
    """The time that runs take one after the other.

    Before one has ended it is that of their simulations; then these count in proportion to what was measured. A run
    without a simulation counts as the mean of the others.

    Parameters
    ----------
    simulated : sequence of float
        Simulated time of each run, NaN without a simulation [s].
    """

    def __init__(self, simulated: Sequence[float]) -> None:
        known = [seconds for seconds in simulated if not math.isnan(seconds)]
        usual = sum(known) / len(known) if known else 1.0
        self._simulated = [usual if math.isnan(seconds) else seconds for seconds in simulated]
        self._ended = 0.0
        self._taken = 0.0
        self._factor = 1.0 if known else math.nan

    def end(self, number: int, seconds: float) -> None:
        """Note that a run has ended after so much time [s]."""
        self._ended += self._simulated[number]
        self._taken += seconds
        self._factor = self._taken / self._ended

    def left(self, number: int, gone: float = 0.0) -> float:
        """Time until the last run has ended, where one has gone on for so long; NaN if nothing tells it yet [s]."""
        now, *later = self._simulated[number:]
        return max(0.0, self._factor * now - gone) + self._factor * sum(later)
