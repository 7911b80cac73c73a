"""Costs of stages and transfers: their sums are what the clocks price, their sizes what can be counted by hand."""

from dataclasses import replace

import pytest

from tests.builders import tiny_model, tiny_model_of, tiny_scenario
from tests.systems import APART, LIGHTNING, PIPELINES, STREAMED, VSL, split
from workbench.analysis.costs import costs
from workbench.core.units import DTYPE_BYTES
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.pipeline.layer_graph import TO_CPU, TO_GPU, NodeKind
from workbench.schedules import Sequential
from workbench.schedules.base import Step
from workbench.serving.prepared import Typical, price
from workbench.stages import attention, combine, experts, moe, out_proj, qkv, route

WIRINGS = {**PIPELINES, "vsl": VSL, "lightning": LIGHTNING, "apart": APART, "split": split(slice(None, 2))}
WIRINGS = {name: wiring for name, wiring in WIRINGS.items() if name != "ktransformers"}


@pytest.mark.parametrize("name", WIRINGS)
def test_lanes_work_as_long_as_the_tasks_of_a_sequential_iteration(name):
    scenario = tiny_scenario(pipeline=WIRINGS[name])
    found = costs(scenario)
    prepared = price(scenario, Sequential())
    rows = [prepared.cost.by_kind(Typical.of(scenario, Sequential()).rows)]
    tasks = prepared.lowering.tasks(Step.MIDDLE)
    seconds = prepared.plans.tasks(tasks, rows)
    ends = (NodeKind.EMBED, NodeKind.HEAD)
    for lane in ("gpu", "cpu", "h2d", "d2h"):
        timed = zip(tasks, seconds, strict=True)
        expected = sum(
            taken
            for task, taken in timed
            if task.node.lane == lane and task.node.kind not in ends and task.node not in (TO_CPU, TO_GPU)
        )
        assert found.lanes.get(lane, 0.0) == pytest.approx(expected, rel=1e-9), lane


def test_shares_of_a_lane_add_up_to_one():
    found = costs(tiny_scenario(pipeline=VSL))
    for lane in found.lanes:
        assert sum(cost.share for cost in found.entries if cost.lane == lane) == pytest.approx(1.0)


def test_sizes_are_those_counted_by_hand():
    model = tiny_model()
    found = costs(tiny_scenario(pipeline=STREAMED, model=model))
    two = DTYPE_BYTES["bf16"]
    experts = found.at(0, (5,))
    assert experts.what == "gpu(experts)"
    assert experts.weights == model.num_local_experts * 3 * model.hidden_size * model.expert_width * two
    assert experts.streamed == experts.weights
    (streamed,) = (cost for cost in found.entries if cost.what == "weights")
    assert streamed.moved == pytest.approx(sum(cost.streamed for cost in found.entries))


def test_resident_weights_are_not_streamed():
    found = costs(tiny_scenario(pipeline=PIPELINES["all_gpu"]))
    assert all(cost.streamed == 0 for cost in found.entries)
    assert not [cost for cost in found.entries if cost.lane == "h2d"]


def test_a_transfer_moves_the_rows_that_later_stages_read_there():
    scenario = tiny_scenario(pipeline=VSL)
    found = costs(scenario)
    model, two = scenario.model, DTYPE_BYTES["bf16"]
    load = next(cost for cost in found.entries if cost.what == "load")
    heads = model.num_attention_heads * model.head_dim
    assert load.moved == pytest.approx(found.decodes * heads * two)


def test_shared_experts_count_with_the_experts_that_they_follow():
    model = tiny_model_of("shared")
    alone = costs(tiny_scenario(pipeline=PIPELINES["all_gpu"], model=model))
    assert "shared_experts" not in " ".join(cost.what for cost in alone.entries)
    experts = next(cost for cost in alone.entries if cost.what == "gpu(experts)")
    routed = model.num_local_experts * 3 * model.hidden_size * model.expert_width * DTYPE_BYTES["bf16"]
    assert experts.weights > routed


def test_each_range_has_its_own_costs():
    stack = VSL[:1] + Pipeline(VSL.chain)[1:]
    found = costs(tiny_scenario(pipeline=stack))
    assert {cost.place for cost in found.entries} == {0, 1}
    assert [cost.place for cost in found.entries if cost.what == "weights"] == [0]


def test_a_faster_link_shortens_transfers_alone():
    scenario = tiny_scenario(pipeline=VSL)
    link = scenario.machine.link
    machine = replace(scenario.machine, link=replace(link, h2d=2 * link.h2d, d2h=2 * link.d2h, overhead=0.0))
    slow = replace(scenario.machine, link=replace(link, overhead=0.0))
    once, twice = costs(scenario.on(machine=slow)), costs(scenario.on(machine=machine))
    for one, two in zip(once.entries, twice.entries, strict=True):
        expected = one.seconds / 2 if one.lane in ("h2d", "d2h") else one.seconds
        assert two.seconds == pytest.approx(expected)


def test_chosen_experts_are_counted_where_the_first_layers_have_none():
    model = replace(tiny_model(), moe_intermediate_size=40, first_k_dense_replace=2)
    pipeline = fetch(experts.chosen) | gpu(qkv, attention, out_proj, moe)
    found = costs(tiny_scenario(pipeline=pipeline, model=model))
    (chosen,) = (cost for cost in found.entries if cost.what == "chosen experts")
    alike = costs(tiny_scenario(pipeline=pipeline, model=replace(model, first_k_dense_replace=0)))
    (all_layers,) = (cost for cost in alike.entries if cost.what == "chosen experts")
    assert 0 < chosen.moved == pytest.approx(all_layers.moved / 2)


def test_deferred_experts_are_computed_too():
    wiring = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1) >> load >> gpu(combine)
    late, now = (
        next(c for c in costs(tiny_scenario(pipeline=each)).entries if c.what.startswith("cpu(experts"))
        for each in (wiring, Pipeline(tuple(replace(e, defer=0) if e in wiring.stages else e for e in wiring.chain)))
    )
    assert late.flops == pytest.approx(now.flops)
