"""The time that runs take, told by their simulations, by those that have ended and by their own progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from workbench.serving import Progress
from workbench.widgets.parts.words import roughly

if TYPE_CHECKING:
    from workbench.engine.engine import UnderWay


class Earlier(NamedTuple):
    """The pace of an earlier run, by default that of its simulation.

    Attributes
    ----------
    start : float
        Time before its clock began [s].
    slower : float
        Time by its clock over the simulated time.
    """

    start: float = 0.0
    slower: float = 1.0

    def seconds(self, simulated: float) -> float:
        """Time of a run at this pace that is simulated to take so long [s]."""
        return self.start + self.slower * simulated

    def __str__(self) -> str:
        if self == Earlier():
            return "as simulated"
        start = f"{roughly(self.start)} to start"
        return f"at the pace of the last one: {start}, then {times(self.slower)} times as long as simulated"


class Course:
    """The course of one run: the share of its tokens that are done, and its time by that.

    Parameters
    ----------
    prompts : int
        Prompt tokens of all requests.
    simulated : float
        Simulated time of the whole run, NaN without a simulation [s].
    wait : float
        Time until the first request arrives [s].

    Attributes
    ----------
    share : float
        Share of all tokens that are done, those of the iteration under way in proportion.
    before, worked : float
        Time before the run's clock began and by it, without pauses; until an iteration begins, all is before [s].
    """

    def __init__(self, prompts: int, simulated: float, wait: float = 0.0) -> None:
        self._prompts = prompts
        self._simulated = simulated
        self._wait = wait
        self.share = 0.0
        self.before = 0.0
        self.worked = 0.0

    def note(self, under_way: UnderWay | None, progress: Progress, elapsed: float) -> None:
        """Note the progress at some time since the start [s]."""
        prefill = float(progress.prefill)
        if under_way is not None and under_way.iteration > progress.iterations:  # else it has ended meanwhile
            prefill += under_way.share * under_way.prefill
        done = min(prefill, self._prompts) + progress.emitted
        share = done / max(1, self._prompts + progress.total)
        self.share = min(max(share, self.share), 1.0)
        worked = progress.seconds
        if under_way is not None and not progress.iterations:
            worked = self._wait + under_way.seconds
        if not self.worked:
            self.before = max(0.0, elapsed - worked)
        self.worked = max(self.worked, worked)

    @property
    def taken(self) -> float:
        """Time so far, without pauses [s]."""
        return self.before + self.worked

    @property
    def left(self) -> float:
        """Time until its end at the pace so far; 0 while nothing tells it [s]."""
        return (self.worked - self._wait) * (1 - self.share) / self.share if self.share else 0.0

    @property
    def slower(self) -> float:
        """Time by the run's clock so far over the simulated time of all; NaN without a simulation."""
        return self.worked / self._simulated if self._simulated > 0 else math.nan

    @property
    def whole(self) -> float:
        """Time by the run's clock of all, at the pace so far, over the simulated time; NaN without a simulation."""
        return (self.worked + self.left) / self._simulated if self._simulated > 0 else math.nan


class Pace:
    """The time that runs take one after the other.

    Before one has ended it is what is expected; then this counts in proportion to what was measured. A run of which
    nothing is expected counts as the mean of the others.

    Parameters
    ----------
    expected : sequence of float
        Time of each run by its simulation and the pace of earlier runs, NaN without a simulation [s].
    """

    def __init__(self, expected: Sequence[float]) -> None:
        known = [seconds for seconds in expected if not math.isnan(seconds)]
        usual = sum(known) / len(known) if known else 1.0
        self._expected = [usual if math.isnan(seconds) else seconds for seconds in expected]
        self._ended = 0.0
        self._taken = 0.0
        self._factor = 1.0 if known else math.nan

    def end(self, number: int, seconds: float) -> None:
        """Note that a run has ended after so much time [s]."""
        self._ended += self._expected[number]
        self._taken += seconds
        self._factor = self._taken / self._ended

    def left(self, number: int, gone: float = 0.0, more: float = 0.0) -> float:
        """Time until the last run has ended; NaN if nothing tells it yet [s].

        One has gone on for so long, and needs at least so much more by its own progress.
        """
        now, *later = self._expected[number:]
        if math.isnan(self._factor) and not more:
            return math.nan
        factor = 0.0 if math.isnan(self._factor) else self._factor
        whole = max(factor * now, gone + more)
        factor = max(factor, (self._taken + whole) / (self._ended + now))
        return whole - gone + factor * sum(later)


def times(factor: float) -> str:
    """A factor in two digits, or whole: ``1.2``, ``11``, ``1,200``."""
    return f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"
