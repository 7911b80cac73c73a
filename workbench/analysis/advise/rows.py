"""Rows of an advice: one placement for one load, with its memories and its speeds, and the worth of more hardware."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.core.result import Result
from workbench.core.units import format_bytes, format_seconds
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.serving.ledger import Account, Ledger
from workbench.workload import Workload

FACTOR = 2.0
"""Factor on each resource whose worth is told."""


@dataclass(frozen=True)
class Row:
    """One placement for one load.

    Attributes
    ----------
    placement, known_as : str
        The placement in words, and the systems or options that place a model so.
    requests : int
        Requests of the load.
    scenario, schedule
        The same as a scenario and a schedule, from which one can go on. The scenario has as many of the requests as the
        KV cache holds at a time: all, or else a part of them, behind which the next parts are served alike.
    ledger : Ledger
        The needs in both memories.
    bound, simulated : Result or None
        The most that this hardware allows, and the simulation; None if it does not fit.
    """

    placement: str
    known_as: str
    requests: int
    scenario: Scenario
    schedule: Schedule
    ledger: Ledger
    bound: Result | None = None
    simulated: Result | None = None

    @property
    def fits(self) -> bool:
        """True if it fits both memories."""
        return bool(self.ledger)

    @property
    def at_once(self) -> int:
        """Requests that are served at a time."""
        return len(self.scenario.workload)

    @property
    def tightest(self) -> Account:
        """The memory of which the smallest share is left, or the largest is missing."""
        return min((self.ledger.gpu, self.ledger.host), key=lambda account: account.left / account.capacity)

    @property
    def tok_s(self) -> float:
        """Simulated output tokens per second, with the time of the prompts; 0 if it does not fit."""
        return self.simulated.gen_tok_s if self.simulated else 0.0

    def cells(self) -> tuple[str, ...]:
        """Cells of the table behind the mark of the best."""
        fewer = f", {self.at_once} at a time" if self.at_once < self.requests else ""
        left = self.tightest.left
        room = f"{self.tightest.name} {format_bytes(abs(left))} {'short' if left < 0 else 'left'}"
        words = (self.placement + fewer, self.known_as, room)
        if self.bound is None or self.simulated is None:
            return (*words, "", "", "", "")
        later = digits(1 / self.simulated.tbt) if self.simulated.tbt > 0 else ""
        first = format_seconds(self.simulated.ttft)
        return (*words, digits(self.bound.gen_tok_s), digits(self.tok_s), first, later)


@dataclass(frozen=True)
class Worth:
    """The worth of more of one resource.

    Attributes
    ----------
    resource : str
    gain : float
        Simulated output tokens/s of the best placement with `FACTOR` times as much, over those without. Memory that
        faster devices need for larger batches counts as given.
    placement : str
        The best placement then. Only more GPU memory is tried with other placements.
    """

    resource: str
    gain: float
    placement: str


def best(rows: Iterable[Row]) -> Row | None:
    """The row with most simulated output tokens per second of those that fit; the first of equal ones."""
    return max((row for row in rows if row.fits), key=lambda row: row.tok_s, default=None)


def lengths(workload: Workload) -> tuple[int, int]:
    """Prompt and output length of each of the equal requests."""
    return int(workload.prompt_len[0]), int(workload.output_len[0])


def digits(rate: float) -> str:
    """A rate in three digits, or in all before the point."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
