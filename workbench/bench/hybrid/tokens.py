"""Tokens of tiny models in fp32: with the gpu lane on a card they are those of a run on the host, whatever the plan."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.core.errors import WorkbenchError
from workbench.engine import run
from workbench.engine.runnable import check_runnable
from workbench.engine.tiny_model.synthesize import write_checkpoint
from workbench.hardware import Device, Link, Machine
from workbench.models import ModelConfig, checkpoint
from workbench.models.families import RUNNABLE
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.scenario import Memory, Scenario
from workbench.scheduler.base import Scheduler
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Schedule, Sequential
from workbench.schedules.registry import every_schedule
from workbench.serving import prepare
from workbench.stages import attention, combine, experts, kv, moe, out_proj, qkv, route, weights
from workbench.workload import Request, Workload

_PROMPTS = (5, 1, 19, 3, 30, 2)
_OUTPUTS = (6, 4, 3, 6, 5, 6)
_BLOCK = 8
_BY_EXPERTS = gpu(qkv, attention, out_proj, route)
PIPELINES: dict[str, Pipeline] = {
    "all on the GPU": gpu(qkv, attention, out_proj, moe),
    "all on the CPU": cpu(qkv, attention, out_proj, moe),
    "KV streamed": fetch(weights, kv) | gpu(qkv, attention, out_proj, moe),
    "experts on the CPU": _BY_EXPERTS >> offload >> cpu(experts) >> load >> gpu(combine),
    "experts deferred": _BY_EXPERTS >> offload >> cpu(experts, defer=1) >> load >> gpu(combine),
    "experts split": _BY_EXPERTS >> (gpu(experts[:2]) | offload >> cpu(experts[2:]) >> load) >> gpu(combine),
    "chosen experts": fetch(experts.chosen) | gpu(qkv, attention, out_proj, moe),
    "router on the CPU": gpu(qkv, attention, out_proj) >> offload >> cpu(route, experts, combine) >> load,
    "rows apart": fetch(experts.prefill.weights)
    | _BY_EXPERTS >> (gpu(experts.prefill) | offload >> cpu(experts.decode) >> load) >> gpu(combine),
}
"""Pipelines for schedules that take any."""
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
}
SCHEDULERS: tuple[Scheduler, ...] = (ResourceAware(token_budget=40), ChunkedPrefill(9), LayeredPrefill(8))


class Way(NamedTuple):
    """A way to serve the requests."""

    name: str
    pipeline: Pipeline
    schedule: Schedule
    scheduler: Scheduler

    def __str__(self) -> str:
        return f"{self.name}, {self.schedule.name}, {type(self.scheduler).__name__}"


def models(folder: Path) -> Iterator[ModelConfig]:
    """A tiny model in fp32 of each family whose checkpoints are made here, which are written to the folder."""
    base = ModelConfig("tiny", 2, 32, 24, 4, 2, 16, 4, 2, 97, 512, dtype="fp32")
    for family in RUNNABLE.values():
        if family.example or family.model_type == "mixtral":
            sizes = dict(family.example) | {"head_dim": 16}
            config = replace(base, name=family.model_type, architecture=family.architecture, **sizes)
            yield checkpoint(write_checkpoint(config, folder / family.model_type))
    latent = replace(base, name="deepseek_v3", architecture="DeepseekV3ForCausalLM", **_LATENT)
    yield checkpoint(write_checkpoint(latent, folder / latent.name))


def ways() -> Iterator[Way]:
    """Every schedule with its example, and `Sequential` with every pipeline, under every scheduler."""
    for scheduler in SCHEDULERS:
        for kind in every_schedule():
            if kind.example is not None:
                yield Way(kind.__name__, kind.example, kind(), scheduler)
        for name, pipeline in PIPELINES.items():
            for schedule in (Sequential(), Sequential(2, prefetch=True)):
                yield Way(name, pipeline, schedule, scheduler)


def tokens_row(model: ModelConfig) -> dict[str, Any]:
    """The row of a record: serve the requests in every way on the card and on the host."""
    right = wrong = refused = 0
    failed = list[str]()
    for way in ways():
        try:
            count = differing(model, way)
        except (WorkbenchError, RuntimeError, ValueError) as error:  # the other ways go on
            failed.append(f"{way}: {type(error).__name__}: {error}"[:300])
            continue
        if count is None:
            refused += 1
        elif count:
            wrong += 1
            failed.append(f"{way}: {count} requests got other tokens")
        else:
            right += 1
    told = f"{right} of {right + len(failed)} ways gave the host's tokens, {refused} were refused"
    return {"told": told, "right": not failed, "ways": right, "wrong": wrong, "refused": refused, "failed": failed}


def differing(model: ModelConfig, way: Way) -> int | None:
    """Number of requests that get other tokens with the card than without; None if the way is refused."""
    scenario = _scenario(model, way.pipeline, way.scheduler, _requests(model))
    try:
        check_runnable(prepare(scenario, way.schedule), on_card=True)
    except WorkbenchError:
        return None
    there = run(scenario, way.schedule, device="cuda").tokens
    deferring = any(stage.defer for stage in way.pipeline.stages)
    here = run(scenario, way.schedule).tokens if deferring else _alone(model)
    return sum(one != other for one, other in zip(there, here, strict=True))


@cache
def _alone(model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Tokens of each request when the host serves it by itself; no batch and no plan may change them."""
    how = PIPELINES["all on the GPU"], SCHEDULERS[0]
    scenarios = (_scenario(model, *how, [each]) for each in _requests(model))
    return tuple(run(scenario, Sequential()).tokens[0] for scenario in scenarios)


def _scenario(model: ModelConfig, pipeline: Pipeline, scheduler: Scheduler, requests: Sequence[Request]) -> Scenario:
    memory = Memory(kv_capacity=_capacity(model), kv_block=_BLOCK, weights="fp32", kv="fp32")
    return Scenario(pipeline, model, _machine(), memory, Workload.of(requests), scheduler)


def _requests(model: ModelConfig) -> list[Request]:
    random = np.random.default_rng(7)
    prompts = [tuple(random.integers(0, model.vocab_size, length).tolist()) for length in _PROMPTS]
    return [Request(prompt, count) for prompt, count in zip(prompts, _OUTPUTS, strict=True)]


def _capacity(model: ModelConfig) -> float:
    """Bytes of a cache that is hardly larger than the longest request."""
    longest = max(map(sum, zip(_PROMPTS, _OUTPUTS, strict=True)))
    return -(-(longest + 20) // _BLOCK) * _BLOCK * model.kv_bytes_per_token("fp32")


def _machine() -> Machine:
    """This computer with invented rates: the tokens do not depend on them."""
    device = Device("any", 8e9, 10e9, (("fp32", 5e10), ("bf16", 1e11)), 2e-5)
    return Machine("here", device, device, Link(5e9, 5e9), host=platform.node())
