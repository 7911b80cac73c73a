"""Every family live: transformers' tokens whatever the schedule, scheduler and place of the shared experts."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.live.world import FAMILIES, OF_SYSTEMS, QWEN2, RUNNABLE, WIRED, computed_by, longest, requests, scenario
from workbench.core.errors import CheckpointError, EngineError
from workbench.engine.model import forward, ops
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.schedules import Fiddler, KTransformers, LayerStreaming, Schedule, Sequential, VSLPipe
from workbench.stages import Op, attention, combine, experts, moe, out_proj, qkv, route, shared_experts

ROUNDING = 1e-4
ODD: dict[str, Any] = {"num_hidden_layers": 3, "num_local_experts": 9, "num_experts_per_tok": 2, "vocab_size": 211}
MODELS = {name: replace(config, **ODD) for name, config in FAMILIES.items()}
OTHERS = {
    f"{name}, other weights of the chosen": replace(config, norm_topk_prob=not config.norm_topk_prob)
    for name, config in MODELS.items()
    if "norm_topk_prob" in config.family.own_keys
}
PACKED = {
    f"{name}, packed": replace(
        config,
        hidden_size=64,
        head_dim=16,
        **{"moe_intermediate_size" if config.moe_intermediate_size else "intermediate_size": 64},
    )
    for name, config in MODELS.items()
}
MODELS |= OTHERS | PACKED | {"qwen3_moe, narrow heads": replace(MODELS["qwen3_moe"], head_dim=12, norm_topk_prob=False)}
ASKED = requests((1, 40, 7, 33, 3, 17, 2, 5), (10, 8, 12, 1, 9, 10, 2, 12), vocab=211, seed=7)
BUDGET = 120

Case = Callable[[str], tuple[ModelConfig, tuple[tuple[int, ...], ...]]]


@pytest.fixture(scope="module")
def case(make_model: Any, oracle: Any) -> Case:
    """A model, and what transformers answers."""

    def of(name: str) -> tuple[ModelConfig, tuple[tuple[int, ...], ...]]:
        model = make_model(replace(MODELS[name], name=name), 7 if name in PACKED else 1)
        answer = oracle(model).generate(ASKED)
        assert answer.gap > ROUNDING, "the oracle itself wavers: choose another seed"
        assert len(set(sum(answer.tokens, ()))) > 20, "it answers always the same: equality would mean nothing"
        return model, answer.tokens

    known: dict[str, tuple[ModelConfig, tuple[tuple[int, ...], ...]]] = {}
    return lambda name: known[name] if name in known else known.setdefault(name, of(name))


def run(model: ModelConfig, pipeline: Pipeline, schedule: Schedule, **how: Any) -> wb.Result:
    return wb.run(scenario(model, ASKED, pipeline, budget=BUDGET, **how), schedule)


# ------------------------------------------------------------------------------------------------------- the oracle

WAYS: tuple[tuple[str, Schedule], ...] = (
    *OF_SYSTEMS,
    ("all_gpu", Sequential(1)),
    ("all_cpu", Sequential(2)),
    ("vslpipe", VSLPipe()),
    ("flexgen_s4", Sequential(2, prefetch=True)),
)


@pytest.mark.parametrize(("number", "pipeline", "schedule"), [(n, *way) for n, way in enumerate(WAYS)], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_system(kind: str, number: int, pipeline: str, schedule: Schedule, case: Case) -> None:
    """All models of a family, ample and small caches take turns."""
    names = [name for name in MODELS if name.startswith(kind)]
    model, tokens = case(names[number % len(names)])
    small = number % 3 == 0
    how = {"tokens": longest(ASKED) + 10, "block": 1} if small else {"tokens": 4096, "block": 16}
    result = run(model, WIRED[pipeline], schedule, **how)
    assert result.tokens == tokens
    assert result.preemptions >= small


SCHEDULERS = (wb.StaticBatching(2, 3), wb.ContinuousBatching(40), wb.ChunkedPrefill(9), wb.LayeredPrefill(8))


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
@pytest.mark.parametrize(
    ("kind", "pipeline"), [("qwen2_moe", "flexgen_s4"), ("qwen2_moe", "all_cpu"), ("qwen3_moe", "all_gpu")]
)
def test_every_scheduler(kind: str, pipeline: str, scheduler: Any, case: Case) -> None:
    model, tokens = case(kind)
    of = scenario(model, ASKED, RUNNABLE[pipeline], block=8).on(scheduler=scheduler)
    assert wb.run(of, Sequential(2)).tokens == tokens


BEGIN = gpu(qkv, attention, out_proj, route)
PLACES: dict[str, Pipeline] = {
    "beside the routed": BEGIN >> (gpu(shared_experts) | offload >> cpu(experts) >> load) >> gpu(combine),
    "behind the routed": BEGIN >> offload >> cpu(experts, shared_experts) >> load >> gpu(combine),
    "before the routed": gpu(qkv, attention, out_proj, route, shared_experts, experts, combine),
    "in an arm": BEGIN >> (gpu(experts) | gpu(shared_experts)) >> gpu(combine),
    "all streamed": fetch(experts.weights, shared_experts.weights) | gpu(qkv, attention, out_proj, moe),
    "alone streamed": fetch(shared_experts.weights) | gpu(qkv, attention, out_proj, moe),
    "added on the cpu": BEGIN >> offload >> cpu(shared_experts, experts, combine) >> load,
    "routed on the gpu": gpu(qkv, attention, out_proj, route, experts) >> offload >> cpu(combine) >> load,
}


def logits_of(model: ModelConfig, pipeline: Pipeline, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of every token, and the tokens."""
    seen: list[torch.Tensor] = []
    logits = forward.Forward.logits

    def noted(self: Any, *rest: Any) -> torch.Tensor:
        seen.append(logits(self, *rest))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(forward.Forward, "logits", noted)
        return run(model, pipeline, schedule).tokens, seen


def test_wherever_shared_experts_are_the_answer_is_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, with nothing deferred, also where the CPU computes beside the GPU; weights that were streamed lie at
    other addresses, where a matrix product may be rounded otherwise."""
    model, tokens = case("qwen2_moe")
    ways = [(name, Sequential()) for name in PLACES]
    ways += [(name, KTransformers()) for name in ("beside the routed", "behind the routed")]
    _, first = logits_of(model, RUNNABLE["all_gpu"], Sequential(), monkeypatch)
    assert len(first) > 10
    for name, schedule in ways:
        answered, seen = logits_of(model, PLACES[name], schedule, monkeypatch)
        assert answered == tokens
        if "streamed" not in name:
            assert all(torch.equal(a, b) for a, b in zip(first, seen, strict=True))


@pytest.mark.parametrize("schedule", [KTransformers(), Fiddler(), Sequential(2)], ids=str)
def test_the_gpus_shared_experts_beside_the_cpus_routed_ones(schedule: Schedule, case: Case) -> None:
    model, tokens = case("qwen2_moe")
    result = run(model, PLACES["beside the routed"], schedule, tokens=longest(ASKED) + 10, block=4)
    assert result.tokens == tokens
    assert result.preemptions


# -------------------------------------------------------------------------------------------------- it can go wrong


def without_gate(self: ops.Ops, layout: Any, read: Any, weights: Any) -> torch.Tensor:
    """As if the gate were half open for every token."""
    return right_shared(self, layout, read, weights | {"gate": torch.zeros_like(weights["gate"])})


right_shared, right_route, right_qkv = ops.Ops.shared_experts, ops.Ops.route, ops.Ops.qkv


def other_weights(self: ops.Ops, layout: Any, read: Any, weights: Any) -> Any:
    """Renormalised if they must not be, and as they are if they must."""
    h, gates = right_route(self, layout, read, weights)
    chosen = gates.shape[1] // 2
    scores = torch.nn.functional.linear(h, weights["gate"]).softmax(dim=-1).gather(1, gates[:, :chosen].long())
    other = scores if self._model.norm_topk_prob else scores / scores.sum(dim=-1, keepdim=True)
    return h, torch.cat((gates[:, :chosen], other), dim=-1)


def unbiased(self: ops.Ops, layout: Any, read: Any, weights: Any) -> Any:
    return right_qkv(self, layout, read, {key: weight for key, weight in weights.items() if key != "bias"})


def ungained(self: ops.Ops, layout: Any, read: Any, weights: Any) -> Any:
    return right_qkv(self, layout, read, weights | {"q_norm": torch.ones_like(weights["q_norm"])})


@pytest.mark.parametrize(
    ("name", "op", "broken"),
    [
        ("qwen2_moe", "shared_experts", without_gate),
        ("qwen2_moe", "shared_experts", lambda self, layout, read, weights: torch.zeros_like(read["h"])),
        ("qwen2_moe", "combine", lambda self, layout, read, weights: read["x"] + read["routed"]),
        ("qwen2_moe", "route", other_weights),
        ("qwen2_moe, other weights of the chosen", "route", other_weights),
        ("qwen3_moe, narrow heads", "route", other_weights),
        ("qwen2_moe", "qkv", unbiased),
        ("qwen3_moe", "qkv", ungained),
    ],
)
def test_what_is_left_out_changes_tokens(
    name: str, op: str, broken: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = case(name)
    computed_by(monkeypatch, op, broken)
    assert run(model, RUNNABLE["all_gpu"], Sequential()).tokens != tokens


def test_a_checkpoint_without_the_gate_of_the_shared_expert_is_refused(make_model: Any, tmp_path: Any) -> None:
    model = make_model(replace(QWEN2, **ODD, name="gateless"))
    name, file = "model.layers.1.mlp.shared_expert_gate.weight", "model-00002.safetensors"
    folder = Path(shutil.copytree(model.path, tmp_path / "mine"))
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / file).items() if key != name}
    save_file(tensors, folder / file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        run(wb.checkpoint(folder), RUNNABLE["all_gpu"], Sequential())


def test_shared_experts_that_an_own_operation_would_forget_are_refused(case: Case) -> None:
    model, tokens = case("qwen2_moe")
    forgetful = Op("mine", ("x", "routed"), ("x",), work=combine.work, run=lambda x, routed: x + routed)
    layer = gpu(qkv, attention, out_proj, route, experts, shared_experts, forgetful)
    with pytest.raises(EngineError, match=r"'qwen2_moe-1' has shared experts, whose output .* adds nowhere"):
        run(model, layer, Sequential())
    minded = Op(
        "mine", ("x", "routed", "shared"), ("x",), work=combine.work, run=lambda x, routed, shared: x + routed + shared
    )
    layer = gpu(qkv, attention, out_proj, route, experts, shared_experts, minded)
    assert run(model, layer, Sequential()).tokens == tokens


def test_bf16_streams_and_answers(make_model: Any) -> None:
    """Bytes of biases and norms too are those that the plan says."""
    for config in FAMILIES.values():
        model = make_model(replace(config, **ODD, name=f"{config.name} bf16", dtype="bf16"))
        result = wb.run(scenario(model, ASKED[:4], WIRED["streamed"], precision="bf16"), LayerStreaming())
        assert [len(row) for row in result.tokens] == [request.output_len for request in ASKED[:4]]
