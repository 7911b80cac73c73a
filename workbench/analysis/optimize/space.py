"""The space of a search, as data: wirings, schedules with their options, schedulers with their budgets, and caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from workbench.analysis.optimize.wirings import Wiring, wirings
from workbench.scenario import Scenario
from workbench.scheduler.base import Scheduler
from workbench.scheduler.registry import every_scheduler
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import (
    CGOPipe,
    FastDecode,
    FlexGenS3,
    FlexGenS4,
    Overlap,
    Schedule,
    Sequential,
    VSLPipe,
    WeightPlace,
    contenders,
)

_PARTS = (1, 2, 4, 8)
_OPTIONS: tuple[Schedule, ...] = (
    Sequential(),
    *(Sequential(parts, prefetch=True) for parts in _PARTS),
    *(Overlap(parts, slots) for parts, slots in product(_PARTS, (2, 3))),
    *(VSLPipe(packet, slots) for packet, slots in product((5e-3, 1e-3), (2, 3))),
    *(kind(2 * parts) for kind, parts in product((CGOPipe, FastDecode), _PARTS)),
    *(kind(parts, place) for kind, parts, place in product((FlexGenS3, FlexGenS4), _PARTS, WeightPlace)),
)
"""Schedules with options; those of other kinds have their default settings alone."""
_LEAST_BUDGET = 64
_MOST_BUDGET = 2**15
"""Token budgets that are tried, each the root of two times the one before."""
_FILLS = (1.0, 0.5, 0.0)
_CACHES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.125)
_BLOCK = 16
"""Tokens per KV block beside the scenario's own. No reader charges for small ones, so smaller ones are not tried."""
_KEPT = 64


class Group(NamedTuple):
    """Candidates that differ in schedule and scheduler alone.

    Attributes
    ----------
    wiring : Wiring
    fill : float
        Share of the steps that fit the GPU beside all else.
    cache : float or None
        Share of the KV cache that fits at the first of these steps, or of that which all requests need if it is less;
        None for the scenario's own capacity, as far as it fits.
    block : int
        Tokens per KV block.
    """

    wiring: Wiring
    fill: float
    cache: float | None
    block: int


class Candidate(NamedTuple):
    """One point of a space: a group's placement and memory, and who is served when."""

    group: Group
    schedule: Schedule
    scheduler: Scheduler
    budget: float | None


@dataclass(frozen=True)
class Space:
    """All combinations of some choices.

    Attributes
    ----------
    scenario : Scenario
        Model, machine and workload, routing, precisions and reserves, which stay, as does the scheduler's limit on
        the sequences that run.
    wirings : tuple of Wiring
    schedulers : tuple of Scheduler
    budgets : tuple of float or None
        Token budgets of the schedulers; None for their own.
    fills, caches, blocks
        See `Group`.
    """

    scenario: Scenario
    wirings: tuple[Wiring, ...]
    schedulers: tuple[Scheduler, ...]
    budgets: tuple[float | None, ...]
    fills: tuple[float, ...] = _FILLS
    caches: tuple[float | None, ...] = (None, *_CACHES)
    blocks: tuple[int, ...] = (_BLOCK,)

    @classmethod
    def of(cls, scenario: Scenario) -> Space:
        """The space of a scenario."""
        most = max(_LEAST_BUDGET, int(scenario.workload.prompt_len.sum()))
        steps = int(2 * math.log2(min(most, _MOST_BUDGET) / _LEAST_BUDGET))
        budgets = [float(round(_LEAST_BUDGET * 2 ** (step / 2))) for step in range(steps + 1)]
        blocks = tuple(dict.fromkeys((scenario.memory.kv_block, _BLOCK)))
        return cls(scenario, wirings(scenario), _schedulers(scenario), (None, *budgets), blocks=blocks)

    def __len__(self) -> int:
        memories = len(self.caches) * len(self.blocks)
        whos = len(self.schedulers) * len(self.budgets)
        return (
            sum(len(self.fills_of(each)) * len(schedules_of(each, self.layers)) for each in self.wirings)
            * memories
            * whos
        )

    def __contains__(self, candidate: Candidate) -> bool:
        group = candidate.group
        return (
            group.wiring in self.wirings
            and group.fill in self.fills_of(group.wiring)
            and group.cache in self.caches
            and group.block in self.blocks
            and candidate.schedule in schedules_of(group.wiring, self.layers)
            and candidate.scheduler in self.schedulers
            and candidate.budget in self.budgets
        )

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.scenario.model.num_hidden_layers

    def fills_of(self, wiring: Wiring) -> tuple[float, ...]:
        """The fills of a wiring: one alone if it has only one step."""
        return self.fills if wiring.last else (0.0,)

    def groups(self, wiring: Wiring) -> Iterator[Group]:
        """The groups of a wiring."""
        for fill, cache, block in product(self.fills_of(wiring), self.caches, self.blocks):
            yield Group(wiring, fill, cache, block)

    def whos(self, group: Group) -> int:
        """Number of candidates of a group."""
        return len(schedules_of(group.wiring, self.layers)) * len(self.schedulers) * len(self.budgets)

    def __iter__(self) -> Iterator[Candidate]:
        for wiring in self.wirings:
            for group in self.groups(wiring):
                ways = product(schedules_of(wiring, self.layers), self.schedulers, self.budgets)
                yield from (Candidate(group, *way) for way in ways)


@lru_cache(maxsize=_KEPT)
def schedules_of(wiring: Wiring, layers: int) -> tuple[Schedule, ...]:
    """Every schedule that takes a wiring, with its options."""
    pipeline = wiring.layout(0).pipeline
    found = list[Schedule]()
    for schedule in contenders(pipeline):
        options = [each for each in _OPTIONS if type(each) is type(schedule)]
        found += options or [schedule]
    return tuple(found)


def _schedulers(scenario: Scenario) -> tuple[Scheduler, ...]:
    """A scheduler of each class, both admissions of the resource-aware one, and the scenario's own."""
    own = scenario.scheduler
    limit = getattr(own, "max_running", None)
    plain = [_by_default(each) for each in every_scheduler()]
    found = [*plain, ResourceAware(admission=Admission.PACED)]
    limited = [replace(each, max_running=limit) if _has(each, "max_running") else each for each in found]  # type: ignore[type-var]
    return tuple(dict.fromkeys([own, *limited]))


def _by_default(scheduler: Any) -> Scheduler:
    """A scheduler with its default settings, or as it is if it has none."""
    needed = [each for each in fields(scheduler) if each.default is MISSING and each.default_factory is MISSING]
    made: Scheduler = scheduler if needed else type(scheduler)()
    return made


def _has(scheduler: object, name: str) -> bool:
    return any(each.name == name for each in fields(scheduler))  # type: ignore[arg-type]


def scheduler_of(candidate: Candidate) -> Scheduler:
    """The scheduler of a candidate, with its budget; static batches have a micro-batch for each part."""
    scheduler: Any = candidate.scheduler
    if candidate.budget is not None:
        name = next((name for name in ("token_budget", "granularity") if _has(scheduler, name)), None)
        if name is not None:
            scheduler = replace(scheduler, **{name: int(candidate.budget)})
    if isinstance(scheduler, StaticBatching):
        scheduler = replace(scheduler, micro_batches=candidate.schedule.parts)
    found: Scheduler = scheduler
    return found
