"""BF16 is judged by statistics against the fp32 oracle; the link's throttle is a ceiling."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.live.world import RUNNABLE, machine, requests, scenario
from workbench.core.errors import ScenarioError, WorkbenchError
from workbench.engine import engine
from workbench.models import ModelConfig
from workbench.schedules import Schedule, Sequential, VSLPipe

MODEL = ModelConfig("rounded", 3, 64, 96, 4, 2, 16, 6, 2, 499, 512, dtype="bf16")
ASKED = requests((20, 3, 64, 9, 33, 1, 14, 41), 16, vocab=MODEL.vocab_size, seed=9)


@pytest.fixture(scope="module", params=[96, 128], ids=["in rows", "packed"])
def model(make_model: Callable[..., ModelConfig], request: pytest.FixtureRequest) -> ModelConfig:
    """Experts of 128 columns are packed."""
    return make_model(replace(MODEL, name=f"rounded-{request.param}", intermediate_size=request.param), 4)


def agreement(oracle: Any, tokens: tuple[tuple[int, ...], ...]) -> float:
    """Share of generated tokens that the fp32 oracle would also have chosen, given the same tokens before."""
    hits = []
    for request, made in zip(ASKED, tokens, strict=True):
        scores = oracle.scores((*request.prompt, *made))[len(request.prompt) - 1 : -1]
        hits += (scores.argmax(dim=-1) == torch.tensor(made)).tolist()
    assert len(hits) == 16 * len(ASKED)
    return sum(hits) / len(hits)


@pytest.mark.parametrize(
    ("name", "schedule"), [("vslpipe", VSLPipe()), ("flexgen_s4", Sequential()), ("all_cpu", Sequential(2))], ids=str
)
def test_agrees_with_fp32(
    name: str, schedule: Schedule, model: ModelConfig, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finite: list[bool] = []
    choose_all = engine.choose_all

    def watched(logits: torch.Tensor, *rest: Any) -> list[int]:
        finite.extend(torch.isfinite(logits).all(dim=-1).tolist())
        return choose_all(logits, *rest)

    monkeypatch.setattr(engine, "choose_all", watched)
    of = scenario(model, ASKED, RUNNABLE[name], precision="bf16", tokens=79, block=8)
    result = wb.run(of, schedule)
    assert len(finite) == 16 * len(ASKED)
    assert all(finite)
    assert result.preemptions
    assert "bf16" in result.facts["kv"]
    assert agreement(oracle(model), result.tokens) >= 0.8


def test_the_statistic_bites(model: ModelConfig, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.engine.model import few_rows, ops

    monkeypatch.delitem(few_rows._MAKE, ops.Ops.qkv)
    monkeypatch.setattr(ops, "rope", lambda heads, *rest, **how: heads)
    result = wb.run(scenario(model, ASKED, precision="bf16"), VSLPipe())
    assert agreement(oracle(model), result.tokens) < 0.7


@pytest.mark.parametrize(("weights", "kv"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")])
@pytest.mark.slow
def test_precisions_mix(weights: str, kv: str, model: ModelConfig, oracle: Any) -> None:
    """Weights are converted, and each precision is what was asked for."""
    of = scenario(model, ASKED, precision="fp32")
    result = wb.run(of.on(memory=replace(of.memory, weights=weights, kv=kv)), VSLPipe())
    assert agreement(oracle(model), result.tokens) >= (1.0 if weights == kv == "fp32" else 0.8)


@pytest.mark.parametrize("width", [96, 128])
def test_checkpoints_in_fp16_run_in_fp32_with_transformers_tokens(width: int, make_model: Any, oracle: Any) -> None:
    model = make_model(replace(MODEL, name=f"halves-{width}", dtype="fp16", intermediate_size=width), 4)
    of = scenario(model, ASKED, RUNNABLE["all_cpu"], precision="fp32")
    assert wb.run(of, Sequential()).tokens == oracle(model).generate(ASKED).tokens
    llm = wb.LLM(model.path, weights="fp32", kv="fp32")
    assert wb.run(llm.scenario(of.workload), Sequential()).tokens == oracle(model).generate(ASKED).tokens
    with pytest.raises(WorkbenchError, match=r"for fp16, only for bf16, fp32; give Memory\(weights=.*one of these"):
        wb.run(wb.LLM(model.path).scenario(of.workload), Sequential())


def test_rounding_experts_of_a_checkpoint_in_fp16_is_refused_with_what_to_do(make_model: Any) -> None:
    model = make_model(replace(MODEL, name="halves-64", dtype="fp16", hidden_size=64, intermediate_size=128), 4)
    of = scenario(model, ASKED, RUNNABLE["all_cpu"], precision="fp32")
    with pytest.raises(ScenarioError, match=r"other weights stay in fp16, .* convert the checkpoint to bf16 or fp32"):
        wb.run(of.on(memory=replace(of.memory, weights="int8")), Sequential())


# ------------------------------------------------------------------------------------------------------------ the link

RATE = 40e6


def rate_of_weights(of: wb.Scenario, schedule: Schedule) -> float:
    """Bytes of weights per second that the link was busy; the activations it also moved only lower it."""
    result = wb.run(of, schedule)
    moved = of.model.layer_params * of.model.num_hidden_layers * 4 * result.iterations
    return moved / result.busy["h2d"]


@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe(), VSLPipe(packet_seconds=1e-6)], ids=str)
def test_the_throttled_link_keeps_its_limit(schedule: Schedule, make_model: Callable[..., ModelConfig]) -> None:
    """A ceiling, whatever else the computer does; without the throttle the same copies are far above it."""
    model = make_model(ModelConfig("link", 2, 64, 128, 4, 2, 16, 6, 2, 97, 512, dtype="fp32"))
    asked = requests((8, 8), 4)
    slow = scenario(model, asked, on=machine(link=RATE, throttled=True))
    assert rate_of_weights(slow, schedule) <= 1.05 * RATE
    assert wb.run(slow, schedule).tokens == wb.run(scenario(model, asked), schedule).tokens


def test_the_ceiling_bites(make_model: Callable[..., ModelConfig]) -> None:
    model = make_model(ModelConfig("link", 2, 64, 128, 4, 2, 16, 6, 2, 97, 512, dtype="fp32"))
    free = scenario(model, requests((8, 8), 4), on=machine(link=RATE, throttled=False))
    assert rate_of_weights(free, Sequential()) > 1.5 * RATE
