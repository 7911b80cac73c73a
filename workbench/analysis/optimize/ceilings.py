"""Ceilings: the most that any candidate of a wiring, or of a group, can score, whatever its schedule and scheduler."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from workbench.analysis.optimize.fitting import at, needed_blocks
from workbench.analysis.optimize.objective import Objective
from workbench.analysis.optimize.space import Group, Space, schedules_of
from workbench.analysis.optimize.wirings import Wiring, streams
from workbench.core.errors import WorkbenchError
from workbench.core.result import Result
from workbench.hardware import Machine
from workbench.perfmodels import bound
from workbench.scheduler.continuous import ContinuousBatching
from workbench.serving.capacity import least_blocks, least_fitting, ledger
from workbench.serving.prepared import price

_ENDLESS = 1e18  # bytes


class Ceilings:
    """The most that the candidates of a space can score.

    A wiring's steps reach to the last whose weights alone fit the GPU. Where each step takes more off the link the last
    one's bound is the most; elsewhere each limit of the bound, seconds of one lane, only falls or only rises with the
    steps, so that it is at least what it is at one end. No limit rises with the cache.
    """

    def __init__(self, space: Space, objective: Objective) -> None:
        self._space = space
        self._objective = objective
        running: int | None = getattr(space.scenario.scheduler, "max_running", None)
        self._scenario = space.scenario.on(
            machine=_roomy(space.scenario.machine), scheduler=ContinuousBatching(max_running=running)
        )
        self._lasts = dict[Wiring, int]()
        self._found = dict[tuple[Wiring, int, int, int], float]()

    def of(self, wiring: Wiring) -> float:
        """The most that the candidates of a wiring can score, with its largest cache in the smallest blocks."""
        cache = max(self._space.caches, key=lambda cache: cache or 0.0)
        return self.of_group(Group(wiring, max(self._space.fills_of(wiring)), cache, min(self._space.blocks)))

    def of_group(self, group: Group) -> float:
        """The most that any candidate of a group can score; minus infinity if none can be priced."""
        wiring = group.wiring
        try:
            last = math.floor(group.fill * self._last(wiring)) if streams(wiring) else self._last(wiring)
            key = (wiring, last, self.blocks(group), group.block)
            if key not in self._found:
                self._found[key] = self._most_scored(*key)
            return self._found[key]
        except WorkbenchError:
            return -math.inf

    def blocks(self, group: Group) -> int:
        """KV blocks that no candidate of a group exceeds."""
        needed = needed_blocks(self._scenario, group.block)
        own = replace(self._scenario.memory, kv_block=group.block).blocks(self._per_token)
        share = int((group.cache or 1.0) * needed)
        least = least_blocks(self._scenario.on(memory=replace(self._scenario.memory, kv_block=group.block)))
        return max(least, own if group.cache is None else share)

    @cached_property
    def _per_token(self) -> float:
        return self._scenario.model.kv_bytes_per_token(self._scenario.precision.kv)

    def _last(self, wiring: Wiring) -> int:
        """The last step whose weights alone fit the GPU."""
        if wiring not in self._lasts:
            gone = least_fitting(0, wiring.last, lambda gone: self._left(wiring, wiring.last - gone))
            self._lasts[wiring] = wiring.last - (wiring.last if gone is None else gone)
        return self._lasts[wiring]

    def _left(self, wiring: Wiring, step: int) -> float:
        """GPU memory that the weights of a wiring at a step leave [B]."""
        scenario = self._scenario
        block = self._space.blocks[0]
        schedule = schedules_of(wiring, self._space.layers)[0]
        placed = at(scenario, wiring, step, needed_blocks(scenario, block), block, scenario.scheduler)
        gpu = ledger(price(placed, schedule)).gpu
        return self._space.scenario.machine.gpu.memory - gpu["weights"] - gpu["reserve"]

    def _most_scored(self, wiring: Wiring, last: int, blocks: int, block: int) -> float:
        if streams(wiring):
            return self._objective.most(self._bound(wiring, last, blocks, block))
        first = self._bound(wiring, 0, blocks, block)
        other = self._bound(wiring, last, blocks, block) if last else first
        limits = {name: min(seconds, other.limits.get(name, 0.0)) for name, seconds in first.limits.items()}
        return self._objective.most(replace(first, limits=limits, seconds=max(limits.values())))

    def _bound(self, wiring: Wiring, step: int, blocks: int, block: int) -> Result:
        scenario = at(self._scenario, wiring, step, blocks, block, self._scenario.scheduler)
        return bound(scenario, schedules_of(wiring, self._space.layers)[0])


def _roomy(machine: Machine) -> Machine:
    """The machine with memories that hold everything."""
    return replace(
        machine,
        gpu=replace(machine.gpu, memory=_ENDLESS),
        cpu=replace(machine.cpu, memory=_ENDLESS),
    )
