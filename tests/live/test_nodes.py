"""On a computer with several NUMA nodes, experts that stay where the host computes are divided among them.

The nodes are made up of this computer's cores.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.live.world import QWEN2, WIRED, requests, scenario
from workbench.engine.loading import stored
from workbench.engine.model.weights import WeightStore
from workbench.kernels import NodeExperts
from workbench.models import ModelConfig
from workbench.pipeline.stack_graph import stack_graph
from workbench.schedules import KTransformers, Sequential, VSLPipe
from workbench.stages import Precision, experts

MODEL = replace(QWEN2, name="two-nodes", hidden_size=64, moe_intermediate_size=128, num_hidden_layers=2, dtype="fp32")
ASKED = requests((1, 40, 7), (10, 8, 12), vocab=MODEL.vocab_size, seed=7)
CPUS = sorted(os.sched_getaffinity(0))
NODES = (frozenset({CPUS[0]}), frozenset({CPUS[-1]}))
PRECISIONS = {
    "fp32": Precision("fp32", "fp32"),
    "int8": Precision("fp32", "fp32", "int8", group=64),
    "int4": Precision("fp32", "fp32", "int4", group=64),
}


@pytest.fixture(scope="module")
def model(make_model: Any) -> ModelConfig:
    found: ModelConfig = make_model(MODEL, 7)
    return found


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[NodeExperts]:
    """What is computed in slices, once two nodes are faked."""
    found = list[NodeExperts]()
    plain = stored.experts_of

    def seen(weights: Any) -> Any:
        experts = plain(weights)
        found.extend([experts] if isinstance(experts, NodeExperts) else [])
        return experts

    monkeypatch.setattr(stored, "host_nodes", lambda: NODES)
    for module in ("few_rows", "ops"):
        monkeypatch.setattr(f"workbench.engine.model.{module}.experts_of", seen)
    return found


@pytest.mark.parametrize("weights", PRECISIONS)
@pytest.mark.parametrize(
    ("pipeline", "schedule"),
    [("all_cpu", Sequential()), ("experts_on_cpu", KTransformers()), ("all_gpu", Sequential(2))],
)
def test_two_nodes_generate_what_one_does(
    pipeline: str, schedule: Any, weights: str, model: ModelConfig, request: pytest.FixtureRequest
) -> None:
    of = scenario(model, ASKED, WIRED[pipeline])
    of = of.on(memory=replace(of.memory, weights=weights))
    want = wb.run(of, schedule).generated
    divided = request.getfixturevalue("divided")
    found = wb.run(of, schedule)
    assert found.generated == want
    assert {each.nodes for each in divided} == {NODES}
    assert {part.down.dim for each in divided for part in each.slices} == {64}


def test_streamed_experts_stay_whole(model: ModelConfig, divided: list[NodeExperts]) -> None:
    of = scenario(model, ASKED, WIRED["vslpipe"])
    assert wb.run(of, VSLPipe()).generated
    assert not divided


@pytest.mark.parametrize("weights", PRECISIONS)
def test_slices_hold_each_number_once(weights: str, model: ModelConfig, divided: list[NodeExperts]) -> None:
    graph = stack_graph(WIRED["all_cpu"], model)
    store = WeightStore(model, PRECISIONS[weights], graph)
    held = store.resident(1, experts)
    assert held["gate_up_blocks of node 1"].shape == held["gate_up_blocks of node 0"].shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "host_nodes", lambda: NODES[:1])
        whole = WeightStore(model, PRECISIONS[weights], graph).resident(1, experts)
    assert sum(tensor.nbytes for tensor in held.values()) == sum(tensor.nbytes for tensor in whole.values())
    blocks = torch.cat([held["gate_up_blocks of node 0"].flatten(), held["gate_up_blocks of node 1"].flatten()])
    assert blocks.sort().values.equal(whole["gate_up_blocks"].flatten().sort().values)


def test_experts_that_cannot_be_cut_stay_whole(make_model: Any, divided: list[NodeExperts]) -> None:
    narrow = make_model(replace(MODEL, name="one-block", moe_intermediate_size=64), 7)
    store = WeightStore(narrow, PRECISIONS["fp32"], stack_graph(WIRED["all_cpu"], narrow))
    assert sorted(store.resident(0, experts)) == ["down_blocks", "gate_up_blocks"]
