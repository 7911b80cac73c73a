"""Sets of experts, rows apart and shares live: the tokens, and the counts of experts, of the pipeline that is whole."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import workbench as wb
from tests.builders import in_sets, shares
from tests.examples import DEEP, examples
from tests.live.made import QUANTISED
from tests.live.test_law8 import CHECKS, live_and_virtual
from tests.live.test_packed import WIDE
from tests.live.test_stacks import FOUR, SCHEDULERS, asked_of, holds_none, run_of
from tests.live.world import QWEN2, WIRED, machine, requests, scenario
from tests.systems import APART, PIPELINES, STREAMED, VSL, split
from workbench.core.errors import EngineError
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.schedules import CGOPipe, FlexGenS4, LayerStreaming, Overlap, Schedule, Sequential, VSLPipe
from workbench.serving import fits
from workbench.stages import (
    ExpertSet,
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    most_used,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
    weights,
)
from workbench.workload import Request

FRONT = gpu(qkv, attention, out_proj, route)
WHOLE = FRONT >> gpu(experts, combine)
HOT = ExpertSet("hot", ((0, 2), (3,), (0, 1, 3), (1, 2)))
IN_VSL = (
    fetch(weights)
    | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, route, experts[HOT])
) >> gpu(experts[~HOT], combine)
BY_CLASS_AND_SET = fetch(experts[HOT].prefill.weights) | FRONT >> (
    gpu(experts[HOT].prefill, experts[~HOT]) | offload >> cpu(experts[HOT].decode) >> load
) >> gpu(combine)
ANY: tuple[Schedule, ...] = (Sequential(), Sequential(2, prefetch=True), Overlap(), Overlap(3, 3))
"""Schedules that take any pipeline."""


@dataclass(frozen=True)
class Case:
    """A pipeline with shares, which answers as the whole does, and the schedules that take it."""

    pipeline: Pipeline
    weights_on_gpu: float = 0.0
    kv_on_gpu: float = 0.0
    also: tuple[Schedule, ...] = ()


CASES = {
    "half of the experts": Case(split(slice(None, 2))),
    "others in each layer": Case(split(HOT)),
    "three sets": Case(FRONT >> (gpu(experts[:1], experts[3:]) | offload >> cpu(experts[1:3]) >> load) >> gpu(combine)),
    "a streamed set": Case(fetch(experts[~HOT].weights) | FRONT >> gpu(experts[HOT], experts[~HOT], combine)),
    "sets in VSLPipe's pipeline": Case(IN_VSL, also=(VSLPipe(), VSLPipe(weight_slots=3))),
    "a share of sets": Case(IN_VSL, weights_on_gpu=0.5, also=(VSLPipe(),)),
    "rows apart": Case(APART),
    "rows apart the other way": Case(
        fetch(experts.decode.weights)
        | FRONT >> (gpu(experts.decode) | offload >> cpu(experts.prefill) >> load) >> gpu(combine)
    ),
    "rows apart of a set": Case(BY_CLASS_AND_SET),
    "rows of one device": Case(fetch(weights) | FRONT >> gpu(experts.prefill, experts.decode, combine)),
    "a share of one class": Case(APART, weights_on_gpu=0.4),
    "a third stays": Case(VSL, weights_on_gpu=0.35, also=(VSLPipe(), VSLPipe(weight_slots=3))),
    "all stay": Case(VSL, weights_on_gpu=1.0, also=(VSLPipe(),)),
    "a third stays, all on the gpu": Case(STREAMED, weights_on_gpu=0.35, also=(LayerStreaming(),)),
    "half of the cache": Case(PIPELINES["flexgen_s4"], kv_on_gpu=0.5, also=(FlexGenS4(2),)),
    "half of the cache, a fifth of the weights": Case(
        PIPELINES["flexgen_s4"], weights_on_gpu=0.2, kv_on_gpu=0.5, also=(FlexGenS4(3),)
    ),
    "all of the cache": Case(fetch(kv) | WHOLE, kv_on_gpu=1.0),
}


@pytest.fixture(scope="module")
def four(make_model: Any) -> ModelConfig:
    return make_model(FOUR, 2)


@pytest.fixture(scope="module")
def right(four: ModelConfig) -> Callable[[Any], wb.Result]:
    """The run of the whole pipeline under a scheduler."""

    @cache
    def of(scheduler: Any) -> wb.Result:
        return wb.run(asked_of(four, WHOLE).on(scheduler=scheduler), Sequential())

    return of


def of_case(case: Case, model: ModelConfig) -> wb.Scenario:
    of = asked_of(model, case.pipeline)
    stay = {"weights_on_gpu": case.weights_on_gpu, "kv_on_gpu": case.kv_on_gpu}
    return of.on(memory=replace(of.memory, **stay))


def check_alike(of: wb.Scenario, schedule: Schedule, whole: wb.Result) -> None:
    """The tokens and the counts of the whole pipeline's run.

    Prompts in pieces are refused where their attention is not on the device of the cache.
    """
    found = run_of(of, schedule)
    if found is None:
        assert isinstance(of.scheduler, wb.ChunkedPrefill | wb.LayeredPrefill)
        assert VSL.stages[:3] == of.layer.stages[:3]
        return
    assert found.tokens == whole.tokens
    assert found.expert_counts == whole.expert_counts


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_sets_rows_apart_and_shares_change_no_token_and_no_choice(
    name: str, scheduler: Any, four: ModelConfig, right: Any
) -> None:
    """Each scheduler with one of the schedules that take any pipeline, or with all if asked for."""
    case = CASES[name]
    of = of_case(case, four).on(scheduler=scheduler)
    number = SCHEDULERS.index(scheduler) + list(CASES).index(name)
    some = ANY if DEEP else (ANY[number % len(ANY)],)
    for schedule in (*some, *case.also):
        check_alike(of, schedule, right(scheduler))


@pytest.mark.parametrize("number", [1, 3])
def test_the_most_used_experts_of_a_run_can_be_split_off(number: int, four: ModelConfig, right: Any) -> None:
    """Those that the GPU computes then are what was counted: the most that so few can be."""
    whole = right(SCHEDULERS[0])
    hot = most_used(whole.expert_counts, number)
    for schedule in ANY:
        found = wb.run(asked_of(four, split(hot)).on(scheduler=SCHEDULERS[0]), schedule)
        assert found.tokens == whole.tokens
        for layer, counts in enumerate(found.expert_counts):
            on_gpu = sum(counts[expert] for expert in hot.of(layer, 4))
            assert on_gpu == sum(sorted(counts, reverse=True)[:number])


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
def test_each_token_of_each_layer_chooses_its_number_of_experts(scheduler: Any, four: ModelConfig, right: Any) -> None:
    """60 prompt tokens and 30 output tokens, of which the last of each of six requests is not pushed again: 84.

    What a preempted request is pushed with once more counts once more.
    """
    for whole in (right(scheduler), wb.run(asked_of(four, WHOLE, spare=500).on(scheduler=scheduler), Sequential())):
        assert [len(row) for row in whole.expert_counts] == [4] * 4
        assert [sum(row) for row in whole.expert_counts] == [2 * (84 + whole.recomputed)] * 4
    assert whole.recomputed == 0


def test_layers_without_experts_count_none(made: Any) -> None:
    model = made("deepseek_v3")
    asked = requests((5, 9), (4, 3), vocab=model.vocab_size)
    counts = wb.run(scenario(model, asked, WHOLE), Sequential()).expert_counts
    pushed = 5 + 3 + 9 + 2
    assert [sum(row) for row in counts] == [
        0 if kind.dense else pushed * model.num_experts_per_tok for kind in model.layer_kinds
    ]


@pytest.mark.parametrize("name", CASES)
def test_simulate_makes_the_batches_of_a_live_run(name: str, four: ModelConfig) -> None:
    case = CASES[name]
    run, *virtual = live_and_virtual(of_case(case, four), (*case.also, Overlap())[0])
    for other in virtual:
        assert other.seen == run.seen


def test_what_is_held_is_what_the_ledger_says(four: ModelConfig) -> None:
    """A run compares its memory with the ledger's; here the ledger's numbers, of 9.2 kB for an expert in fp32."""
    one = 3 * 32 * 24 * 4
    halves = fits(asked_of(four, split(slice(None, 1))), Sequential())
    assert halves.host["weights"] == 4 * 3 * one
    kept = of_case(Case(fetch(experts.weights) | WHOLE, weights_on_gpu=0.5), four)
    assert fits(kept, Sequential()).host["weights"] == 4 * 2 * one
    assert fits(kept, Sequential()).gpu["weight slots"] == 2 * 2 * one
    whole = asked_of(four, fetch(experts.weights) | WHOLE)
    assert fits(whole, Sequential()).gpu["weight slots"] == 2 * 4 * one
    assert wb.run(kept, Sequential()).generated == 30


@pytest.mark.parametrize("hot", [slice(4, None), ExpertSet("none", ((0,), (), (1,), (2,)))], ids=str)
def test_a_set_may_have_no_expert_in_a_layer(hot: ExpertSet | slice, four: ModelConfig, right: Any) -> None:
    check_alike(asked_of(four, split(hot)).on(scheduler=SCHEDULERS[0]), Sequential(), right(SCHEDULERS[0]))


@pytest.mark.parametrize("schedule", [Overlap(1, 3), Overlap(1, 4)], ids=str)
def test_prefills_after_many_decodes_find_their_weights_however_few_layers_there_are(
    schedule: Schedule, make_model: Any
) -> None:
    """The second prompt comes after iterations of decodes alone, on a link that takes 9 ms for a layer's experts."""
    model = make_model(replace(FOUR, name="two", num_hidden_layers=2), 2)
    asked = requests((5, 4), (8, 8), seed=7)
    slow = machine(link=4e6, throttled=True)
    one_by_one = wb.StaticBatching(1, 1)
    apart, whole = (scenario(model, asked, of, on=slow).on(scheduler=one_by_one) for of in (APART, WHOLE))
    assert wb.run(apart, schedule).tokens == wb.run(whole, Sequential()).tokens


def test_two_lanes_that_write_rows_of_one_buffer_lose_none(
    four: ModelConfig, right: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill rows that the GPU computes and decode rows that come from the CPU are the first of one buffer."""
    made = torch.empty
    comes = threading.Event()

    def slowly(*given: Any, **how: Any) -> torch.Tensor:
        lane = threading.current_thread().name
        if lane == "lane-h2d":
            comes.set()
        elif lane == "lane-gpu":
            comes.wait(0.2)  # for the decode rows
            comes.clear()
        new = made(*given, **how)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    of = asked_of(four, APART).on(scheduler=wb.ChunkedPrefill(9))
    monkeypatch.setattr("workbench.engine.model.forward.torch.empty", slowly)
    try:
        tokens = wb.run(of, Overlap(1)).tokens
    except EngineError as error:
        pytest.fail(str(error))
    assert tokens == right(of.scheduler).tokens


# ------------------------------------------------------------------------------------------------------- other models


def alike(model: ModelConfig, asked: tuple[Request, ...], *pipelines: Pipeline, **memory: Any) -> None:
    """Every pipeline gives the tokens and the counts of the whole one, which are not all the same token."""

    def run(pipeline: Pipeline, schedule: Schedule) -> wb.Result:
        of = scenario(model, asked, pipeline)
        return wb.run(of.on(memory=replace(of.memory, **memory)), schedule)

    whole = run(WHOLE, Sequential())
    assert len(set(sum(whole.tokens, ()))) > 5
    for pipeline in pipelines:
        for schedule in (Sequential(), Overlap()):
            found = run(pipeline, schedule)
            assert found.tokens == whole.tokens, str(pipeline)
            assert found.expert_counts == whole.expert_counts


@pytest.mark.parametrize("rounded", [None, "int8", "int4"])
def test_packed_and_rounded_experts_may_be_in_sets(rounded: str | None, make_model: Any) -> None:
    """Experts of 64 x 128; in sets of one each too, in which they are packed and rounded alone."""
    model = make_model(replace(WIDE, name="wide-fp32-sets", dtype="fp32"), 7)
    asked = requests((1, 40, 7), (10, 8, 12), vocab=model.vocab_size, seed=7)
    each = gpu(experts[:1], experts[1:2], experts[2:3], experts[3:])
    pipelines = (split(slice(1, 3)), split(slice(-1, None)), APART, FRONT >> each >> gpu(combine))
    alike(model, asked, *pipelines, weights=rounded or "fp32")
    of = scenario(model, asked, STREAMED)
    of = of.on(memory=replace(of.memory, weights=rounded))
    whole = wb.run(of, Sequential())
    for share in (0.35, 0.8):
        found = wb.run(of.on(memory=replace(of.memory, weights_on_gpu=share)), LayerStreaming())
        assert found.tokens == whole.tokens


SHARED_ON_CPU = FRONT >> offload >> cpu(experts[:1], experts[1:], shared_experts, combine) >> load


def test_shared_experts_are_added_to_those_of_all_sets(make_model: Any) -> None:
    model = make_model(QWEN2)
    asked = requests((5, 1, 19), (6, 8, 9), vocab=model.vocab_size, seed=3)
    beside = FRONT >> (gpu(experts[:2], shared_experts) | offload >> cpu(experts[2:]) >> load) >> gpu(combine)
    alike(model, asked, split(slice(None, 2)), APART, beside, SHARED_ON_CPU)


MADE = ("gpt_oss", "gpt_oss, wide", "qwen2_moe, dense and windowed", "deepseek_v3", "deepseek_v3, packed")
"""Biases of experts, layers without experts, latent attention, shared experts, experts in packed blocks."""


@pytest.mark.parametrize("name", MADE)
def test_models_of_other_families_are_split_alike(name: str, made: Any) -> None:
    model = made(name)
    asked = requests((5, 1, 19), (6, 8, 9), vocab=model.vocab_size, seed=3)
    alike(model, asked, split(slice(None, 2)), split(slice(-1, None)), APART)
    whole = wb.run(scenario(model, asked, STREAMED), Sequential())
    for share in (0.35, 0.7):
        of = scenario(model, asked, STREAMED)
        found = wb.run(of.on(memory=replace(of.memory, weights_on_gpu=share)), Sequential(2, prefetch=True))
        assert found.tokens == whole.tokens


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_checkpoints_are_split_alike(name: str, quantised: Callable[[str], Path]) -> None:
    """In fp32, into which their experts are converted."""
    model = wb.checkpoint(quantised(name))
    asked = requests((5, 1, 19), (6, 8, 9), vocab=model.vocab_size, seed=3)
    alike(model, asked, split(slice(None, 2)), APART)


# -------------------------------------------------------------------------------------------------------------- drawn


@examples(60, CHECKS)
@given(data=st.data())
def test_no_drawn_sets_and_shares_change_a_token(data: Any, four: ModelConfig, right: Any) -> None:
    """Any split that a schedule takes, with any shares, under any scheduler."""
    schedule: Schedule = data.draw(st.sampled_from([*ANY, VSLPipe()]))
    first = VSL if isinstance(schedule, VSLPipe) else data.draw(st.sampled_from([*WIRED.values()]))
    plain = not any(stage.defer or stage.op is shared_experts for stage in first.stages)
    pipeline = data.draw(in_sets(first if plain else WHOLE, schedule, 4))
    if any(map(holds_none, pipeline.stages)):
        return
    scheduler = data.draw(st.sampled_from(SCHEDULERS))
    of = asked_of(four, pipeline).on(scheduler=scheduler)
    of = of.on(memory=replace(of.memory, **data.draw(shares(pipeline))))
    found = run_of(of, schedule)
    if found is not None:
        assert found.tokens == right(scheduler).tokens
        assert found.expert_counts == right(scheduler).expert_counts


# ------------------------------------------------------------------------------------------------------ chosen experts


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("schedule", [Sequential(2, prefetch=True), Overlap(), Overlap(3, 3)], ids=str)
def test_chosen_experts_give_the_tokens_whatever_share_of_them_stays(
    schedule: Schedule, share: float, four: ModelConfig, right: Callable[[Any], wb.Result]
) -> None:
    hot = ExpertSet("hot", ((0, 2), (1,), (), (0, 1, 2)))
    front = gpu(qkv, attention, out_proj, route)
    for pipeline in (
        fetch(weights, experts.chosen) | front >> gpu(experts, combine),
        fetch(experts[~hot].chosen) | front >> gpu(experts[hot], experts[~hot], combine),
        fetch(experts.prefill.chosen) | Pipeline(APART.chain),
    ):
        of = asked_of(four, pipeline)
        check_alike(of.on(memory=replace(of.memory, weights_on_gpu=share)), schedule, right(of.scheduler))


def test_an_empty_page_keeps_its_turn_in_the_slots(four: ModelConfig, right: Callable[[Any], wb.Result]) -> None:
    """A router of 512 bytes has fewer pages of 64 bytes than there are micro-batches."""
    small = fetch(route.weights) | Pipeline(VSL.chain)
    of = asked_of(four, small)
    check_alike(of, CGOPipe(12), right(of.scheduler))
