"""Expert deferral and skipping: tokens of `run` are those of a plain implementation, and late experts are counted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import workbench as wb
from tests.live.world import requests, scenario
from workbench.core.errors import EngineError
from workbench.engine.loading.checkpoint import open_checkpoint
from workbench.engine.model import forward, ops
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, cpu, gpu, load, offload
from workbench.schedules import Fiddler, KTransformers, Schedule, Sequential
from workbench.stages import attention, combine, experts, out_proj, qkv, route, shared_experts
from workbench.workload import Request

SIZES = ModelConfig("defers", 4, 32, 24, 4, 2, 8, 6, 4, 97, 512, dtype="fp32")
ASKED = requests((5, 1, 19, 3, 7, 2), (12, 14, 6, 14, 10, 1), seed=3)


class Plain:
    """One token after the other and one expert after the other, straight from SPEC 5; keys and values in lists."""

    def __init__(self, model: ModelConfig, defer: int = 0, skip: int = 0) -> None:
        self.m, self.w, self.defer, self.skip = model, open_checkpoint(model), defer, skip

    def generate(self, request: Request) -> tuple[int, ...]:
        self.cache: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(self.m.num_hidden_layers)]
        for place, token in enumerate(request.prompt):
            last = self.token(token, place, decodes=False)
        made = [int(last.argmax())]
        while len(made) < request.output_len:
            place = len(request.prompt) + len(made) - 1
            made.append(int(self.token(made[-1], place, decodes=True).argmax()))
        return tuple(made)

    def token(self, token: int, place: int, *, decodes: bool) -> torch.Tensor:
        x = self.w["model.embed_tokens.weight"][token]
        late = torch.zeros_like(x)
        layers = self.m.num_hidden_layers
        for layer in range(layers):
            x = x + self.attention(layer, self.norm(x, f"model.layers.{layer}.input_layernorm.weight"), place)
            h = self.norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
            given = self.expert_outputs(layer, h)
            skip = self.skip if decodes else 0
            defer = self.defer if decodes and layer + 1 < layers else 0
            given = given[: len(given) - skip]
            at_once = len(given) - defer
            x = x + sum(given[:at_once]) + late + self.shared_output(layer, h)
            late = sum(given[at_once:], torch.zeros_like(x))
        return self.norm(x, "model.norm.weight") @ self.w["lm_head.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.w[name] * x / (x.pow(2).mean() + self.m.rms_norm_eps).sqrt()

    def attention(self, layer: int, x: torch.Tensor, place: int) -> torch.Tensor:
        names = (f"model.layers.{layer}.self_attn.{letter}_proj.weight" for letter in "qkvo")
        q, k, v, o = (self.w[name] for name in names)
        biases = (self.w.get(f"model.layers.{layer}.self_attn.{letter}_proj.bias", 0) for letter in "qkv")
        heads = [(proj @ x + bias).view(-1, self.m.head_dim) for proj, bias in zip((q, k, v), biases, strict=True)]
        queries, key, value = self.turned(heads[0], place), self.turned(heads[1], place), heads[2]
        self.cache[layer].append((key, value))
        keys, values = (torch.stack(column, dim=1) for column in zip(*self.cache[layer], strict=True))
        group, out = len(queries) // len(key), []
        for head, query in enumerate(queries):
            weights = (keys[head // group] @ query / self.m.head_dim**0.5).softmax(dim=0)
            out.append(weights @ values[head // group])
        return o @ torch.cat(out)

    def turned(self, heads: torch.Tensor, place: int) -> torch.Tensor:
        half = self.m.head_dim // 2
        angles = place * self.m.rope_theta ** (-torch.arange(half) / half)
        low, high = heads[:, :half], heads[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=1)

    def expert_outputs(self, layer: int, h: torch.Tensor) -> list[torch.Tensor]:
        """Weighted outputs of the chosen experts, highest score first."""
        family = self.m.family
        scores = (self.w[f"model.layers.{layer}.{family.tensors.mixture}.gate.weight"] @ h).softmax(dim=0)
        chosen = sorted(range(len(scores)), key=lambda e: -float(scores[e]))[: self.m.num_experts_per_tok]
        total = sum(float(scores[e]) for e in chosen) if self.m.norm_topk_prob else 1.0
        return [
            float(scores[e]) / total * self.expert(f"model.layers.{layer}.{family.tensors.expert(e)}", h)
            for e in chosen
        ]

    def expert(self, name: str, h: torch.Tensor) -> torch.Tensor:
        family = self.m.family
        gate, up, down = (
            self.w[f"{name}.{part}.weight"] for part in (family.tensors.gate, family.tensors.up, family.tensors.down)
        )
        return down @ (functional.silu(gate @ h) * (up @ h))

    def shared_output(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        if not self.m.family.shared_gate:
            return torch.zeros_like(h)
        name = f"model.layers.{layer}.{self.m.family.tensors.shared_expert}"
        return torch.sigmoid(self.w[f"{name}_gate.weight"] @ h) * self.expert(name, h)


def layer(**options: int) -> Pipeline:
    return gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, **options) >> load >> gpu(combine)


@pytest.fixture(scope="module")
def model(make_model: Callable[..., ModelConfig]) -> ModelConfig:
    return make_model(SIZES, seed=4)


@pytest.fixture(scope="module")
def plain(model: ModelConfig) -> Callable[..., tuple[tuple[int, ...], ...]]:
    known: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}

    def tokens(defer: int = 0, skip: int = 0) -> tuple[tuple[int, ...], ...]:
        if (defer, skip) not in known:
            with torch.no_grad():
                known[defer, skip] = tuple(Plain(model, defer, skip).generate(request) for request in ASKED)
        return known[defer, skip]

    return tokens


WAYS: list[tuple[dict[str, int], Schedule]] = [
    ({}, KTransformers()),
    ({"defer": 1}, KTransformers()),
    ({"defer": 2}, Sequential(2)),
    ({"defer": 2}, Fiddler()),
    ({"defer": 3}, KTransformers()),
    ({"skip": 2}, KTransformers()),
    ({"defer": 1, "skip": 2}, KTransformers()),
]


@pytest.mark.parametrize(("options", "schedule"), WAYS, ids=str)
def test_tokens_are_those_of_the_plain_implementation(
    options: dict[str, int], schedule: Schedule, model: ModelConfig, plain: Any
) -> None:
    result = wb.run(scenario(model, ASKED, layer(**options), budget=300), schedule)
    assert result.tokens == plain(**options)
    assert not options or result.tokens != plain(), "it changes no token: equality would mean nothing"


BESIDE = gpu(qkv, attention, out_proj, route) >> (gpu(shared_experts) | offload >> cpu(experts, defer=2) >> load)


@pytest.mark.parametrize(
    ("pipeline", "schedule"),
    [(BESIDE >> gpu(combine), KTransformers()), (BESIDE >> gpu(combine), Fiddler()), (layer(defer=2), KTransformers())],
    ids=str,
)
def test_shared_experts_are_never_late(
    pipeline: Pipeline, schedule: Schedule, make_model: Callable[..., ModelConfig]
) -> None:
    kind = {"architecture": "Qwen2MoeForCausalLM", "shared_expert_intermediate_size": 28, "norm_topk_prob": False}
    model = make_model(replace(SIZES, name="defers-shared", moe_intermediate_size=20, **kind), seed=4)
    with torch.no_grad():
        late, at_once = (tuple(Plain(model, d).generate(request) for request in ASKED) for d in (2, 0))
    assert wb.run(scenario(model, ASKED, pipeline, budget=300), schedule).tokens == late != at_once


def test_nothing_deferred_is_the_ordinary_layer_bit_by_bit(model: ModelConfig, monkeypatch: Any) -> None:
    """The logits of every token, whatever the experts' device."""
    seen: list[list[torch.Tensor]] = []
    logits = forward.Forward.logits

    def noted(self: Any, *rest: Any) -> torch.Tensor:
        seen[-1].append(logits(self, *rest))
        return seen[-1][-1]

    monkeypatch.setattr(forward.Forward, "logits", noted)
    for pipeline in (layer(defer=0), layer(), gpu(qkv, attention, out_proj, route, experts, combine)):
        seen.append([])
        wb.run(scenario(model, ASKED, pipeline, budget=300), Sequential())
    first, *others = seen
    assert len(first) > 10
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_one_layer_defers_nothing(make_model: Callable[..., ModelConfig]) -> None:
    model = make_model(ModelConfig("one", 1, 32, 24, 4, 2, 8, 6, 4, 97, 512, dtype="fp32"), seed=4)
    tokens = [wb.run(scenario(model, ASKED, layer(defer=d), budget=300), KTransformers()).tokens for d in (0, 3)]
    assert tokens[0] == tokens[1]


def test_fewer_experts_than_asked_for_raise(model: ModelConfig, monkeypatch: Any) -> None:
    compute = forward.Forward.compute_late

    def forgetful(self: Any, stage: Any, layer: int, part: int, layout: ops.RowLayout) -> None:
        if layer != 1:
            compute(self, stage, layer, part, layout)

    monkeypatch.setattr(forward.Forward, "compute_late", forgetful)
    with pytest.raises(EngineError, match="experts of decodes"):
        wb.run(scenario(model, ASKED, layer(defer=2), budget=300), KTransformers())


def test_results_tell_what_was_deferred_and_skipped(model: ModelConfig) -> None:
    found = wb.simulate(scenario(model, ASKED, layer(defer=2, skip=1)), KTransformers()).facts
    assert found["deferred"] == "2 of 4 per decode token one layer later"
    assert found["skipped"] == "1 of 4 per decode token"
