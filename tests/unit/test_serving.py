"""A scheduler that stops early, or keeps blocks, must not pass for one that served everything."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.builders import tiny_scenario
from workbench.analysis.compare import compare
from workbench.core.errors import CapacityError, ScenarioError
from workbench.core.units import format_bytes
from workbench.perfmodels import bound
from workbench.scheduler.batch import Batch, Ids
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential
from workbench.serving import prepare
from workbench.simulate import simulate


@dataclass(frozen=True)
class Wrapped(ResourceAware):
    """ResourceAware whose queue is spoiled in one way."""

    fault: str = ""

    def open(self, *arguments: Any) -> Any:
        return Spoiled(super().open(*arguments), self.fault)


class Spoiled:
    def __init__(self, queue: Any, fault: str) -> None:
        self.queue, self.fault, self.turns = queue, fault, 0
        self.preemptions = self.recomputed = 0

    def add(self, *arrived: Ids) -> None:
        self.queue.add(*arrived)

    def next(self) -> Batch | None:
        self.turns += 1
        return None if self.fault == "stops" and self.turns > 2 else self.queue.next()

    def complete(self, batch: Batch, ended: Ids) -> Ids:
        if self.fault == "keeps":
            self.queue.blocks.release = lambda sequences: None
        return self.queue.complete(batch, ended)

    def ends_with(self, batch: Batch) -> bool:
        return self.queue.ends_with(batch)

    def close(self) -> None:
        if self.fault == "":
            self.queue.close()
        if self.fault == "loses":
            self.queue.close()
            self.queue.blocks.free -= 1


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("stops", ScenarioError, "3 requests unfinished"),
        ("keeps", CapacityError, "kept .* KV blocks"),
        ("loses", CapacityError, "not conserved: 999 free and 0 held of 1000"),
    ],
)
def test_a_scheduler_that_cheats_is_told(fault, kind, words):
    scenario = tiny_scenario([5, 4, 3], [6, 6, 6]).on(scheduler=Wrapped(token_budget=100, fault=fault))
    with pytest.raises(kind, match=words):
        simulate(scenario, Sequential())


def test_the_same_queue_unspoiled_serves_everything():
    scenario = tiny_scenario([5, 4, 3], [6, 6, 6]).on(scheduler=Wrapped(token_budget=100))
    assert simulate(scenario, Sequential()).generated == 18


@pytest.mark.parametrize("change", ["lengths", "arrivals", "machine", "memory"])
def test_results_of_different_questions_are_not_explained_by_one_another(change):
    one = tiny_scenario([8] * 4, [4] * 4)
    other = {
        "lengths": lambda: tiny_scenario([8] * 4, [9] * 4),
        "arrivals": lambda: one.on(workload=one.workload.arriving(at=[0.0, 1.0, 2.0, 3.0])),
        "machine": lambda: one.on(machine=one.machine.limit(link=one.machine.link.h2d / 2)),
        "memory": lambda: tiny_scenario([8] * 4, [4] * 4, block=one.memory.kv_block + 1),
    }[change]()
    results = [bound(one, Sequential()), simulate(other, Sequential())]
    comparison = compare(results)
    (alone,) = comparison.explanations()
    assert "of the bound" not in alone
    assert [row[4] for row in comparison.rows()] == ["100%", ""]
    assert len(compare([bound(one, Sequential()), simulate(one, Sequential())]).explanations()) == 1


def test_readers_say_what_they_take():
    with pytest.raises(ScenarioError, match="takes a Scenario first, not None"):
        simulate(None, Sequential())
    for wrong in (None, "VSLPipe", Sequential):
        with pytest.raises(ScenarioError, match=r"takes a schedule such as VSLPipe\(\) after the scenario"):
            simulate(tiny_scenario([1], [1]), wrong)
    with pytest.raises(ScenarioError, match=r"detail must be Detail.TASK or Detail.ITERATION, not 'task'"):
        simulate(tiny_scenario([1], [1]), Sequential(), detail="task")


def test_columns_of_steps_add_up_to_what_was_generated():
    result = simulate(tiny_scenario([5, 4, 3], [6, 1, 2]), Sequential())
    assert result.processed == sum(result.steps.prefill) + sum(result.steps.decode)
    assert np.isclose(sum(result.steps.seconds), result.seconds)


def test_a_result_tells_the_bytes_of_all_layers_that_stream():
    scenario = tiny_scenario()
    layer = scenario.model.layer_params * 2
    told = simulate(scenario, Sequential()).facts["weights"]
    assert told == f"{format_bytes(4 * layer)} streamed per iteration in bf16"


def test_one_long_prompt_among_short_ones_is_enough_to_refuse_pieces():
    """Prompts of more than 4 x 4 tokens come in pieces, which the GPU's attention cannot read from the host."""
    short, both = (tiny_scenario(prompt, 4, scheduler=LayeredPrefill(4)) for prompt in ([8, 8], [8, 40]))
    prepare(short, Sequential())
    with pytest.raises(ScenarioError, match="prefills prompts in pieces"):
        prepare(both, Sequential())
