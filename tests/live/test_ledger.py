"""The ledger against the engine: weights, slots and KV to the byte, activations as buffers are held, and never more."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import workbench as wb
from kernels_triton.backend import products
from tests.live.world import FAMILIES, OF_SYSTEMS, QWEN2, QWEN3, RUNNABLE, TINY, WIRED, requests, scenario, ways
from workbench.engine.model.forward import Forward
from workbench.engine.model.kv_cache import KVCache
from workbench.engine.model.weights import WeightStore
from workbench.engine.tiny_model.synthesize import write_checkpoint
from workbench.models import ModelConfig, checkpoint
from workbench.pipeline.stack_graph import stack_graph
from workbench.schedules import KTransformers, Schedule, Sequential
from workbench.serving import fits
from workbench.stages import Place


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that torch makes in this thread: at once at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), given)
        return made

    def _count(self, storage: Any, given: set[int]) -> None:
        place = storage.data_ptr()
        if place not in given and place not in self.alive and storage.nbytes():
            self.alive[place] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            finalize(storage, self._gone, place)

    def _gone(self, place: int) -> None:
        self.now -= self.alive.pop(place)


KINDS = {
    f"{config.name} {dtype}": replace(config, dtype=dtype)
    for config, dtypes in [
        (TINY, ("fp32",)),
        (QWEN2, ("fp32",)),
        *((config, ("bf16",)) for config in FAMILIES.values()),
    ]
    for dtype in dtypes
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """As wide as its experts' rows outweigh the ids that route them; in bf16 experts are packed."""
    width = 192 if KINDS[request.param].dtype == "bf16" else 160
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": width, "head_dim": 16}
    if KINDS[request.param].moe_intermediate_size:
        sizes["moe_intermediate_size"] = width
    return checkpoint(write_checkpoint(replace(KINDS[request.param], **sizes), tmp_path_factory.mktemp("wide")))


def asked_of(model: ModelConfig, pipeline: str) -> wb.Scenario:
    """Every iteration but the last has 64 tokens, all but the first of them prefill and decode."""
    return scenario(model, requests([8] * 24, 6), WIRED[pipeline], budget=64, precision=model.dtype)


@pytest.mark.parametrize(("name", "schedule"), [*ways(), *OF_SYSTEMS[::3], ("deferring", KTransformers())], ids=str)
def test_what_is_allocated_is_what_the_ledger_says(
    name: str, schedule: Schedule, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_allocated(name, schedule, model, monkeypatch)


def check_allocated(name: str, schedule: Schedule, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    of = asked_of(model, name)
    found, held, worked = fits(of, schedule), defaultdict(int), defaultdict(int)
    compute, logits = Forward.compute, Forward.logits

    def computing(self: Any, stage: Any, *rest: Any) -> None:
        with Allocations() as made:
            compute(self, stage, *rest)
        worked[stage.device] = max(worked[stage.device], made.peak)

    def emitting(self: Any, *rest: Any) -> Any:
        for device in Place:
            there = (tensor.nbytes for (where, *_), tensor in self._buffers.items() if where is device)
            held[device] = max(held[device], sum(there))
        with Allocations() as made:
            answer = logits(self, *rest)
        worked[Place.GPU] = max(worked[Place.GPU], made.peak)
        return answer

    monkeypatch.setattr(Forward, "compute", computing)
    monkeypatch.setattr(Forward, "logits", emitting)
    # What a product of matrices takes inside is for the reserve: oneDNN's scratch memory, or widened blocks without it.
    monkeypatch.setattr(products, "has_products", lambda dtype: True)
    wb.run(of, schedule)
    assert held[Place.GPU] == found.gpu["activations"]
    if name == "flexgen_s4":  # new KV is on the host only until it is in the cache
        assert held[Place.CPU] == 0 < found.host["activations"]
    elif name == "deferring":  # what is late is there between layers only
        assert 0 < held[Place.CPU] < found.host["activations"]
    else:
        assert held[Place.CPU] == found.host["activations"]
    assert 0 < worked[Place.GPU] <= found.gpu["largest operation"]
    assert worked[Place.CPU] <= found.host["largest operation"]


@pytest.mark.parametrize("width", [8, 1600])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["shared_beside", "experts_on_cpu", "all_gpu"])
def test_shared_experts_too_are_in_the_ledger(
    name: str, dtype: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow, or the largest operation of all."""
    kind = replace(QWEN2, dtype=dtype, hidden_size=64, shared_expert_intermediate_size=width)
    schedule = KTransformers() if name == "shared_beside" else Sequential()
    model = checkpoint(write_checkpoint(kind, tmp_path))
    check_allocated(name, schedule, model, monkeypatch)
    if width == 1600:
        assert "shared_experts" in str(fits(asked_of(model, name), schedule))


@pytest.mark.parametrize(("heads", "dim"), [(4, 96), (2, 160)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_normed_heads_too_are_in_the_ledger(
    dtype: str, heads: int, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = replace(QWEN3, dtype=dtype, num_key_value_heads=heads, head_dim=dim)
    model = checkpoint(write_checkpoint(kind, tmp_path))
    check_allocated("vslpipe", Sequential(), model, monkeypatch)
    assert "qkv" in str(fits(asked_of(model, "vslpipe"), Sequential()))


@pytest.mark.parametrize("name", RUNNABLE)
def test_weights_and_cache_on_the_host_are_to_the_byte(name: str, model: ModelConfig) -> None:
    of = asked_of(model, name)
    found = fits(of, Sequential())
    store = WeightStore(model, of.precision, stack_graph(of.stack, model))
    weights = sum(
        stored.tensor.nbytes
        for stage in of.layer.stages
        if stage.op.has_weights and (stage.device is Place.CPU or of.layer.streams(stage))
        for layer in range(model.num_hidden_layers)
        for stored in store.sources(layer, stage.op)
    )
    cache = KVCache(model, of.kv_blocks, of.memory.kv_block, model.dtype)
    on_host = sum(pool.nbytes for pool in cache.pools) if of.pipeline.kv_device is Place.CPU else 0
    assert (weights, on_host) == (found.host["weights"], found.host["KV cache"])
