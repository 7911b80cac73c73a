"""The decision of a search: the best on a sample and the named systems simulated whole, and candidates counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product

from workbench.analysis.optimize.ceilings import Ceilings
from workbench.analysis.optimize.objective import Objective
from workbench.analysis.optimize.optimum import Choice, Counts, Optimum
from workbench.analysis.optimize.search import every_named
from workbench.analysis.optimize.space import Group, Space
from workbench.analysis.optimize.trials import Budget, Trial, Trials
from workbench.analysis.optimize.wirings import Wiring
from workbench.core.errors import ScenarioError
from workbench.perfmodels import bound

_FINALISTS = 3
CLEARLY = 1.01
"""Ratio to the best named system from which on something else is the answer: less is within what a simulation errs."""
_OTHERS = 4
"""Choices that are handed over beside the best."""


class Decision:
    """The answer of trials on a sample and of trials on the whole workload, which may be the same."""

    def __init__(self, space: Space, objective: Objective, trials: Trials, whole: Trials, ceilings: Ceilings) -> None:
        self._space = space
        self._objective = objective
        self._trials = trials
        self._whole = whole
        self._ceilings = ceilings
        self._named = list(every_named(space))

    def simulate_whole(self) -> None:
        """Simulate every named system whole that may be the best of them, whatever time that takes, and the finalists.

        Raises
        ------
        StoppedError
            If the budget is spent.
        """
        ranked = _ranked(self._trials.all.values())
        named = {candidate for _, candidate in self._named}
        known = [trial.candidate for trial in ranked if trial.candidate in named]
        for candidate in known:
            self._whole.of(candidate, timed=False)
        for trial in ranked[:_FINALISTS]:
            self._whole.of(trial.candidate)

    def optimum(self, budget: Budget, ended: str) -> Optimum:
        """The answer.

        Raises
        ------
        ScenarioError
            If nothing that was tried fits.
        """
        ranked = _ranked(self._whole.all.values())
        if not ranked:
            raise ScenarioError(
                f"no placement of {self._space.scenario.model.name} fits {self._space.scenario.machine.name!r}; "
                "wb.fits(scenario, schedule) tells what one needs, and the nearest change."
            )
        shown = _distinct(self._named_first(ranked))
        choices = [self._choice("", trial) for trial in shown[: 1 + _OTHERS]]
        best = choices[0]
        return Optimum(
            self._objective,
            best,
            bound(best.scenario, best.schedule),
            tuple(choices[1:]),
            self._systems(),
            self._counts(ranked[0].score, budget),
            budget.elapsed,
            ended,
        )

    def _named_first(self, ranked: list[Trial]) -> list[Trial]:
        """The trials with the best named system first, unless another one is clearly better."""
        named = {candidate for _, candidate in self._named}
        known = next((trial for trial in ranked if trial.candidate in named), None)
        if known is None or self._objective.ratio(ranked[0].score, known.score) >= CLEARLY:
            return ranked
        return [known, *(trial for trial in ranked if trial is not known)]

    def _choice(self, system: str, trial: Trial) -> Choice:
        fitted = trial.fitted
        if fitted is None:
            raise ScenarioError(f"{trial.candidate} does not fit; give the machine more memory.")
        return Choice(system, fitted.what, fitted.scenario, fitted.schedule, trial.most, trial.result, trial.score)

    def _systems(self) -> tuple[Choice, ...]:
        """Each named system under the scheduler that is best for it, or that allows it most."""
        found = dict[tuple[str, Wiring], Trial]()
        for named, candidate in self._named:
            trial = self._whole.all.get(candidate)
            if trial is None or trial.fitted is None:
                continue
            key = (named.system, candidate.group.wiring)
            if key not in found or (trial.score, trial.most) > (found[key].score, found[key].most):
                found[key] = trial
        choices = [self._choice(system, trial) for (system, _), trial in found.items()]
        return tuple(sorted(choices, key=lambda choice: (-choice.score, -choice.most)))

    def _counts(self, best: float, budget: Budget) -> Counts:
        """Candidates of the space by what became of them; whole groups are excluded as far as time is left."""
        space = self._space
        tried = [trial for trial in self._trials.all.values() if trial.candidate in space]
        simulated = sum(trial.result is not None for trial in tried)
        refused = sum(trial.fitted is None for trial in tried)
        known = self._trials is self._whole
        excluded = sum(known and trial.fitted is not None and trial.result is None for trial in tried)
        counted = defaultdict[Group, int](int)
        for trial in tried:
            counted[trial.candidate.group] += known or trial.result is not None or trial.fitted is None
        for group in self._excluded(best, budget):
            excluded += space.whos(group) - counted[group]
        return Counts(len(space), refused, excluded, simulated, budget.used)

    def _excluded(self, best: float, budget: Budget) -> Iterator[Group]:
        """Groups of which, even with the largest cache, no candidate is better than the best."""
        space = self._space
        for wiring in space.wirings:
            for fill, block in product(space.fills_of(wiring), space.blocks):
                groups = [Group(wiring, fill, cache, block) for cache in space.caches]
                largest = max(groups, key=self._ceilings.blocks)
                if budget.elapsed < budget.seconds and self._ceilings.of_group(largest) <= best:
                    yield from groups


def _ranked(trials: Iterable[Trial]) -> list[Trial]:
    """The trials with a simulation, the best first."""
    return sorted((trial for trial in trials if trial.result is not None), key=lambda trial: -trial.score)


def _distinct(trials: Iterable[Trial]) -> list[Trial]:
    """The trials without those of the same placement and schedule as one before."""
    found = dict[object, Trial]()
    for trial in trials:
        fitted = trial.fitted
        found.setdefault(fitted and (fitted.what, fitted.schedule), trial)
    return list(found.values())
