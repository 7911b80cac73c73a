"""Candidates made to fit: as much of the KV cache and of the weights on the GPU as the ledger lets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from workbench.analysis.optimize.space import Candidate, Group, scheduler_of
from workbench.analysis.optimize.wirings import Wiring
from workbench.core.errors import CapacityError
from workbench.core.units import parse_bytes
from workbench.pipeline import ranges_of
from workbench.scenario import Scenario
from workbench.scheduler.base import Scheduler
from workbench.schedules import Schedule
from workbench.serving.capacity import least_fitting, ledger, most_blocks
from workbench.serving.ledger import Ledger
from workbench.serving.prepared import Prepared, price
from workbench.stages import Place


@dataclass(frozen=True)
class Fitted:
    """A candidate as a scenario and a schedule that fit.

    Attributes
    ----------
    what, known_as : str
        The placement in words, and the systems that place a model so.
    scenario : Scenario
    schedule : Schedule
    step : int
        The wiring's step.
    """

    what: str
    known_as: str
    scenario: Scenario
    schedule: Schedule
    step: int


class Fitting:
    """Fits the candidates of one scenario into its machine's memories."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._longest = int((scenario.workload.prompt_len + scenario.workload.output_len - 1).max())
        self._ledgers = dict[object, Ledger]()

    def fit(self, candidate: Candidate) -> Fitted:
        """The candidate with its cache, and then its share of the steps that fit beside it.

        Raises
        ------
        WorkbenchError
            If it does not fit, or scenario and schedule do not go together.
        """
        group = candidate.group
        way = (candidate.schedule, scheduler_of(candidate))
        first, blocks = self._first(group, *way)
        step = first
        if group.fill and group.wiring.last:
            step += math.floor(group.fill * (self._last(group, first, blocks, *way) - first))
        while step > first and not self._ledger(group, step, blocks, *way):
            step -= 1  # what is left is not quite linear in the steps
        if step > first and _cache_on_host(group.wiring, step):  # which has more room with fewer weights
            blocks = max(blocks, self._blocks(group, step, *way))
        layout = group.wiring.layout(step)
        return Fitted(layout.what, layout.known_as, self.at(group, step, blocks, way[1]), way[0], step)

    def _first(self, group: Group, schedule: Schedule, scheduler: Scheduler) -> tuple[int, int]:
        """The first step that fits, and the KV blocks there: on the host lie all weights that are not on the GPU."""
        for step in self._steps(group, schedule, scheduler):
            blocks = self._blocks(group, step, schedule, scheduler)
            if blocks:
                return step, blocks
        raise CapacityError(f"{group.wiring.name} does not fit; give the machine more memory.")

    def _steps(self, group: Group, schedule: Schedule, scheduler: Scheduler) -> Iterator[int]:
        """Step 0, and then the lowest one with which the host holds the weights that are not on the GPU."""
        yield 0
        last = group.wiring.last
        found = least_fitting(1, last, lambda step: self._host_left(group, step, schedule, scheduler))
        if found is not None:
            yield found

    def _host_left(self, group: Group, step: int, schedule: Schedule, scheduler: Scheduler) -> float:
        return self._ledger(group, step, self._fewest(group), schedule, scheduler).host.left

    def _fewest(self, group: Group) -> int:
        return -(-self._longest // group.block)

    def _blocks(self, group: Group, step: int, schedule: Schedule, scheduler: Scheduler) -> int:
        """KV blocks of a group: its share of what fits at a step, or of the need of all requests if less; 0 if none."""
        scenario = self._scenario
        fewest = self._fewest(group)
        if group.cache is None:
            per_block = group.block * scenario.model.kv_bytes_per_token(scenario.precision.kv)
            wanted = max(fewest, int(parse_bytes(scenario.memory.kv_capacity) // per_block))
        else:
            wanted = needed_blocks(scenario, group.block)
        fitting = most_blocks(self._prepared(group, step, wanted, schedule, scheduler))
        return fitting and max(fewest, int((group.cache or 1.0) * fitting))

    def _last(self, group: Group, first: int, blocks: int, schedule: Schedule, scheduler: Scheduler) -> int:
        """The highest step that fits the GPU beside so many blocks."""
        last = group.wiring.last

        def left(gone: int) -> float:
            return self._ledger(group, last - gone, blocks, schedule, scheduler).gpu.left

        gone = least_fitting(0, last - first, left)
        return first if gone is None else last - gone

    def _ledger(self, group: Group, step: int, blocks: int, schedule: Schedule, scheduler: Scheduler) -> Ledger:
        key = (group.wiring, step, blocks, group.block, schedule, scheduler)
        if key not in self._ledgers:
            self._ledgers[key] = ledger(self._prepared(group, step, blocks, schedule, scheduler))
        return self._ledgers[key]

    def _prepared(self, group: Group, step: int, blocks: int, schedule: Schedule, scheduler: Scheduler) -> Prepared:
        return price(self.at(group, step, blocks, scheduler), schedule)

    def at(self, group: Group, step: int, blocks: int, scheduler: Scheduler) -> Scenario:
        """The scenario of a group at a step, with so many KV blocks."""
        return at(self._scenario, group.wiring, step, blocks, group.block, scheduler)


def _cache_on_host(wiring: Wiring, step: int) -> bool:
    pipelines = (each.pipeline for each in ranges_of(wiring.layout(step).pipeline))
    return all(pipeline.kv_device is Place.CPU for pipeline in pipelines)


def needed_blocks(scenario: Scenario, block: int) -> int:
    """KV blocks that all requests hold at their ends."""
    held = scenario.workload.prompt_len + scenario.workload.output_len - 1
    return int((-(-held // block)).sum())


def at(scenario: Scenario, wiring: Wiring, step: int, blocks: int, block: int, scheduler: Scheduler) -> Scenario:
    """A scenario with a wiring at a step, so many KV blocks, and a scheduler."""
    layout = wiring.layout(step)
    size = blocks * block * scenario.model.kv_bytes_per_token(scenario.precision.kv)
    memory = replace(
        scenario.memory,
        kv_capacity=size,
        kv_block=block,
        weights_on_gpu=layout.kept,
        kv_on_gpu=layout.kv_kept,
    )
    return scenario.on(pipeline=layout.pipeline, memory=memory, scheduler=scheduler)
