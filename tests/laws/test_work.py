"""Law 4: weights, FLOP and KV of a model are conserved, however its layers differ and wherever its stages sit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import KINDS, UNLIKE, enough_experts, small_machine, tiny_model, tiny_model_of, tiny_scenario
from tests.systems import PIPELINES
from workbench.core.units import WEIGHT_BYTES
from workbench.models import ModelConfig, models
from workbench.perfmodels.bound import total_rows
from workbench.schedules import Sequential
from workbench.serving import prepare
from workbench.serving.capacity import embedding_bytes
from workbench.serving.prepared import facts
from workbench.serving.task_cost import TaskCost
from workbench.simulate import Detail, simulate
from workbench.simulate.clock import TaskClock
from workbench.stages import (
    Place,
    Precision,
    Rows,
    Stage,
    afterwards,
    at_once,
    decode_attention,
    embed,
    experts,
    head,
    prefill_attention,
)

EVERY: dict[str, ModelConfig] = {**models, **{kind: tiny_model_of(kind) for kind in KINDS if kind not in UNLIKE}}
"""Models whose layers have the sizes of the model; `tests/unit/test_unlike_layers.py` is about the others."""
ATTENTION = (prefill_attention, decode_attention)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", EVERY)
def test_layers_and_ends_weigh_as_much_as_the_model(pipeline, name):
    model = enough_experts(EVERY[name], PIPELINES[pipeline])
    scenario = tiny_scenario(model=model, pipeline=PIPELINES[pipeline])
    layer = sum(stage.op.weight_bytes(model, scenario.precision) for stage in scenario.layer.stages)
    norms = model.num_hidden_layers * (2 * model.hidden_size + model.attention_vectors) * model.other_bytes
    final = model.hidden_size * WEIGHT_BYTES[model.dtype]
    total = model.num_hidden_layers * layer + embedding_bytes(scenario.model, scenario.precision)
    assert total == pytest.approx(model.weight_bytes + norms + final, rel=1e-12)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", EVERY)
def test_tokens_cost_as_many_gemm_flops_as_the_model_has_active_parameters(pipeline, name):
    model, rows = enough_experts(EVERY[name], PIPELINES[pipeline]), Rows(prefill=3, decode=2, emits=5)
    scenario = tiny_scenario(model=model, pipeline=PIPELINES[pipeline])
    gemms = [s.op for s in scenario.layer.stages if s.op not in ATTENTION and s.op.name != "combine"]
    flops = model.num_hidden_layers * sum(op.work(rows, model, scenario.precision).flops for op in gemms)
    flops += head.work(rows, model, scenario.precision).flops
    assert flops == pytest.approx(5 * model.flops_per_token(), rel=1e-5)  # active parameters are whole
    assert embed.work(rows, model, scenario.precision).flops == 0


@pytest.mark.parametrize("defer", [1, 3])
@pytest.mark.parametrize("rows", [Rows(prefill=5), Rows(decode=1), Rows(prefill=2, decode=7)], ids=str)
def test_late_experts_are_as_much_work_as_at_once(rows, defer):
    """The same FLOP; one token's experts are read once either way, those of several perhaps twice."""
    model, size = tiny_model(num_local_experts=8, num_experts_per_tok=4), Precision("bf16", "bf16")
    stage, whole = Stage(experts, Place.CPU, defer), experts.work(rows, model, size)
    now, late = at_once(stage)(rows, model, size), afterwards(stage)(rows, model, size)
    assert now.flops + late.flops == pytest.approx(whole.flops)
    activations = 2 * model.hidden_size * 2 * rows.decode  # in and out of the late experts
    read = now.bytes + late.bytes - activations
    assert read >= whole.bytes * (1 - 1e-12)
    if rows.decode < 2:
        assert read == pytest.approx(whole.bytes)
    assert at_once(Stage(experts, Place.CPU, skip=defer))(rows, model, size) == now


@pytest.mark.parametrize("name", EVERY)
def test_a_pass_streams_every_layer_once_and_a_slot_holds_the_largest(name):
    model, roomy = EVERY[name], small_machine(gpu_memory=1e13, host_memory=1e14)
    prepared = prepare(tiny_scenario(model=model, machine=roomy), Sequential())
    streamed = model.num_hidden_layers * prepared.cost.weights_per_layer
    norms = model.num_hidden_layers * (2 * model.hidden_size + model.attention_vectors) * model.other_bytes
    ends = model.weight_bytes - model.routed_bytes - (model.always_params - model.head_params) * model.other_bytes
    assert streamed == pytest.approx(model.weight_bytes - ends + norms, rel=1e-12)
    routed = model.num_local_experts * model.expert_params
    others = model.layer_params + model.attention_vectors - routed
    assert prepared.slot_bytes == pytest.approx(routed * model.expert_bytes + others * model.other_bytes)
    assert ("shared_experts" in facts(prepared.scenario, prepared)["pipeline"]) == (model.unrouted_params > 0)


@pytest.mark.parametrize("name", EVERY)
def test_decode_attention_reads_the_cache_that_the_model_keeps(name):
    """One sequence of 40 cached tokens; with windows each such layer reads the last ones only."""
    model, size = EVERY[name], Precision("bf16", "bf16")
    near = 39 % model.sliding_window + 1 if model.chunked else min(40, model.sliding_window)
    full = model.num_hidden_layers - model.windowed_layers
    context = float(model.attended(40))
    assert model.num_hidden_layers * context == pytest.approx(full * 40 + model.windowed_layers * near)
    read = (
        decode_attention.work(Rows(decode=1, context=context), model, size).bytes
        - decode_attention.work(Rows(decode=1), model, size).bytes
    )
    assert read == pytest.approx(context * model.kv_elements * 2)
    assert model.kv_bytes_per_token("bf16") == model.num_hidden_layers * model.kv_elements * 2


@pytest.mark.parametrize("kind", ["plain", "windows", "all", *UNLIKE])
@given(data=st.data())
def test_the_bound_counts_the_rows_that_a_simulation_pushes(kind, data):
    prompt = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    output = data.draw(st.lists(st.integers(1, 12), min_size=len(prompt), max_size=len(prompt)))
    scenario = tiny_scenario(prompt, output, model=tiny_model_of(kind))
    cost = prepare(scenario, Sequential()).cost
    layers = range(scenario.model.num_hidden_layers)
    pushed = [Rows() for _ in layers]

    part = TaskCost.part

    def counted(self, batch):
        rows = part(self, batch)
        for layer in layers:
            pushed[layer] = pushed[layer].plus(rows.at(layer))
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskClock, "advance", lambda self, queue, record: None)  # the kernel asks for no rows
        patch.setattr(TaskCost, "part", counted)
        simulate(scenario, Sequential(), detail=Detail.TASK)
    total = cost.by_kind(lambda model: total_rows(scenario.workload, model))
    for layer in layers:
        assert tuple(pushed[layer]) == pytest.approx(tuple(total.at(layer)))
