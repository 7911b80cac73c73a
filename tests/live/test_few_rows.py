"""Kernels for few rows compute the decodes of few requests, and give what the operations that they replace give."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.live.world import FAMILIES, RUNNABLE, STREAMED, requests, scenario
from workbench import kernels
from workbench.engine import engine
from workbench.engine.model import few_rows, forward, kv_cache
from workbench.engine.model.whole_layers import runs_of
from workbench.models import ModelConfig
from workbench.pipeline.stack_graph import stack_graph
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import LayerStreaming, Sequential
from workbench.schedules.base import Lowering, Step

STAGES = ("FewLayers", "FewQkv", "FewLinear", "FewRoute", "FewExperts", "PagedDecode")
ASKED = requests((9, 5), (12, 12), vocab=512, seed=3)
WAYS = {"resident": (RUNNABLE["all_gpu"], Sequential()), "streamed": (STREAMED, LayerStreaming())}


@pytest.fixture(params=["mixtral", "qwen2_moe", "qwen3_moe"])
def kind(request: Any) -> ModelConfig:
    config = FAMILIES[request.param]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    narrow = {} if config.moe_intermediate_size is None else {"moe_intermediate_size": 128}
    return replace(config, name=f"few-{request.param}", **sizes, **narrow)


def counted(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the kernels for few rows."""
    calls = Counter[str]()

    def watch(name: str) -> None:
        kernel = getattr(kernels, name)
        call = kernel.__call__

        def noted(self: Any, *rest: Any, **how: Any) -> Any:
            calls[name] += 1
            return call(self, *rest, **how)

        patch.setattr(kernel, "__call__", noted)

    for name in STAGES:
        watch(name)
    return calls


def without(patch: pytest.MonkeyPatch) -> None:
    """Let no kernel hold weights or a cache."""
    patch.setattr(few_rows.Held, "takes", lambda *_: False)
    patch.setattr(kv_cache, "PagedDecode", SingleOperations)


class SingleOperations:
    """A cache that the single operations read and write, as `PagedDecode`."""

    def __init__(self, pool: torch.Tensor, heads: int) -> None:
        self._pool, self._heads = pool, heads

    def warm_up(self, q: torch.Tensor) -> None:
        pass

    def append(self, slots: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        shape = (len(k), self._pool.shape[1], self._pool.shape[4])
        kernels.append_kv(self._pool, torch.from_numpy(slots), k.float().view(shape), v.float().view(shape))

    def __call__(self, q: torch.Tensor, table: Any, lengths: Any, *, threads: int, **options: Any) -> torch.Tensor:
        queries = q.float().view(len(q), self._heads, -1)
        found = kernels.decode_attention(queries, self._pool, table, lengths, **options, threads=threads)
        return found.flatten(1).to(q.dtype)


def logits_of(model: ModelConfig, precision: str, patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    logits: Callable[..., torch.Tensor] = forward.Forward.logits

    def noted(self: Any, *rest: Any) -> torch.Tensor:
        seen.append(logits(self, *rest))
        return seen[-1]

    patch.setattr(forward.Forward, "logits", noted)
    wb.run(scenario(model, ASKED, precision=precision), Sequential())
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_single_operations(
    way: str, kind: ModelConfig, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(kind, 7)
    pipeline, schedule = WAYS[way]
    asked = scenario(model, ASKED, pipeline)
    calls = counted(monkeypatch)
    found = wb.run(asked, schedule).tokens
    decodes = 11 * model.num_hidden_layers
    whole = {"FewLayers": 11, "FewLinear": 11}
    single = dict.fromkeys(("FewQkv", "FewRoute", "FewExperts", "PagedDecode"), decodes) | {"FewLinear": decodes + 11}
    in_one_call = way == "resident" and not model.shared_expert_intermediate_size
    assert all(calls[name] >= count for name, count in (whole if in_one_call else single).items())
    assert calls["FewLayers"] == (11 if in_one_call else 0)
    calls.clear()
    without(monkeypatch)
    assert wb.run(asked, schedule).tokens == found
    assert len(set(sum(found, ()))) > 10
    assert set(calls) <= {"FewQkv", "FewLinear", "FewRoute", "FewExperts"}  # of the warm-up
    assert calls.total() <= 4


@pytest.mark.parametrize("parts", [1, 2])
def test_experts_are_counted_alike_in_whole_layers(
    parts: int, make_model: Any, kind: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two parts of a batch choose the same experts, which each of them reads."""
    asked = scenario(make_model(kind, 7), requests((9, 9, 5), (12, 12, 12), vocab=512, seed=3), RUNNABLE["all_gpu"])
    found = wb.run(asked, Sequential(parts))
    without(monkeypatch)
    other = wb.run(asked, Sequential(parts))
    assert found.tokens == other.tokens
    assert found.expert_counts == other.expert_counts
    assert found.steps.expert_bytes == other.steps.expert_bytes


DEEP = replace(FAMILIES["mixtral"], name="few-deep", hidden_size=64, intermediate_size=128, num_hidden_layers=5)


@pytest.fixture(scope="module")
def deep(make_model: Any) -> ModelConfig:
    found: ModelConfig = make_model(DEEP, 7)
    return found


def sizes_of_calls(patch: pytest.MonkeyPatch) -> Counter[int]:
    """Layers of each call that computes several at once."""
    sizes = Counter[int]()
    call = kernels.FewLayers.__call__

    def noted(self: Any, *rest: Any, **how: Any) -> Any:
        found = call(self, *rest, **how)
        sizes[len(found[2])] += 1
        return found

    patch.setattr(kernels.FewLayers, "__call__", noted)
    return sizes


@pytest.mark.parametrize(
    ("schedule", "scheduler", "layers", "sizes"),
    [
        (Sequential(), ResourceAware(), 9, {5: 10}),
        (Sequential(), ResourceAware(), 2, {2: 20, 1: 10}),
        (Sequential(2), ResourceAware(), 9, {1: 100}),
        (Sequential(), LayeredPrefill(granularity=4), 9, None),
    ],
)
def test_layers_in_one_call_are_told_apart(
    schedule: Any, scheduler: Any, layers: int, sizes: Any, deep: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a time of its own, in which no other task of the lane is at work, and follows the one before."""
    of = scenario(deep, requests((9, 5, 3), (11, 11, 11), vocab=97, seed=3), RUNNABLE["all_gpu"])
    asked = of.on(scheduler=scheduler)
    with monkeypatch.context() as patch:
        without(patch)
        want = wb.run(asked, schedule)
    monkeypatch.setattr(engine, "layers_at_once", lambda *_: layers)
    seen = sizes_of_calls(monkeypatch)
    found = wb.run(asked, schedule)
    assert seen == sizes if sizes else len(seen) > 1
    assert found.tokens == want.tokens
    assert found.expert_counts == want.expert_counts
    assert found.steps.expert_bytes == want.steps.expert_bytes
    spans, others = list(found.timeline), list(want.timeline)
    assert [(span.lane, span.name, span.iteration) for span in spans] == [
        (span.lane, span.name, span.iteration) for span in others
    ]
    assert [span.after for span in spans] == [span.after for span in others]
    edges = [edge for span in spans for edge in (span.start, span.end)]
    assert edges == sorted(edges)
    assert all(span.end > span.start for span in spans)


def test_an_error_that_is_kept_does_not_keep_the_layers(deep: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames hold the calls of whole layers, which have let go what they hold."""
    asked = scenario(deep, requests((9,), (11,), vocab=97, seed=3), RUNNABLE["all_gpu"])
    call = kernels.FewLayers.__call__
    stages = list[Any]()

    def struck(self: Any, *rest: Any, **how: Any) -> Any:
        stages.append(weakref.ref(self._layers[0].stages[4]))
        if len(stages) == 4:
            raise RuntimeError("struck")
        return call(self, *rest, **how)

    monkeypatch.setattr(kernels.FewLayers, "__call__", struck)
    with pytest.raises(RuntimeError, match="struck") as kept:
        wb.run(asked, Sequential())
    gc.collect()
    assert kept.value.__traceback__ is not None
    assert stages[0]() is None


def test_only_tasks_that_nothing_else_awaits_are_joined(deep: ModelConfig) -> None:
    stack = stack_graph(RUNNABLE["all_gpu"], deep)
    alone, by_turns = (Lowering(schedule, stack).tasks(Step.MIDDLE) for schedule in (Sequential(), Sequential(2)))
    assert [(run.first, run.past) for run in runs_of(alone, 9)] == [(1, 6)]
    assert [run.past - run.first for run in runs_of(by_turns, 9)] == [1] * 10
    head = alone[-1]._replace(after=(3, 5))
    assert [(run.first, run.past) for run in runs_of((*alone[:-1], head), 9)] == [(1, 4), (4, 6)]
    waits = alone[4]._replace(after=(0, 3))
    assert [(run.first, run.past) for run in runs_of((*alone[:4], waits, *alone[5:]), 9)] == [(1, 4), (4, 6)]


def test_logits_in_bf16_are_as_near_as_rounding_lets_them(
    kind: ModelConfig, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the prompts' last tokens, and of the first token after them, which is the same."""
    model = make_model(replace(kind, name=f"{kind.name}-bf16", dtype="bf16"), 7)
    with monkeypatch.context() as patch:
        few = logits_of(model, "bf16", patch)
    with monkeypatch.context() as patch:
        without(patch)
        other = logits_of(model, "bf16", patch)
    assert few[0].argmax(1).equal(other[0].argmax(1))
    for one, two in zip(few[:2], other[:2], strict=True):
        assert float((one - two).norm() / two.norm()) < 2e-2


def at_the_first_place(decodes: kernels.Decodes) -> kernels.Decodes:
    positions, *rest = decodes.operands
    return kernels.Decodes(torch.zeros_like(positions), *rest)


FIRST = {
    (kernels.FewQkv, "split"): torch.zeros_like,
    (kernels.FewQkv, "__call__"): torch.zeros_like,
    (kernels.FewLayers, "__call__"): at_the_first_place,
}


@pytest.mark.parametrize("kernel", FIRST, ids=["many rows", "a stage", "a layer"])
def test_rope_left_out_of_held_kernels_changes_tokens(
    kernel: Any, kind: ModelConfig, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are what the answer comes from: `split` for prompts, a call of a stage or of a layer for decodes."""
    model = make_model(kind, 7)
    pipeline, schedule = WAYS["streamed" if kernel == (kernels.FewQkv, "__call__") else "resident"]
    asked = scenario(model, ASKED, pipeline)
    right = wb.run(asked, schedule).tokens
    call = getattr(*kernel)
    monkeypatch.setattr(*kernel, lambda self, x, places, **how: call(self, x, FIRST[kernel](places), **how))
    in_one_call = kernel[0] is kernels.FewQkv or not model.shared_expert_intermediate_size
    assert (wb.run(asked, schedule).tokens != right) is in_one_call
