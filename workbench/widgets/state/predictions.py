"""Predictions at any settings, kept for when they are asked for again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from workbench.analysis.costs import Costs, costs
from workbench.analysis.shadow_prices import ShadowPrices, shadow_prices
from workbench.core.errors import WorkbenchError
from workbench.core.latency import Latencies
from workbench.core.result import Iterations, Result
from workbench.core.timeline import Timeline
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.serving import fits
from workbench.serving.ledger import Ledger
from workbench.simulate import Detail, simulate, typical_iteration
from workbench.simulate.loading import loader
from workbench.widgets.state.settings import Settings

_Answer = TypeVar("_Answer")
_KEPT = 512
"""Results that are kept."""
_SOON = 6_000
"""Most iterations of a simulation that is to follow a slider; they take some 0.1 s."""
_PATIENT = 60_000
"""Most iterations of a simulation at rest; they take some 1 s."""
_SLOWER = 8
"""Factor by which a simulation takes longer until its kernels are loaded."""
_FILLINGS = 8
"""Number of times that a sample fills the cache at least; then it is within 6 % of all requests."""
_FEW = 32
"""Pictures and prices that are kept; they are larger, and of the present settings alone."""


class Refused(NamedTuple):
    """The reason why there is no prediction."""

    why: str


class Predictions:
    """Bounds, simulations and what is shown beside them. An answer is a result, or the reason why there is none."""

    def __init__(self) -> None:
        loader().hasten()
        self._scenario = lru_cache(maxsize=64)(_scenario)
        self._bounds = lru_cache(maxsize=_KEPT)(self._asking(bound))
        self._simulations = lru_cache(maxsize=_KEPT)(self._asking(_simulated))
        self._ledgers = lru_cache(maxsize=_FEW)(self._asking(fits))
        self._lanes = lru_cache(maxsize=_FEW)(self._asking(typical_iteration))
        self._played = lru_cache(maxsize=1)(self._asking(_played))
        self._prices = lru_cache(maxsize=_FEW)(self._asking(shadow_prices))
        self._costs = lru_cache(maxsize=_FEW)(self._asking(lambda scenario, _: costs(scenario)))

    def scenario(self, settings: Settings) -> Scenario | Refused:
        """The scenario of these settings."""
        return self._scenario(settings)

    def bound(self, settings: Settings) -> Result | Refused:
        """The bound."""
        return self._bounds(settings)

    def simulation(self, settings: Settings, schedule: Schedule, *, soon: bool = False) -> Result | Refused:
        """The simulation under a schedule, without its timeline; of a sample of its requests if it would take long.

        `soon` allows fewer iterations, see `sample_of`. A sample has fewer requests than the settings.
        """
        asked = settings.on(schedule=schedule)
        return self._simulations(asked.on(sample=self.sample_of(asked, soon=soon)))

    def rate(self, settings: Settings, schedule: Schedule, *, soon: bool = False) -> float:
        """Output tokens/s of a simulation; for a sample, its share of its own bound times that of all. NaN for none."""
        found = self.simulation(settings, schedule, soon=soon)
        if isinstance(found, Refused):
            return math.nan
        return self.of_all(found, settings.on(schedule=schedule))

    def of_all(self, found: Result, settings: Settings) -> float:
        """See `rate`."""
        requests = int(found.facts["requests"])
        if requests == settings.requests:
            return found.gen_tok_s
        mine, whole = self.bound(settings.on(sample=requests)), self.bound(settings)
        if isinstance(mine, Refused) or isinstance(whole, Refused):
            return found.gen_tok_s
        return found.gen_tok_s / mine.gen_tok_s * whole.gen_tok_s

    def forget(self) -> None:
        """Drop everything that is kept."""
        for kept in (self._scenario, self._bounds, self._simulations, self._ledgers, self._lanes, self._played):
            kept.cache_clear()

    def sample_of(self, settings: Settings, *, soon: bool) -> int:
        """Number of the requests that are simulated: all, or the first ones if all take too many iterations.

        So many stay, evenly from the first to the last, that the cache is filled several times over: where many
        iterations are needed, few requests run at once, and a sample of them runs as all of them do. 0 stands for all.
        """
        bound = self.bound(settings)
        if isinstance(bound, Refused):
            return 0
        most = _SOON if soon else _PATIENT
        if not loader().there:
            most //= _SLOWER
        most = max(most, _FILLINGS * settings.output_len)
        if bound.iterations <= most or len(settings.workload.arrival):
            return 0
        return max(1, round(settings.requests * most / bound.iterations))

    def ledger(self, settings: Settings) -> Ledger | Refused:
        """The needs in both memories."""
        return self._ledgers(settings)

    def lanes(self, settings: Settings) -> Timeline | Refused:
        """The typical iteration under the chosen schedule."""
        return self._lanes(settings)

    def played(self, settings: Settings) -> Timeline | Refused:
        """Every task of the simulation under the chosen schedule."""
        return self._played(settings)

    def prices(self, settings: Settings) -> ShadowPrices | Refused:
        """The gains from twice as much of each resource, by the bound."""
        return self._prices(settings)

    def costs(self, settings: Settings) -> Costs | Refused:
        """The costs of stages and transfers."""
        return self._costs(settings)

    def _asking(self, read: Callable[[Scenario, Schedule], _Answer]) -> Callable[[Settings], _Answer | Refused]:
        """A reader of settings."""

        def ask(settings: Settings) -> _Answer | Refused:
            scenario = self._scenario(settings)
            if isinstance(scenario, Refused):
                return scenario
            try:
                return read(scenario, settings.schedule)
            except WorkbenchError as error:
                return Refused(str(error))

        return ask


def _scenario(settings: Settings) -> Scenario | Refused:
    try:
        return settings.predicted()
    except WorkbenchError as error:
        return Refused(str(error))


def _played(scenario: Scenario, schedule: Schedule) -> Timeline:
    return simulate(scenario, schedule, detail=Detail.TASK).timeline


def _simulated(scenario: Scenario, schedule: Schedule) -> Result:
    """A simulation without what takes memory: nothing that is kept here shows it."""
    found = simulate(scenario, schedule)
    return replace(found, timeline=Timeline(), latencies=Latencies(), steps=Iterations())
