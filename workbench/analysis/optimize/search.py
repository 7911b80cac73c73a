"""The order of a search: the named systems, then every wiring that may be better, then moves from the best few."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import product

from workbench.analysis.optimize.ceilings import Ceilings
from workbench.analysis.optimize.space import Candidate, Group, Space, schedules_of
from workbench.analysis.optimize.trials import Trial, Trials
from workbench.analysis.optimize.wirings import Named, Wiring
from workbench.scheduler.base import Scheduler
from workbench.schedules import Schedule

_TRIED = 3
"""Kinds of schedules with which each wiring is simulated at first."""
_FAR = 0.7
"""Share of the best guess below which a wiring is left."""
_NEAR = 0.8
"""Share of the best score that a neighbour is to reach by its guess; guesses of neighbours err by 0.1 or 0.2."""
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

    Only those are simulated whose guess is not far from the best guess of any wiring so far.

    Raises
    ------
    StoppedError
        If the budget is spent.
    """
    highest = -math.inf
    for wiring in sorted(space.wirings, key=ceilings.of, reverse=True):
        if trials.best is not None and ceilings.of(wiring) <= trials.best.score:
            continue
        guesses = _peak(space, trials, wiring, highest)
        highest = max(highest, *guesses.values())
        for candidate in _best_kinds(guesses)[:_TRIED]:
            if trials.ratio(guesses[candidate], highest) >= _FAR:
                trials.of(candidate)


def _peak(space: Space, trials: Trials, wiring: Wiring, highest: float) -> dict[Candidate, float]:
    """Guesses of a wiring's candidates, filled, up to the best that moves of schedule and scheduler reach.

    They begin at each kind of schedule under the best scheduler so far. There are no moves from one that fits and is
    far from the highest guess of other wirings.
    """
    way = (space.schedulers[0], None) if trials.best is None else trials.best.candidate[2:]
    guesses = {each: trials.guess(each) for each in _first(space, wiring, *way)}
    before, top = None, _highest(guesses)
    if -math.inf < guesses[top] < highest and trials.ratio(guesses[top], highest) < _FAR:
        return guesses
    while top != before:
        for move in (_schedules, _kinds, _budgets):
            guesses |= {each: trials.guess(each) for each in move(space, top)}
        before, top = top, _highest(guesses)
    return guesses


def _first(space: Space, wiring: Wiring, scheduler: Scheduler, budget: float | None) -> Iterator[Candidate]:
    """A wiring's first candidates: filled, with each kind of schedule in one part and in several."""
    largest = max(space.caches, key=lambda cache: cache or 0.0)
    group = Group(wiring, max(space.fills_of(wiring)), largest, space.blocks[0])
    kinds = dict[object, Schedule]()
    for schedule in schedules_of(wiring, space.layers):
        kinds.setdefault((type(schedule), schedule.parts > 1), schedule)
    for schedule in kinds.values():
        yield Candidate(group, schedule, scheduler, budget)


def _highest(guesses: dict[Candidate, float]) -> Candidate:
    return max(guesses, key=lambda each: guesses[each])


def _ranked(guesses: dict[Candidate, float]) -> list[Candidate]:
    """The candidates with a guess, the best first; of those with the same guess and scheduler one alone."""
    found = dict[object, Candidate]()
    for each in sorted(guesses, key=lambda each: -guesses[each]):
        if guesses[each] > -math.inf:
            found.setdefault((guesses[each], each.scheduler), each)
    return list(found.values())


def _best_kinds(guesses: dict[Candidate, float]) -> list[Candidate]:
    """The best candidate by its guess with each kind of schedule, the best first."""
    found = dict[type[Schedule], Candidate]()
    for each in _ranked(guesses):
        found.setdefault(type(each.schedule), each)
    return list(found.values())


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
    """The best that moves reach from a trial: none of its promising neighbours is better.

    Raises
    ------
    StoppedError
        If the budget is spent.
    """
    improved = True
    while improved:
        before = trial
        for move in (_schedules, _kinds, _budgets, _memories, _budgets_and_caches):
            for candidate in _promising(trials, trial, move(space, trial.candidate)):
                found = trials.of(candidate)
                if found.score > trial.score:
                    trial = found
        improved = trial is not before
    return trial


def _promising(trials: Trials, trial: Trial, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The neighbours of a trial whose guesses, corrected by the trial's, come near the best score; the best first."""
    guesses = {each: trials.guess(each) for each in candidates}
    known = trials.guess(trial.candidate)
    below = trials.ratio(trial.score, (trials.best or trial).score)
    return [each for each in _ranked(guesses) if below * trials.ratio(guesses[each], known) >= _NEAR]


def _schedules(space: Space, of: Candidate) -> Iterator[Candidate]:
    for schedule in schedules_of(of.group.wiring, space.layers):
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
