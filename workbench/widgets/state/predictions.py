"""Predictions at any settings, kept for when they are asked for again."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from time import perf_counter
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
SOON = 0.15
"""Longest simulation that is to follow a slider [s]."""
PATIENT = 2.5
"""Longest simulation at rest [s]."""
_PROBED = 200
"""Iterations of the probe that times a simulation; a shorter simulation needs no probe."""
_FILLINGS = 2
"""Number of times that a sample fills the cache at least, however long it takes."""
_FEW = 32
"""Pictures and prices that are kept; they are larger, and of the present settings alone."""


class Refused(NamedTuple):
    """No prediction, and the error that says the reason."""

    error: WorkbenchError

    @property
    def why(self) -> str:
        """The reason, which takes a search for what would fit where a memory is too small."""
        return str(self.error)


class Predictions:
    """Bounds, simulations and what is shown beside them. An answer is a result, or the reason why there is none."""

    def __init__(self) -> None:
        loader().hasten()
        self._scenario = lru_cache(maxsize=64)(_scenario)
        self._bounds = lru_cache(maxsize=_KEPT)(self._asking(bound))
        self._simulations = lru_cache(maxsize=_KEPT)(self._asking(_simulated))
        self._paces = dict[Hashable, float]()
        self._samples = lru_cache(maxsize=_KEPT)(self._sample_of)
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

        `soon` allows less time for it.
        """
        asked = settings.on(schedule=schedule)
        return self._simulations(asked.on(sample=self._samples(asked, soon, loader().there)))

    def rate(self, settings: Settings, schedule: Schedule, *, soon: bool = False) -> float:
        """Output tokens/s of a simulation; of a sample at most the bound of all. NaN for none."""
        found = self.simulation(settings, schedule, soon=soon)
        if isinstance(found, Refused):
            return math.nan
        return self.of_all(found, settings.on(schedule=schedule))

    def of_all(self, found: Result, settings: Settings) -> float:
        """See `rate`."""
        requests = int(found.facts["requests"])
        if requests == settings.requests:
            return found.gen_tok_s
        whole = self.bound(settings)
        return found.gen_tok_s if isinstance(whole, Refused) else min(found.gen_tok_s, whole.gen_tok_s)

    def forget(self) -> None:
        """Drop everything that is kept."""
        for kept in (self._scenario, self._bounds, self._simulations, self._samples, self._ledgers, self._lanes):
            kept.cache_clear()
        self._played.cache_clear()

    def _sample_of(self, settings: Settings, soon: bool, _: bool) -> int:
        """Number of the requests that are simulated, or 0 for all.

        If all would take too long, some stay, evenly from the first to the last, that fill the cache several times
        over: where many iterations are needed, few requests run at once, and a sample of them runs as all of them do.
        A probe with a few of them tells how long all take.
        """
        bound = self.bound(settings)
        if isinstance(bound, Refused) or bound.iterations <= _PROBED or len(settings.workload.arrival):
            return 0
        seconds = bound.iterations * self._pace(settings, bound.iterations)
        longest = SOON if soon else PATIENT
        least = settings.requests * _FILLINGS * settings.output_len / bound.iterations
        wanted = max(settings.requests * longest / seconds, least) if seconds else settings.requests
        return 0 if wanted >= settings.requests else max(1, round(wanted))

    def _pace(self, settings: Settings, iterations: int) -> float:
        """Simulation time per iteration of the bound [s], probed once for each wiring and schedule."""
        wired = (settings.pipeline, settings.model, settings.machine, settings.schedule, settings.scheduler)
        key = (*wired, loader().there)
        if key not in self._paces:
            few = max(1, round(settings.requests * _PROBED / iterations))
            taken = self._timed(settings.on(sample=few))
            if taken < SOON:  # the first time, tasks are lowered and priced too
                taken = self._timed(settings.on(sample=few))
            self._paces[key] = taken * settings.requests / few / iterations
        return self._paces[key]

    def _timed(self, settings: Settings) -> float:
        """Time of a simulation that is not kept [s]; 0 if there is none."""
        scenario = self._scenario(settings)
        begin = perf_counter()
        try:
            if isinstance(scenario, Scenario):
                simulate(scenario, settings.schedule)
        except WorkbenchError:
            return 0.0
        return perf_counter() - begin

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
                return Refused(error.with_traceback(None))  # its frames would be kept

        return ask


def _scenario(settings: Settings) -> Scenario | Refused:
    try:
        return settings.predicted()
    except WorkbenchError as error:
        return Refused(error.with_traceback(None))


def _played(scenario: Scenario, schedule: Schedule) -> Timeline:
    return simulate(scenario, schedule, detail=Detail.TASK).timeline


def _simulated(scenario: Scenario, schedule: Schedule) -> Result:
    """A simulation without what takes memory: nothing that is kept here shows it."""
    found = simulate(scenario, schedule)
    return replace(found, timeline=Timeline(), latencies=Latencies(), steps=Iterations())
