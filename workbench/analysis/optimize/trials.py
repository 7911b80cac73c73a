"""Trials of candidates: fitted into the memories, excluded if their bound says so, else simulated, each once."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from workbench.analysis.optimize.estimate import estimated
from workbench.analysis.optimize.fitting import Fitted, Fitting
from workbench.analysis.optimize.objective import Objective
from workbench.analysis.optimize.space import Candidate, scheduler_of
from workbench.core.errors import StoppedError, WorkbenchError
from workbench.core.result import Result
from workbench.core.units import format_seconds
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.serving.capacity import largest_batch
from workbench.serving.prepared import price
from workbench.simulate import simulate
from workbench.workload import Workload


@dataclass
class Budget:
    """Seconds and simulations that a search may take.

    Attributes
    ----------
    seconds, simulations : float
    used : int
        Simulations so far.
    """

    seconds: float
    simulations: float
    used: int = 0
    _began: float = field(default_factory=monotonic)

    def check(self, share: float = 1.0, *, timed: bool = True) -> None:
        """Stop the search if all simulations are used, or a share of the time, where that counts.

        Raises
        ------
        StoppedError
        """
        if self.used >= self.simulations:
            raise StoppedError(f"its {self.simulations:g} simulations are used")
        if timed and self.elapsed >= share * self.seconds:
            raise StoppedError(f"its {format_seconds(self.seconds)} are over")

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return monotonic() - self._began


@dataclass(frozen=True)
class Trial:
    """A candidate that was tried.

    Attributes
    ----------
    candidate : Candidate
    fitted : Fitted or None
        None if it does not fit, or does not go together.
    most : float
        The score that its bound allows.
    result : Result or None
        Its simulation; None if it was excluded because its bound is no better than a result that was there.
    score : float
        The score of the simulation.
    """

    candidate: Candidate
    fitted: Fitted | None = None
    most: float = -math.inf
    result: Result | None = None
    score: float = -math.inf


class Trials:
    """Every trial of one workload, and the best one."""

    def __init__(
        self, scenario: Scenario, workload: Workload, objective: Objective, budget: Budget, share: float, bar: Any
    ) -> None:
        self._workload = workload
        self._objective = objective
        self._budget = budget
        self._share = share
        self._bar = bar
        self._fitting = Fitting(scenario)
        self._simulated = dict[Hashable, Result]()
        self._placed = dict[Hashable, Scenario]()
        self._guesses = dict[Candidate, float]()
        self.all = dict[Candidate, Trial]()
        self.best: Trial | None = None

    def of(self, candidate: Candidate, *, timed: bool = True) -> Trial:
        """The trial of a candidate, which is simulated if its bound is better than the best score.

        The first one is tried whatever the budget says; one that is not `timed`, whatever the time says.

        Raises
        ------
        StoppedError
            If the budget is spent.
        """
        least = self._best_score
        known = self.all.get(candidate)
        if known is None or (known.result is None and known.most > least):
            self.all[candidate] = trial = self._tried(candidate, least, timed)
            if trial.score > self._best_score:
                self.best = trial
        return self.all[candidate]

    def guess(self, candidate: Candidate) -> float:
        """The score that an estimate tells; minus infinity if there is none.

        Candidates that differ in their schedules alone are compared with the same memories, those of the first of them.

        Raises
        ------
        StoppedError
            If the budget is spent.
        """
        if candidate not in self._guesses:
            self._check(timed=True)
            self._guesses[candidate] = self._guessed(candidate)
        return self._guesses[candidate]

    def ratio(self, score: float, other: float) -> float:
        """Ratio by which one score is better than another."""
        return self._objective.ratio(score, other)

    @property
    def _best_score(self) -> float:
        return -math.inf if self.best is None else self.best.score

    def _check(self, *, timed: bool) -> None:
        if self.best is not None:
            self._budget.check(self._share, timed=timed)

    def _guessed(self, candidate: Candidate) -> float:
        alike = (candidate.group, candidate.scheduler, candidate.budget)
        try:
            if alike not in self._placed:
                self._placed[alike] = self._fitting.fit(candidate).scenario.on(workload=self._workload)
            scenario = self._placed[alike].on(scheduler=scheduler_of(candidate))
            return self._objective.guess(estimated(scenario, candidate.schedule))
        except WorkbenchError:
            return -math.inf

    def _tried(self, candidate: Candidate, least: float, timed: bool) -> Trial:
        self._check(timed=timed)
        try:
            fitted = self._fitting.fit(candidate)
            scenario = fitted.scenario.on(workload=self._workload)
            limit = bound(scenario, fitted.schedule, tokens=most_tokens(scenario, fitted.schedule))
        except WorkbenchError:
            return Trial(candidate)
        most = self._objective.most(limit)
        if most <= least:
            return Trial(candidate, fitted, most)
        result = self._simulate(fitted, scenario)
        score = self._objective.score(result, self._workload)
        return Trial(candidate, fitted, most, result, score)

    def _simulate(self, fitted: Fitted, scenario: Scenario) -> Result:
        """Simulate what several candidates may stand for once."""
        key = (scenario.pipeline, repr(scenario.memory), scenario.scheduler, fitted.schedule)
        if key not in self._simulated:
            self._simulated[key] = simulate(scenario, fitted.schedule)
            self._budget.used += 1
            self._bar.update()
        return self._simulated[key]


def most_tokens(scenario: Scenario, schedule: Schedule) -> float:
    """Most tokens of an iteration under the scenario's scheduler."""
    return float(largest_batch(scenario, schedule, price(scenario, schedule).token_budget).tokens)
