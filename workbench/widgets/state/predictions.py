"""Predictions at any settings, kept for when they are asked for again."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter
from typing import NamedTuple, TypeVar

from workbench.analysis.costs import Costs, costs
from workbench.analysis.shadow_prices import ShadowPrices, shadow_prices
from workbench.core.errors import CapacityError, StoppedError, WorkbenchError
from workbench.core.latency import Latencies
from workbench.core.result import Iterations, Result
from workbench.core.timeline import Timeline
from workbench.perfmodels import bound
from workbench.perfmodels.bound import least_iterations
from workbench.scenario import Scenario
from workbench.scheduler.base import most_running
from workbench.schedules import Schedule, Sequential
from workbench.serving import fits
from workbench.serving.ledger import Ledger
from workbench.serving.prepared import price
from workbench.simulate import Detail, simulate, typical_iteration
from workbench.simulate.loading import loader
from workbench.widgets.parts.recent import Recent
from workbench.widgets.state.settings import Settings, full_link

_Answer = TypeVar("_Answer")
_KEPT = 512
"""Results that are kept."""
SOON = 0.04
"""Longest simulation that is to follow a slider [s]."""
FULL = 0.15
"""Longest simulation of a sample that fills the cache [s]."""
PATIENT = 2.5
"""Longest simulation at rest [s]."""
_FILLINGS = 2
"""Number of times that a sample fills the cache, if there is time for it."""
_FEW = 32
"""Pictures and prices that are kept; they are larger, and of the present settings alone."""
_ENOUGH = 1e9
"""KV capacity that holds the longest request of any workload [tokens]."""
_ANY = Sequential()
"""Stands for the schedule where none is asked for."""


class Refused(NamedTuple):
    """No prediction, the error that says the reason, and a function that says at once what memory is too small."""

    error: WorkbenchError
    shortage: Callable[[], str] = str

    @property
    def why(self) -> str:
        """The reason, which takes a search for what would fit where a memory is too small."""
        return str(self.error)

    def told(self, *, searched: bool) -> str:
        """The reason; unless `searched`, without the search for what would fit."""
        return self.why if searched else self.shortage() or self.why


class Predictions:
    """Bounds, simulations and what is shown beside them. An answer is a result, or the reason why there is none."""

    def __init__(self) -> None:
        loader().hasten()
        self._scenario = lru_cache(maxsize=_KEPT)(_scenario)
        self._refusals = Recent[Settings, tuple[Refused | None]](_KEPT)
        self._bounds = lru_cache(maxsize=_KEPT)(self._asking(bound))
        self._simulations = Recent[Settings, Result | Refused](_KEPT)
        self._answers = Recent[tuple[Settings, bool], Result | Refused](_KEPT)
        self._paces = Recent[tuple[Hashable, bool], float](_KEPT)
        self._ledgers = lru_cache(maxsize=_FEW)(self._asking(fits))
        self._lanes = lru_cache(maxsize=_FEW)(self._asking(typical_iteration))
        self._played = lru_cache(maxsize=1)(self._asking(_played))
        self._prices = Recent[Settings, ShadowPrices | Refused](_FEW)
        self._costs = lru_cache(maxsize=_FEW)(self._asking(lambda scenario, _: costs(scenario)))

    def scenario(self, settings: Settings) -> Scenario | Refused:
        """The scenario of these settings, one for all schedules."""
        return self._scenario(settings.on(schedule=_ANY))

    def refused(self, settings: Settings) -> Refused | None:
        """The reason why these settings go together in no schedule or scheduler, however much memory there is."""
        roomy = _roomy(settings)
        found = self._refusals.get(roomy)
        if found is None:
            found = (self._refused(settings) and self._refused(roomy),)  # prices of the first are wanted anyway
            self._refusals[roomy] = found
        return found[0]

    def refused_before(self, settings: Settings) -> Refused | None:
        """The reason that `refused` gives, if it has been asked already; nothing is computed."""
        found = self._refusals.get(_roomy(settings))
        return None if found is None else found[0]

    def bound(self, settings: Settings) -> Result | Refused:
        """The bound."""
        return self._bounds(settings)

    def simulation(
        self, settings: Settings, schedule: Schedule, *, soon: bool = False, until: Callable[[], bool] = lambda: False
    ) -> Result | Refused:
        """The simulation under a schedule, without its timeline; of a sample of its requests if it would take long.

        `soon` allows less time for it, and returns what was simulated without `soon`, if that was asked before. The
        same question has the same answer, until all requests have been simulated.

        Raises
        ------
        StoppedError
            If `until`, which is asked meanwhile, becomes true.
        """
        asked = settings.on(schedule=schedule)
        longest = SOON if soon else PATIENT
        found = self._simulations.get(asked) or self._answers.get((asked, False)) or self._answers.get((asked, soon))
        while found is None:
            number = self._sample(asked, longest)
            due = math.inf if number == 1 else perf_counter() + max(2 * longest, 2 * FULL if number else FULL)
            found = self._simulated(asked.on(sample=number), lambda due=due: until() or perf_counter() > due)  # type: ignore[misc]
            if found is None and until():
                raise StoppedError("the simulation was overtaken.")
        self._answers[asked, soon] = found
        return found

    def rate(
        self, settings: Settings, schedule: Schedule, *, soon: bool = False, until: Callable[[], bool] = lambda: False
    ) -> float:
        """Output tokens/s of a simulation; of a sample at most the bound of all. NaN for none."""
        found = self.simulation(settings, schedule, soon=soon, until=until)
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

    def is_small(self, found: Result, settings: Settings) -> bool:
        """True if a simulation is of a sample of fewer requests than fill the cache once, whose rate says little."""
        scenario = self.scenario(settings)
        requests = int(found.facts["requests"])
        if requests == settings.requests or isinstance(scenario, Refused):
            return False
        return requests < _filling(settings, _least_iterations(scenario))

    def forget(self) -> None:
        """Drop everything that is kept."""
        for kept in (self._scenario, self._bounds, self._ledgers, self._lanes):
            kept.cache_clear()
        self._played.cache_clear()
        for recent in (self._refusals, self._simulations, self._answers):
            recent.clear()

    def _sample(self, settings: Settings, longest: float) -> int:
        """Number of the requests that are simulated, or 0 for all.

        If all would take longer than `longest` [s], some stay, evenly from the first to the last: as many as fill the
        cache several times over, since where many iterations are needed few requests run at once, and a sample of them
        runs as all of them do. If these take longer than `FULL`, it is fewer still. The pace of samples says nothing of
        all: their few iterations are unlike one another and take longer each.
        """
        wired = _wired(settings)
        whole = self._paces.get((wired, True))
        scenario = self.scenario(settings)
        if whole is None or isinstance(scenario, Refused) or len(settings.workload.arrival):
            return 0
        iterations = _least_iterations(scenario)
        if iterations * whole <= longest:
            return 0
        in_time = settings.requests * longest / (iterations * (self._paces.get((wired, False)) or whole))
        filling = _FILLINGS * _filling(settings, iterations)
        return min(settings.requests, max(1, round(max(in_time, min(filling, in_time * FULL / longest)))))

    def _simulated(self, settings: Settings, until: Callable[[], bool]) -> Result | Refused | None:
        """A simulation of the sample of these settings, which is kept; None if it was stopped.

        One of a sample that has all requests is kept as the whole.
        """
        found = self._simulations.get(settings)
        if found is not None:
            return found
        begin = perf_counter()
        found = self._asking(lambda scenario, schedule: _simulated(scenario, schedule, until))(settings)
        if isinstance(found, Result):
            self._note_pace(settings, found, perf_counter() - begin)
            if found.stopped:
                return None
        whole = settings.sample == settings.requests
        self._simulations[settings.on(sample=0) if whole else settings] = found
        return found

    def _note_pace(self, settings: Settings, found: Result, seconds: float) -> None:
        """Note the simulation time per iteration of the bound [s]; that of one that was stopped at least doubles.

        One that was stopped may have spent its iterations on prompts, so that outputs alone tell too little of them.
        """
        scenario = self.scenario(settings)
        if isinstance(scenario, Scenario):
            served = scenario.workload.as_served
            outputs = served.output_len.sum()
            shares = (found.generated / outputs, found.processed / (served.prompt_len.sum() + outputs))
            share = sum(shares) / len(shares) if found.stopped else 1.0
            pace = seconds / max(1.0, share * _least_iterations(scenario))
            kind = _wired(settings), not settings.sample
            before = self._paces.get(kind) or 0.0
            self._paces[kind] = max(pace, 2 * before) if found.stopped else pace

    def ledger(self, settings: Settings) -> Ledger | Refused:
        """The needs in both memories."""
        return self._ledgers(settings)

    def lanes(self, settings: Settings) -> Timeline | Refused:
        """The typical iteration under the chosen schedule."""
        return self._lanes(settings)

    def played(self, settings: Settings) -> Timeline | Refused:
        """Every task of the simulation under the chosen schedule."""
        return self._played(settings)

    def prices(self, settings: Settings, until: Callable[[], bool] = lambda: False) -> ShadowPrices | Refused:
        """The gains from twice as much of each resource: simulated, or of the bound where that would take long.

        Raises
        ------
        StoppedError
            If `until`, which is asked meanwhile, becomes true.
        """
        found = self._prices.get(settings)
        if found is None:
            reader = partial(_played_to_the_end, until=until) if self._is_quick(settings) else bound
            found = self._asking(partial(shadow_prices, reader=reader))(settings)
            if isinstance(found, Refused) and isinstance(found.error, StoppedError):
                raise found.error
            self._prices[settings] = found
        return found

    def _is_quick(self, settings: Settings) -> bool:
        """True if all requests are known to be simulated in so little time that four more simulations may follow."""
        pace = self._paces.get((_wired(settings), True))
        scenario = self.scenario(settings)
        return pace is not None and isinstance(scenario, Scenario) and pace * _least_iterations(scenario) < PATIENT / 5

    def costs(self, settings: Settings) -> Costs | Refused:
        """The costs of stages and transfers."""
        return self._costs(settings)

    def _asking(self, read: Callable[[Scenario, Schedule], _Answer]) -> Callable[[Settings], _Answer | Refused]:
        """A reader of settings."""

        def ask(settings: Settings) -> _Answer | Refused:
            scenario = self.scenario(settings)
            if isinstance(scenario, Refused):
                return scenario
            try:
                return read(scenario, settings.schedule)
            except CapacityError as error:
                verdict = partial(self._verdict, settings, error.with_traceback(None))
                return Refused(CapacityError(verdict), partial(self._shortage, settings))
            except WorkbenchError as error:
                return Refused(error.with_traceback(None))  # its frames would be kept

        return ask

    def _verdict(self, settings: Settings, error: CapacityError) -> str:
        """The sentence on a memory that is too small: one search for what would fit serves all who ask."""
        found = self.ledger(settings)
        return str(error) if isinstance(found, Refused) or found else found.verdict

    def _shortage(self, settings: Settings) -> str:
        """The memories that are too small, in words; empty if the ledger knows of none."""
        found = self.ledger(settings)
        return "" if isinstance(found, Refused) else found.shortage

    def _refused(self, settings: Settings) -> Refused | None:
        found = self._asking(price)(settings)
        return found if isinstance(found, Refused) else None


def _roomy(settings: Settings) -> Settings:
    """The settings with all the memory and the link that there are, and a cache that holds any request."""
    machine = settings.machine
    return settings.on(link=full_link(machine), gpu_memory=machine.gpu.memory, kv_tokens=_ENOUGH)


def _filling(settings: Settings, iterations: int) -> float:
    """Requests that fill the cache once, if all of them take so many iterations."""
    return settings.requests * settings.output_len / iterations


def _least_iterations(scenario: Scenario) -> int:
    """See `least_iterations`."""
    running = most_running(scenario.scheduler)
    return least_iterations(scenario.workload.as_served, scenario.kv_blocks, scenario.memory.kv_block, running)


def _wired(settings: Settings) -> Hashable:
    """The settings that decide how long an iteration takes to simulate."""
    wired = (settings.pipeline, settings.model, settings.machine, settings.schedule, settings.scheduler)
    return (*wired, loader().there)


def _scenario(settings: Settings) -> Scenario | Refused:
    try:
        return settings.predicted()
    except WorkbenchError as error:
        return Refused(error.with_traceback(None))


def _played(scenario: Scenario, schedule: Schedule) -> Timeline:
    return simulate(scenario, schedule, detail=Detail.TASK).timeline


def _played_to_the_end(scenario: Scenario, schedule: Schedule, until: Callable[[], bool]) -> Result:
    """A simulation that is whole.

    Raises
    ------
    StoppedError
        If `until`, which is asked meanwhile, becomes true.
    """
    found = _simulated(scenario, schedule, until)
    if found.stopped:
        raise StoppedError("the simulation was overtaken.")
    return found


def _simulated(scenario: Scenario, schedule: Schedule, until: Callable[[], bool]) -> Result:
    """A simulation without what takes memory: nothing that is kept here shows it."""
    found = simulate(scenario, schedule, until=until)
    return replace(found, timeline=Timeline(), latencies=Latencies(), steps=Iterations())
