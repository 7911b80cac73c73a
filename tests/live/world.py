"""A small world to run live in: odd little models, a machine that needs no measuring, and ways to look inside a run."""

import gc
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import workbench as wb
from tests.systems import ADDED, LIGHTNING, PIPELINES, STREAMED, VSL
from workbench.engine.model.ops import Ops
from workbench.hardware import Device, Link, Machine
from workbench.models import ModelConfig
from workbench.models.families import RUNNABLE as RUNNABLE_FAMILIES
from workbench.pipeline import Pipeline, cpu, gpu, load, offload
from workbench.schedules import (
    CGOPipe,
    FastDecode,
    Fiddler,
    FlexGenS3,
    FlexGenS4,
    KTransformers,
    LayerStreaming,
    Overlap,
    Schedule,
    Sequential,
    VSLPipe,
    WeightPlace,
)
from workbench.stages import attention, combine, experts, out_proj, qkv, route, shared_experts
from workbench.workload import Request, Sampling, Workload

TINY = ModelConfig("tiny", 2, 32, 24, 4, 2, 8, 4, 2, 97, 512, dtype="fp32")
RUNNABLE = {name: pipeline for name, pipeline in PIPELINES.items() if name != "ktransformers"}
FAMILIES = {
    family.model_type: replace(TINY, name=family.model_type, architecture=family.architecture, **family.example)
    for family in RUNNABLE_FAMILIES.values()
    if family.example or family.model_type == "mixtral"
}
"""A tiny model of every family whose checkpoints `write_checkpoint` makes; `made.py` has all families."""
QWEN2 = FAMILIES["qwen2_moe"]
QWEN3 = FAMILIES["qwen3_moe"]
SCHEDULES = (Sequential(1), Sequential(2), Sequential(2, prefetch=True), VSLPipe())
WIRED = {
    **RUNNABLE,
    "lightning": LIGHTNING,
    "streamed": STREAMED,
    "experts_on_cpu": gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine),
    "both_on_cpu": Overlap.example,
    "deferring": gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1) >> load >> gpu(combine),
    **{name: pipeline for name, (pipeline, _) in ADDED.items()},
    "shared_beside": gpu(qkv, attention, out_proj, route)
    >> (gpu(shared_experts) | offload >> cpu(experts) >> load)
    >> gpu(combine),
}
OF_SYSTEMS: tuple[tuple[str, Schedule], ...] = (
    ("lightning", CGOPipe(2)),
    ("vslpipe", CGOPipe(3)),
    ("lightning", FastDecode(3)),
    ("vslpipe", FlexGenS3(2)),
    ("lightning", FlexGenS3(2, WeightPlace.LAST)),
    ("flexgen_s4", FlexGenS4(3)),
    ("flexgen_s4", FlexGenS4(1, WeightPlace.PAGED)),
    ("streamed", LayerStreaming()),
    ("experts_on_cpu", KTransformers()),
    ("experts_on_cpu", Fiddler()),
    ("experts_on_cpu", Overlap(3)),
    ("flexgen_s4", Overlap(3)),
    ("vslpipe", Overlap(2, 3)),
    ("both_on_cpu", Overlap()),
    *((name, schedule) for name, (_, schedule) in ADDED.items()),
)
"""The systems' schedules, each with a pipeline that it takes."""


def ways(names: Sequence[str] = tuple(RUNNABLE)) -> list[tuple[str, Schedule]]:
    """Every pair of a runnable pipeline and a schedule that takes any, or that one."""
    return [(n, s) for n in names for s in SCHEDULES if n == "vslpipe" or not isinstance(s, VSLPipe)]


def machine(*, memory: float = 8e9, link: float = 5e9, throttled: bool = False) -> Machine:
    """This computer with invented rates: nothing is measured, and `run` accepts it."""

    def device(name: str) -> Device:
        return Device(name, memory, 10e9, (("fp32", 5e10), ("bf16", 1e11)), 2e-5)

    return Machine("here", device("gpu"), device("cpu"), Link(link, link), host=platform.node(), throttled=throttled)


def requests(
    lengths: Sequence[int], outputs: int | Sequence[int], *, vocab: int = TINY.vocab_size, seed: int = 0, t: float = 0.0
) -> tuple[Request, ...]:
    """Random prompts of these lengths; with a temperature each request has a seed of its own."""
    random = np.random.default_rng(seed)
    counts = [outputs] * len(lengths) if isinstance(outputs, int) else outputs
    prompts = [tuple(random.integers(0, vocab, length).tolist()) for length in lengths]
    return tuple(
        Request(prompt, count, Sampling(temperature=t, top_p=0.95, seed=1000 + number) if t else Sampling())
        for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    )


def longest(asked: Sequence[Request]) -> int:
    """KV tokens of the request that needs most: the smallest cache that serves them all."""
    return max(len(request.prompt) + request.output_len - 1 for request in asked)


def scenario(
    model: ModelConfig,
    asked: Sequence[Request],
    pipeline: Pipeline = VSL,
    *,
    tokens: int = 4096,
    block: int = 16,
    budget: float = 64,
    precision: str = "fp32",
    on: Machine | None = None,
) -> wb.Scenario:
    """A scenario whose KV cache holds at least `tokens` tokens, rounded up to whole blocks."""
    capacity = -(-tokens // block) * block * model.kv_bytes_per_token(precision)
    return wb.Scenario(
        pipeline,
        model,
        on or machine(),
        wb.Memory(kv_capacity=capacity, kv_block=block, weights=precision, kv=precision),
        Workload.of(asked),
        wb.ResourceAware(token_budget=budget),
    )


def differing(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    """Share of requests that got other tokens."""
    return sum(a != b for a, b in zip(left, right, strict=True)) / len(left)


def lane_threads() -> list[str]:
    """Threads of the engine that live."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lane-")]


def computed_by(patch: pytest.MonkeyPatch, name: str, run: Callable[..., Any]) -> None:
    """Let the engine compute the built-in operations of a name by another function."""
    patch.setattr(Ops, name, run)


def files_in_use(folder: Path) -> list[str]:
    """Files of a folder that this process holds open or mapped, after what is garbage was collected."""
    gc.collect()
    opened = [entry.path for entry in psutil.Process().open_files()]
    maps = Path("/proc/self/maps")
    mapped = [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
    return sorted({path for path in (*opened, *mapped) if path.startswith(str(folder.resolve()))})


@dataclass
class Countdown:
    """Lets `calls` calls pass, then calls `fire` once (an exception of its own if none is given)."""

    calls: int
    error: BaseException | None = None
    fired: bool = False

    def __call__(self) -> None:
        self.calls -= 1
        if self.calls < 0 and not self.fired:
            self.fired = True
            raise self.error or RuntimeError("struck")
