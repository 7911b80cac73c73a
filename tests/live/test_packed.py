"""Routed experts of whole blocks are packed when the model is loaded, and held once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.live.world import QWEN2, RUNNABLE, STREAMED, TINY, requests, scenario
from workbench.engine.model import ops
from workbench.engine.model.weights import WeightBuffer, WeightStore
from workbench.kernels import fused_moe
from workbench.models import ModelConfig
from workbench.pipeline.layer_graph import layer_graph
from workbench.schedules import LayerStreaming, Sequential
from workbench.stages import experts

WIDE = replace(QWEN2, name="wide", hidden_size=64, moe_intermediate_size=128, num_hidden_layers=2)
ASKED = requests((1, 40, 7), (10, 8, 12), vocab=WIDE.vocab_size, seed=7)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(request: Any, make_model: Any) -> ModelConfig:
    return make_model(replace(WIDE, name=f"wide-{request.param}", dtype=request.param), 2)


def in_rows(store: WeightStore, layer: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Gates and ups, and downs, of a store that does not pack."""
    with monkeypatch.context() as patch:
        patch.setattr("workbench.engine.model.weights.packable", lambda *_: False)
        plain = WeightStore(store.model, store.model.dtype, [experts])
    return [stored.joined() for stored in plain.sources(layer, experts)]


def test_packed_experts_compute_what_those_in_rows_do(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(model, model.dtype, [experts])
    pair = [matrices.double() for matrices in in_rows(store, 1, monkeypatch)]
    held = store.resident(1, experts)
    assert sorted(held) == ["down_blocks", "gate_up_blocks"]
    random = torch.Generator().manual_seed(0)
    h = torch.randn(40, 64, generator=random).to(held["down_blocks"].dtype)
    ids = torch.randint(0, model.num_local_experts, (40, 2), generator=random)
    scales = torch.rand(40, 2, generator=random)
    found = ops.Ops(model).experts(None, {"h": h, "gates": torch.cat((ids, scales), 1)}, held)  # type: ignore[arg-type]
    assert found.dtype is h.dtype
    want = torch.zeros(40, 64, dtype=torch.float64)
    for t, row in enumerate(h.double()):
        for expert, scale in zip(ids[t], scales[t], strict=True):
            gate, up = (pair[0][expert] @ row).chunk(2)
            want[t] += scale * (pair[1][expert] @ (torch.nn.functional.silu(gate) * up))
    assert (found.double() - want).norm() / want.norm() < (1e-6 if model.dtype == "fp32" else 1e-2)


def test_packed_experts_leave_the_checkpoint_s_form(model: ModelConfig) -> None:
    store = WeightStore(model, model.dtype, [experts])
    size = sum(part.nbytes for stored in store.sources(0, experts) for part in stored.parts)
    assert size == model.num_local_experts * model.expert_params * (4 if model.dtype == "fp32" else 2)
    with pytest.raises(KeyError):
        store._of_checkpoint(0, experts)
    store.resident(0, experts)
    with pytest.raises(KeyError):
        store.sources(0, experts)
    assert store.sources(1, experts)


def test_experts_of_other_sizes_stay_in_rows(make_model: Any) -> None:
    for sizes in ({"hidden_size": 32, "intermediate_size": 64}, {"hidden_size": 64, "intermediate_size": 96}):
        model = make_model(replace(TINY, name=f"odd-{sizes['intermediate_size']}", **sizes), 1)
        keys = [stored.key for stored in WeightStore(model, "fp32", [experts]).sources(0, experts)]
        assert keys == ["gate_up", "down"]


def test_packed_experts_begin_on_a_line_in_a_slot_whatever_is_streamed_with_them(model: ModelConfig) -> None:
    graph = layer_graph(STREAMED, model)
    store = WeightStore(model, model.dtype, [stage.op for stage in graph.pipeline.stages])
    buffer = WeightBuffer(store, graph, 4 * model.layer_params, 2)
    transfer = buffer.transfer(tuple((1, node) for node in graph.streamed))
    transfer.make()
    assert transfer.arrived is not None
    transfer.arrived()
    there = buffer.get(1, experts)
    for stored in store.sources(1, experts):
        assert there[stored.key].data_ptr() % 64 == 0
        assert torch.equal(there[stored.key], stored.joined())


@pytest.mark.parametrize("name", ["all_gpu", "all_cpu"])
def test_streamed_and_resident_packed_experts_answer_alike(name: str, model: ModelConfig) -> None:
    of = scenario(model, ASKED, RUNNABLE[name], precision=model.dtype)
    streamed = wb.run(of.on(pipeline=STREAMED), LayerStreaming())
    assert wb.run(of, Sequential()).tokens == streamed.tokens
    assert len(set(sum(streamed.tokens, ()))) > 5


def test_a_run_computes_packed_experts(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def watched(x: torch.Tensor, experts: Any, *rest: Any, **how: Any) -> torch.Tensor:
        seen.add(type(experts).__name__)
        return fused_moe(x, experts, *rest, **how)

    monkeypatch.setattr(ops, "fused_moe", watched)
    wb.run(scenario(model, ASKED, RUNNABLE["all_cpu"], precision=model.dtype), Sequential())
    assert seen == {"PackedExperts"}
