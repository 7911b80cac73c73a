"""The order of a search: the named systems, then every wiring that may be better, then moves from the best few."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from workbench.analysis.optimize.ceilings import Ceilings
from workbench.analysis.optimize.space import Candidate, Group, Space, schedules_of
from workbench.analysis.optimize.trials import Trial, Trials, most_tokens
from workbench.analysis.optimize.wirings import Named, Wiring
from workbench.scheduler.base import Scheduler
from workbench.schedules import Overlap, Schedule

_STARTS = 4
"""Wirings from whose best candidates moves begin."""
_NAMED_CACHES = (None, 1.0)
"""KV caches of the named systems: the scenario's own capacity as far as it fits, and all that fits."""


def search(space: Space, trials: Trials, ceilings: Ceilings) -> None:
    """Try the named systems, whatever time that takes, and then all that may be better than the best of them.

    Raises
    ------
    StoppedError
        If the budget is spent.
    """
    for _, candidate in every_named(space):
        trials.of(candidate, timed=False)
    explore(space, trials, ceilings)
    descend(space, trials)


def every_named(space: Space) -> Iterator[tuple[Named, Candidate]]:
    """Every named system under each scheduler, with the scenario's own KV capacity and with all that fits."""
    block = space.scenario.memory.kv_block
    for scheduler, cache in product(space.schedulers, _NAMED_CACHES):
        for wiring in space.wirings:
            for named in wiring.named:
                if named.scheduler in (None, scheduler):
                    group = Group(wiring, 1.0 if wiring.filled else 0.0, cache, block)
                    yield named, Candidate(group, named.schedule, scheduler, None)


def explore(space: Space, trials: Trials, ceilings: Ceilings) -> None:
    """Try every wiring that may be better than the best, those first that may be best of all.

    Raises
    ------
    StoppedError
        If the budget is spent.
    """
    for wiring in sorted(space.wirings, key=ceilings.of, reverse=True):
        if trials.best is not None and ceilings.of(wiring) <= trials.best.score:
            continue
        for candidate in _first(space, trials, wiring):
            trials.of(candidate)


def _first(space: Space, trials: Trials, wiring: Wiring) -> Iterator[Candidate]:
    """A wiring's first candidates: filled, with the systems' schedules and `Overlap`, under the best schedulers."""
    schedules = dict.fromkeys([each.schedule for each in wiring.named] or schedules_of(wiring, space.layers)[:1])
    schedules |= dict.fromkeys(each for each in schedules_of(wiring, space.layers) if each in (Overlap(), Overlap(1)))
    largest = max(space.caches, key=lambda cache: cache or 0.0)
    group = Group(wiring, max(space.fills_of(wiring)), largest, space.blocks[0])
    for way, schedule in product(_best_ways(space, trials), schedules):
        yield Candidate(group, schedule, *way)


def _best_ways(space: Space, trials: Trials) -> list[tuple[Scheduler, float | None]]:
    """The best scheduler so far with its own budget, and with that which is nearest to its largest iteration.

    A budget that follows the streamed weights falls with what of them stays on the GPU.
    """
    best = trials.best
    if best is None or best.fitted is None:
        return [(space.schedulers[0], None)]
    tokens = most_tokens(best.fitted.scenario, best.fitted.schedule)
    levels = [budget for budget in space.budgets if budget is not None]
    near = min(levels, key=lambda budget: abs(math.log(budget / tokens)), default=None)
    return [(best.candidate.scheduler, budget) for budget in dict.fromkeys((best.candidate.budget, near))]


def _simulated(trials: Trials) -> list[Trial]:
    return [trial for trial in trials.all.values() if trial.result is not None]


def descend(space: Space, trials: Trials) -> None:
    """Move from the best candidates of the best wirings to better ones.

    Raises
    ------
    StoppedError
        If the budget is spent.
    """
    ranked = sorted(_simulated(trials), key=lambda trial: -trial.score)
    starts = dict[Wiring, Trial]()
    for trial in ranked:
        starts.setdefault(trial.candidate.group.wiring, trial)
    for trial in list(starts.values())[:_STARTS]:
        climb(space, trials, trial)


def climb(space: Space, trials: Trials, trial: Trial) -> Trial:
    """The best that moves reach from a trial: none of its neighbours is better.

    Raises
    ------
    StoppedError
        If the budget is spent.
    """
    improved = True
    while improved:
        before = trial
        for move in (_schedules, _kinds, _budgets, _memories, _budgets_and_caches):
            for candidate in move(space, trial.candidate):
                found = trials.of(candidate)
                if found.score > trial.score:
                    trial = found
        improved = trial is not before
    return trial


def _schedules(space: Space, of: Candidate) -> Iterator[Candidate]:
    """Other schedules: of each kind the default first, then all options of the kind that is there."""
    every = schedules_of(of.group.wiring, space.layers)
    kinds = dict[type[Schedule], Schedule]()
    for schedule in every:
        kinds.setdefault(type(schedule), schedule)
    for schedule in [*kinds.values(), *(each for each in every if type(each) is type(of.schedule))]:
        yield of._replace(schedule=schedule)


def _kinds(space: Space, of: Candidate) -> Iterator[Candidate]:
    """Other schedulers, with their own budget and with the one that is there."""
    for scheduler in space.schedulers:
        for budget in dict.fromkeys((of.budget, None)):
            yield of._replace(scheduler=scheduler, budget=budget)


def _budgets(space: Space, of: Candidate) -> Iterator[Candidate]:
    for budget in (None, *_beside(space.budgets, of.budget, 2)):
        if budget in space.budgets:
            yield of._replace(budget=budget)


def _memories(space: Space, of: Candidate) -> Iterator[Candidate]:
    group = of.group
    for cache in space.caches:
        yield of._replace(group=group._replace(cache=cache))
    for fill in space.fills_of(group.wiring):
        yield of._replace(group=group._replace(fill=fill))
    for block in space.blocks:
        yield of._replace(group=group._replace(block=block))


def _budgets_and_caches(space: Space, of: Candidate) -> Iterator[Candidate]:
    """Neighbouring budgets and caches together: what one gives back of a memory, the other takes."""
    if of.budget is None or of.group.cache is None:
        return
    for budget in _beside(space.budgets, of.budget):
        for cache in _beside(space.caches, of.group.cache):
            yield of._replace(budget=budget, group=of.group._replace(cache=cache))


def _beside(levels: tuple[float | None, ...], level: float | None, reach: int = 1) -> tuple[float | None, ...]:
    """The levels on both sides of one, so many on each; all if that one is none of them, or has no order."""
    if level not in levels or level is None:
        return levels
    place = levels.index(level)
    return (*levels[max(0, place - reach) : place], *levels[place + 1 : place + 1 + reach])
