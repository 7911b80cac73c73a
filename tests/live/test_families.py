"""Checkpoints as transformers writes them: its logits and its tokens, for every family, schedule and size of block."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import workbench as wb
from tests.live.made import CONFIGS
from tests.live.world import OF_SYSTEMS, RUNNABLE, WIRED, longest, requests, scenario
from workbench.core.errors import EngineError
from workbench.engine.model import forward, ops
from workbench.engine.tiny_model.synthesize import RECIPES
from workbench.models import ModelConfig
from workbench.models.families import RUNNABLE as FAMILIES
from workbench.models.rope import PLAIN
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.schedules import KTransformers, LayerStreaming, Schedule, Sequential, VSLPipe
from workbench.stages import (
    Op,
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
)

DEEP = "WB_TEST_DEEP" in os.environ
ROUNDING = 1e-4
STEPS = 64 if DEEP else 12
ASKED = requests((1, 40, 7, 33, 3, 17), (STEPS, 8, STEPS, 1, 9, 10), vocab=211, seed=7)
WAYS: tuple[tuple[str, Schedule], ...] = (
    ("all_gpu", Sequential(1)),
    ("all_cpu", Sequential(2)),
    ("vslpipe", VSLPipe()),
    ("flexgen_s4", Sequential(2, prefetch=True)),
    *(way for way in OF_SYSTEMS if "deferring" not in way[0]),
)
TOGETHER = ("all_gpu", "all_cpu", "streamed", "experts_on_cpu", "shared_beside")
"""Pipelines in which latent attention has its weights: of prompts on one device with its projections."""
Case = Callable[[str], tuple[ModelConfig, tuple[tuple[int, ...], ...]]]


@pytest.fixture(scope="module")
def case(made: Any, oracle: Any) -> Case:
    """A model, and what transformers answers."""
    known: dict[str, tuple[ModelConfig, tuple[tuple[int, ...], ...]]] = {}

    def of(name: str) -> tuple[ModelConfig, tuple[tuple[int, ...], ...]]:
        if name not in known:
            model = made(name)
            answer = oracle(model).generate(ASKED)
            assert answer.gap > ROUNDING, "the oracle itself wavers: choose another seed"
            assert len(set(sum(answer.tokens, ()))) > 15, "it answers always the same: equality would mean nothing"
            known[name] = model, answer.tokens
        return known[name]

    return of


def test_every_family_that_runs_is_here() -> None:
    kinds = [kind for kind, _ in CONFIGS.values()]
    assert {family.model_type for family in FAMILIES.values()} == set(kinds)
    assert min(map(kinds.count, kinds)) >= 2


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_is_counted(name: str, made: Any) -> None:
    model = made(name)
    with safe_open(model.path / "model.safetensors", "pt") as file:
        counts = [math.prod(file.get_slice(key).get_shape()) for key in sorted(file.keys())]
    assert model.params + model.vectors == sum(counts)


def of_ways() -> list[tuple[str, int]]:
    """Two ways of each configuration, all of them taking turns; all ways of each in deep tests."""
    found = []
    for number, name in enumerate(CONFIGS):
        ways = [way for way, (pipeline, _) in enumerate(WAYS) if pipeline in TOGETHER or "deepseek" not in name]
        turns = range(len(ways)) if DEEP else (number % len(ways), (number + 1 + len(ways) // 2) % len(ways))
        found += [(name, ways[turn]) for turn in turns]
    return found


@pytest.mark.parametrize(("name", "way"), of_ways())
def test_tokens(name: str, way: int, case: Case) -> None:
    """The smallest cache that serves all requests, with preemptions, and ample ones take turns."""
    model, tokens = case(name)
    pipeline, schedule = WAYS[way]
    block = (1, 16, 64)[way % 3]
    held = longest(ASKED) if block == 1 else 4096
    result = wb.run(scenario(model, ASKED, WIRED[pipeline], tokens=held, block=block), schedule)
    assert result.tokens == tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str, case: Case, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, of a prompt and of each decode, in units of their standard deviation."""
    model, _ = case(name)
    assert error(model, oracle(model), monkeypatch) < ROUNDING


def error(model: ModelConfig, oracle: Any, monkeypatch: pytest.MonkeyPatch, precision: str = "fp32") -> float:
    """Largest difference of logits from the oracle's in units of the standard deviation.

    In bf16 the mean of each token's, and of these the median: where rounding changes a choice of experts, transformers'
    bf16 is as far away.
    """
    asked = requests((37,), 9, vocab=211, seed=3)
    seen: list[torch.Tensor] = []
    logits = forward.Forward.logits

    def noted(self: Any, *rest: Any) -> torch.Tensor:
        seen.append(logits(self, *rest))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(forward.Forward, "logits", noted)
        (tokens,) = wb.run(scenario(model, asked, RUNNABLE["all_gpu"], precision=precision), Sequential()).tokens
    wanted = oracle.scores((*asked[0].prompt, *tokens))[len(asked[0].prompt) - 1 : -1]
    found = torch.cat(seen)
    assert found.shape == wanted.shape
    apart = (found - wanted).abs()
    return float((apart.max() if precision == "fp32" else apart.mean(dim=1).median()) / wanted.std())


@pytest.mark.parametrize("name", [name for name in CONFIGS if "," not in name or name.startswith("qwen")])
def test_bf16(name: str, made: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and activations of 8 bits of mantissa: differences are below a tenth of the deviation."""
    model = made(name, torch.bfloat16)
    assert error(model, oracle(model), monkeypatch, "bf16") < 0.1


# ---------------------------------------------------------------------------------------------------- faults are found


def without(key: str) -> Callable[[pytest.MonkeyPatch], None]:
    """As if a layer's weight of this key were not read."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        from workbench.engine.model import weights

        found = weights.Weights.of_piece

        def forgetful(self: Any, *rest: Any) -> Any:
            return {name: tensor for name, tensor in found(self, *rest).items() if name != key}

        patch.setattr(weights.Weights, "of_piece", forgetful)

    return fault


def attending(**how: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """As if every layer attended so."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        at = ops.Ops.at

        def other(self: Any, layer: int) -> Any:
            found = at(self, layer)
            found.attention = found.attention._replace(**how)
            return found

        patch.setattr(ops.Ops, "at", other)

    return fault


def other(**fields: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """As if operations saw other numbers of the model."""
    from dataclasses import replace

    def fault(patch: pytest.MonkeyPatch) -> None:
        init = ops.Ops.__init__

        def made(self: Any, model: ModelConfig, *rest: Any, **named: Any) -> None:
            init(self, replace(model, **fields), *rest, **named)

        patch.setattr(ops.Ops, "__init__", made)

    return fault


FAULTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("mixtral", attending(window=None)),
    ("olmoe", other(rope=PLAIN)),
    ("qwen2_moe, dense and windowed", without("bias")),
    ("qwen2_moe, dense and windowed", attending(window=None)),
    ("qwen3_moe, windowed", without("q_norm")),
    ("granitemoe", attending(scale=None)),
    ("granitemoe", other(residual_multiplier=1.0)),
    ("granitemoe", other(embedding_multiplier=1.0)),
    ("dbrx", other(clip_qkv=None)),
    ("phimoe", without("norm_bias")),
    ("phimoe", other(rope=PLAIN)),
    ("deepseek_v2", other(rope=PLAIN)),
    ("deepseek_v3", without("choice_bias")),
    ("gpt_oss", attending(sinks=None)),
    ("gpt_oss", without("down_bias")),
    ("gpt_oss", without("gate_bias")),
    ("gpt_oss", other(rope=PLAIN)),
    ("glm4_moe", other(rope=PLAIN)),
    ("glm4_moe", without("choice_bias")),
    ("glm4_moe", other(n_group=1, topk_group=1)),
    ("glm4_moe", other(routed_scaling_factor=1.0)),
    ("ernie4_5_moe", without("choice_bias")),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[name for name, _ in FAULTS])
def test_a_fault_changes_logits(
    name: str, fault: Any, case: Case, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = case(name)
    with monkeypatch.context() as patch:
        fault(patch)
        assert error(model, oracle(model), patch) > 10 * ROUNDING


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_experts_are_late_behind_dense_first_layers(name: str, case: Case) -> None:
    model, tokens = case(name)
    late = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1) >> load >> gpu(combine)
    result = wb.run(scenario(model, ASKED, late), KTransformers())
    assert [len(row) for row in result.tokens] == [len(row) for row in tokens]
    assert result.tokens != tokens


SCHEDULERS = (wb.StaticBatching(2, 3), wb.ChunkedPrefill(9), wb.LayeredPrefill(8))


@pytest.mark.parametrize(
    ("name", "pipeline", "scheduler"),
    [
        ("mixtral", "flexgen_s4", SCHEDULERS[1]),
        ("gpt_oss", "flexgen_s4", SCHEDULERS[2]),
        ("gpt_oss", "all_gpu", SCHEDULERS[1]),
        ("qwen2_moe, dense and windowed", "all_cpu", SCHEDULERS[2]),
        ("glm4_moe", "all_gpu", SCHEDULERS[0]),
        ("deepseek_v2", "all_gpu", SCHEDULERS[1]),
        ("deepseek_v3", "all_cpu", SCHEDULERS[2]),
        ("deepseek_v3, packed", "streamed", SCHEDULERS[1]),
    ],
)
def test_every_scheduler(name: str, pipeline: str, scheduler: Any, case: Case) -> None:
    """Chunks of prompts, also within a window and from latents; layers that prompts have not yet passed."""
    model, tokens = case(name)
    of = scenario(model, ASKED, WIRED[pipeline], block=8).on(scheduler=scheduler)
    assert wb.run(of, Sequential(2)).tokens == tokens


def test_the_latent_model_that_is_made_here(make_model: Any, oracle: Any) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "head_dim": 20, "num_local_experts": 8, "moe_intermediate_size": 12}
    sizes |= {"shared_expert_intermediate_size": 12, "kv_lora_rank": 18, "q_lora_rank": 14, "vocab_size": 211}
    sizes |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    model = make_model(replace(RECIPES["deepseek-s"], name="latent", dtype="fp32", **sizes), 4)
    answer = oracle(model).generate(ASKED)
    assert answer.gap > ROUNDING
    assert wb.run(scenario(model, ASKED, RUNNABLE["all_gpu"]), Sequential()).tokens == answer.tokens


def test_latent_decodes_on_the_other_device(case: Case) -> None:
    model, tokens = case("deepseek_v3")
    apart = gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
    assert wb.run(scenario(model, ASKED, apart, block=1), Sequential(2)).tokens == tokens


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_fetched(name: str, scheduler: Any, case: Case) -> None:
    """From a cache on the host, in blocks that are not full, for decodes and for chunks of prompts."""
    model, tokens = case(name)
    fetched = fetch(experts.weights, kv) | gpu(qkv, attention, out_proj, moe)
    of = scenario(model, ASKED, fetched, tokens=longest(ASKED) + 20, block=8).on(scheduler=scheduler)
    assert wb.run(of, Sequential(2, prefetch=True)).tokens == tokens


def test_experts_with_biases_are_rounded(case: Case, oracle: Any) -> None:
    """A token may be another one that is about as good."""
    model, _ = case("gpt_oss, wide")
    of = scenario(model, ASKED, RUNNABLE["all_gpu"])
    found = wb.run(of.on(memory=wb.Memory(kv_capacity="1MB", weights="int8")), Sequential())
    for request, made in zip(ASKED, found.tokens, strict=True):
        scores = oracle(model).scores((*request.prompt, *made))[len(request.prompt) - 1 : -1]
        short = scores.amax(dim=-1) - scores.gather(1, torch.tensor(made)[:, None])[:, 0]
        assert (short / scores.std(dim=-1) < 0.2).all()


def test_ernies_router_stays_in_fp32(case: Case, tmp_path: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers saves it: it keeps the router in fp32 where the others are bf16."""
    from transformers import AutoModelForCausalLM

    model, _ = case("ernie4_5_moe")
    AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.1.mlp.gate.weight").get_dtype() == "F32"
    found = wb.checkpoint(tmp_path)
    assert error(found, oracle(found), monkeypatch, "bf16") < 0.1


def test_operations_of_ones_own_on_what_a_dense_layer_lacks(case: Case) -> None:
    """Two of them, each of which writes what the other reads."""
    model, _ = case("qwen3_moe, dense")
    same = Op("same", ("routed",), ("routed",), work=combine.work, run=lambda routed: routed)
    again = Op("again", ("routed",), ("routed",), work=combine.work, run=lambda routed: routed)
    layer = gpu(qkv, attention, out_proj, route, experts, same, again, combine)
    with pytest.raises(EngineError, match="reads routed, which layer 0 of"):
        wb.run(scenario(model, ASKED, layer), Sequential())


def test_dense_layers_refuse_what_they_cannot_do(case: Case) -> None:
    model, _ = case("qwen3_moe, dense")
    deferring = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1) >> load >> gpu(combine)
    with pytest.raises(EngineError, match="without experts follow some with; leave defer out"):
        wb.run(scenario(model, ASKED, deferring), KTransformers())
    mine = Op("mine", ("x", "routed"), ("x",), work=combine.work, run=lambda x, routed: x + routed)
    layer = gpu(qkv, attention, out_proj, route, experts, mine)
    with pytest.raises(EngineError, match="reads routed, which layer 0 of"):
        wb.run(scenario(model, ASKED, layer), Sequential())


def test_streamed_layers_that_differ(case: Case) -> None:
    """Slots are as large as the largest layer; the others do not fill them."""
    model, tokens = case("glm4_moe")
    result = wb.run(scenario(model, ASKED, WIRED["streamed"]), LayerStreaming())
    assert result.tokens == tokens
