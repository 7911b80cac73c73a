"""Stacks live: ranges of layers that are placed differently give the tokens of one pipeline, and simulate's batches."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import workbench as wb
from tests.builders import OWN, cut_up, every_wiring
from tests.examples import DEEP, examples
from tests.live.test_law8 import CHECKS, live_and_virtual
from tests.live.world import WIRED, longest, requests, scenario
from tests.systems import STACKS, VSL
from workbench.core.errors import EngineError, ScenarioError
from workbench.engine.model.forward import Forward
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, Stack
from workbench.schedules import KTransformers, Overlap, Schedule, Sequential, VSLPipe
from workbench.serving import fits
from workbench.stages import Place, Stage, shared_experts

ASKED = requests((5, 1, 19, 3, 30, 2), (6, 4, 3, 6, 5, 6), seed=7)
FOUR = ModelConfig("four", 4, 32, 24, 4, 2, 8, 4, 2, 97, 512, dtype="fp32")
SCHEDULERS = (
    wb.ResourceAware(token_budget=40),
    wb.StaticBatching(2, 3),
    wb.ContinuousBatching(40),
    wb.ChunkedPrefill(9),
    wb.LayeredPrefill(8),
)
EXACT = [name for name in STACKS if not name.startswith("deferring")]


@pytest.fixture(scope="module")
def four(make_model: Any) -> ModelConfig:
    return make_model(FOUR, 2)


@pytest.fixture(scope="module")
def right(four: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return tuple(wb.run(scenario(four, (request,)), Sequential()).tokens[0] for request in ASKED)


@pytest.fixture(scope="module")
def tiny_right(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return tuple(wb.run(scenario(tiny, (request,)), Sequential()).tokens[0] for request in ASKED)


def asked_of(model: ModelConfig, stack: Stack | Pipeline, *, spare: int = 20, block: int = 8) -> wb.Scenario:
    return scenario(model, ASKED, stack, tokens=longest(ASKED) + spare, block=block)


def exact(stack: Stack | Pipeline) -> bool:
    """True for a stack that `run` can execute and that changes nothing of the model's answer."""
    stages = [stage for each in stack.ranges for stage in each.pipeline.stages] if isinstance(stack, Stack) else []
    if not stages or any(stage.defer or stage.op in (OWN, shared_experts) for stage in stages):
        return False
    return not any(holds_none(stage) for stage in stages)


def holds_none(stage: Stage) -> bool:
    """True for a set that has no expert in some layer of four, which cannot be loaded."""
    return stage.op.subset is not None and not all(stage.op.subset.of(layer, 4) for layer in range(4))


def tokens_of(of: wb.Scenario, schedule: Schedule) -> Any:
    """The tokens of a run; None where prompts come in pieces and attention is not where the cache of its layer is."""
    found = run_of(of, schedule)
    return found and found.tokens


def run_of(of: wb.Scenario, schedule: Schedule) -> wb.Result | None:
    """The result of a run; None where `tokens_of` is."""
    try:
        return wb.run(of, schedule)
    except ScenarioError as error:
        if "in pieces" not in str(error):
            raise
        return None


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
@pytest.mark.parametrize("name", EXACT)
def test_a_stack_gives_the_tokens_of_one_pipeline(name: str, scheduler: Any, four: ModelConfig, right: Any) -> None:
    stack, schedule = STACKS[name]
    of = asked_of(four, stack).on(scheduler=scheduler)
    assert tokens_of(of, schedule) in (right, None)


def test_the_last_layer_of_each_range_defers_nothing(four: ModelConfig) -> None:
    """Ranges of one layer defer nothing at all."""
    late = STACKS["deferring_twice.ktransformers"][0].ranges[0].pipeline
    single = late[:1] + late[1:2] + late[2:3] + late[3:]
    whole = wb.run(asked_of(four, WIRED["experts_on_cpu"]), KTransformers())
    assert wb.run(asked_of(four, single), KTransformers()).tokens == whole.tokens
    twice = wb.run(asked_of(four, late[:2] + late[2:]), KTransformers())
    for schedule in (Sequential(), Overlap()):
        assert twice.tokens == wb.run(asked_of(four, late[:2] + late[2:]), schedule).tokens
    assert twice.tokens != whole.tokens


@pytest.mark.parametrize("name", STACKS)
def test_simulate_makes_the_batches_of_a_stacks_live_run(name: str, four: ModelConfig) -> None:
    run, *virtual = live_and_virtual(asked_of(four, STACKS[name][0]), STACKS[name][1])
    for other in virtual:
        assert other.seen == run.seen


@examples(60, CHECKS)
@given(data=st.data())
def test_no_drawn_stack_changes_a_token(data: Any, four: ModelConfig, right: Any) -> None:
    """On any scheduler, with the smallest cache that serves all requests and larger ones."""
    schedule: Schedule = data.draw(
        st.sampled_from(
            [
                Sequential(),
                Sequential(2),
                Sequential(2, prefetch=True),
                Overlap(),
                Overlap(3, 3),
                VSLPipe(),
                VSLPipe(weight_slots=3),
            ]
        )
    )
    first = VSL if isinstance(schedule, VSLPipe) else data.draw(st.sampled_from([*WIRED.values()]))
    stack = data.draw(cut_up(first, schedule, 4).filter(exact))
    of = asked_of(four, stack, spare=data.draw(st.sampled_from([0, 5, 300])), block=data.draw(st.integers(1, 20)))
    of = of.on(scheduler=data.draw(st.sampled_from(SCHEDULERS)))
    assert tokens_of(of, schedule) in (right, None)


def test_a_layer_placed_elsewhere_than_asked_is_noticed(four: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` reads back where each layer was computed."""
    stack, schedule = STACKS["n_cpu_moe.sequential"]
    computed = Forward.compute

    def elsewhere(self: Any, stage: Any, layer: int, *rest: Any) -> None:
        computed(self, stage, layer, *rest)
        if stage.device is Place.CPU:
            self._ran = {(other - other % 2, op, place) for other, op, place in self._ran}

    monkeypatch.setattr(Forward, "compute", elsewhere)
    with pytest.raises(EngineError, match="placement"):
        wb.run(asked_of(four, stack), schedule)


def test_the_cache_is_where_each_layer_reads_it(four: ModelConfig) -> None:
    """One layer of four keeps its KV on the host; the engine compares the ledger's bytes with what it allocates."""
    stack, schedule = STACKS["host_between.prefetch"]
    of = asked_of(four, stack)
    found = fits(of, schedule)
    whole = of.kv_blocks * of.memory.kv_block * four.kv_bytes_per_token("fp32")
    assert (found.gpu["KV cache"], found.host["KV cache"]) == (0.75 * whole, 0.25 * whole)
    assert wb.run(of, schedule).generated == sum(request.output_len for request in ASKED)


ALL = list(every_wiring())


@pytest.mark.parametrize("number", range(0, len(ALL), 1 if DEEP else 20))
def test_any_wiring_runs_and_answers_alike(number: int, tiny: ModelConfig, tiny_right: Any) -> None:
    """Every placement of the seven operations with every fetch (a twentieth of them unless asked for all)."""
    of = scenario(tiny, ASKED, ALL[number], tokens=longest(ASKED) + 20, block=8)
    assert wb.run(of, Overlap()).tokens == tiny_right
