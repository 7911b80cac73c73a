"""Layers with sizes of their own: states, sparse attention, other heads, formats per operation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.builders import UNLIKE, make_batch, tiny_model, tiny_model_of, tiny_scenario
from workbench.core.errors import ScenarioError
from workbench.core.records import from_plain, to_plain
from workbench.models import LayerKind, ModelConfig
from workbench.models.layers import Counted, Own, Recurrence, Sparse
from workbench.perfmodels.moe_cap import kv_read_bytes, token_flops
from workbench.perfmodels.moe_lens import streaming
from workbench.perfmodels.moe_lightning import Job
from workbench.pipeline import fetch, gpu
from workbench.pipeline.layer_graph import NodeKind
from workbench.scenario import Scenario
from workbench.schedules import Sequential
from workbench.serving import fits, prepare
from workbench.serving.capacity import embedding_bytes
from workbench.stages import (
    BUILT_IN,
    Precision,
    Rows,
    attention,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
)

BF16 = Precision("bf16", "bf16")
ONE = Recurrence("delta rule", state=100, macs=350.0, taken=40, given=20)


@pytest.mark.parametrize("kind", UNLIKE)
def test_sizes_of_the_model_are_the_sums_over_its_layers(kind):
    model = tiny_model_of(kind, 7)
    each = [model.of_kind(layer) for layer in model.layer_kinds]
    ends = 2 * model.vocab_size * model.hidden_size + model.hidden_size
    with_experts = [one for one in each if one.moe_layers]
    assert model.kv_bytes_per_token("bf16") == pytest.approx(sum(2 * one.kv_elements for one in each))
    assert model.routed_params == sum(one.num_local_experts * one.expert_params for one in with_experts)
    always = sum(one.each_always for one in each)
    assert model.always_params == pytest.approx(always + model.vocab_size * model.hidden_size)
    vectors = sum(one.attention_vectors for one in each) if each[0].counted else 0
    assert model.params == pytest.approx(always + model.routed_params + ends + vectors + 7 * 2 * model.hidden_size)
    for tokens in (1, 5, 40):
        mean = np.mean([one.attended(tokens) for one in each])
        assert model.attended(tokens) == pytest.approx(mean)


@pytest.mark.parametrize("kind", UNLIKE)
def test_they_survive_a_file(kind, tmp_path):
    model = tiny_model_of(kind, 5)
    assert from_plain(ModelConfig, to_plain(model)) == model
    scenario = tiny_scenario(model=model)
    assert Scenario.load(scenario.save(tmp_path / "scenario.json")).model == model


ATTENDED = {
    "window": replace(tiny_model(2), windowed_layers=2, sliding_window=9),
    "chunk": replace(tiny_model(2), windowed_layers=2, sliding_window=9, chunked=True),
    "top": replace(tiny_model(2), sparse=Sparse(top=6, keys=4, macs=8)),
    "summaries": replace(tiny_model(2), sparse=Sparse(top=3, ratio=4, window=5)),
    "all summaries": replace(tiny_model(2), sparse=Sparse(ratio=8, window=5)),
}


@pytest.mark.parametrize("name", ATTENDED)
@given(st.integers(0, 200))
def test_attended_below_sums_attended(name, tokens):
    model = ATTENDED[name]
    summed = sum(float(model.attended(context)) for context in range(1, tokens + 1))
    assert float(model.attended_below(tokens)) == pytest.approx(summed)


def test_a_chunk_holds_the_tokens_since_it_began():
    """Chunks of 9 tokens: the 9th attends to all of its chunk, the 10th begins the next one."""
    found = ATTENDED["chunk"].attended(np.array([1, 9, 10, 18, 19, 22]))
    assert found.tolist() == [1, 9, 1, 9, 1, 4]


def test_a_state_is_read_and_written_once_for_each_sequence():
    model = replace(tiny_model(2), recurrence=ONE)
    decode = decode_attention.work(Rows(decode=3, context=900, emits=3), model, BF16)
    assert decode.flops == 2 * 3 * 350
    assert decode.bytes == 3 * (2 * 100 * 4 + 60 * 2)
    prefill = prefill_attention.work(Rows(prefill=50, pairs=1275, emits=2), model, BF16)
    assert prefill.flops == 2 * 50 * 350
    assert prefill.bytes == 2 * 2 * 100 * 4 + 50 * 60 * 2
    assert model.kv_elements == 0
    assert qkv.work(Rows(prefill=4), model, BF16).bytes == 2 * (model.attention_in_params + 4 * (64 + 40))
    assert out_proj.work(Rows(prefill=4), model, BF16).bytes == 2 * (model.attention_out_params + 4 * (20 + 2 * 64))


def test_an_index_scores_every_entry_and_attention_reads_the_best():
    model = replace(tiny_model(2), sparse=Sparse(top=6, keys=4, macs=8))
    work = decode_attention.work(Rows(decode=1, context=6, scanned=100), model, BF16)
    without = decode_attention.work(Rows(decode=1), model, BF16)
    assert work.flops == 2 * (model.entry_macs * 6 + 8 * 100)
    assert work.bytes - without.bytes == 2 * (model.kv_width * 6 + 4 * 100)
    assert model.kv_elements == model.kv_width + 4
    prefill = prefill_attention.work(Rows(prefill=10, pairs=45, scored=55), model, BF16)
    assert prefill.flops == 2 * (model.pair_macs * 45 + 8 * 55)


def test_choices_that_compute_nothing_cost_nothing():
    model = tiny_model(2)
    idle = replace(model, idle_experts=4)
    rows = Rows(prefill=5)
    assert experts.work(rows, idle, BF16).flops == experts.work(rows, model, BF16).flops / 2
    assert idle.touched_experts(5) == pytest.approx(4 * (1 - (1 - 2 / 8) ** 5))
    assert idle.always_params + (model.active_params - model.always_params) / 2 == idle.active_params


def test_formats_of_operations_price_their_weights():
    formats = (("experts", 0.6), ("qkv", 0.8), ("head", 1.0), ("embed", 0.5))
    model = replace(tiny_model(2), formats=formats)
    usual = {op.name: op.weight_bytes(tiny_model(2), BF16) for op in BUILT_IN.values()}
    for op in BUILT_IN.values():
        each = dict(formats).get(op.name, 2.0)
        assert op.weight_bytes(model, BF16) == pytest.approx(usual[op.name] / 2 * each)
    assert model.head_bytes == model.head_params
    assert model.embedding_bytes == model.embedding_params / 2
    assert model.routed_bytes == pytest.approx(0.6 * model.routed_params)
    rows = Rows(decode=1)
    gone = experts.work(rows, tiny_model(2), BF16).bytes - experts.work(rows, model, BF16).bytes
    assert gone == pytest.approx(1.4 * model.touched_experts(1) * model.expert_params)
    scenario = tiny_scenario(model=model)
    asked = scenario.on(memory=replace(scenario.memory, weights="bf16"))
    assert prepare(asked, Sequential()).cost.weights_per_layer == pytest.approx(sum(usual.values()))
    assert "bits on average" in str(scenario)
    wide = replace(model, intermediate_size=128)
    rounded = scenario.on(model=wide, memory=replace(scenario.memory, weights="int4")).precision
    assert qkv.bytes_each(wide, rounded) == 0.8
    assert experts.bytes_each(wide, rounded) == 0.5 + 4 / 64


def test_layers_that_are_all_of_one_kind_have_its_sizes():
    """Decode attention of 100 cached tokens, of which an index lets 2 be read."""
    model = tiny_model_of("alike", 3)
    cost = prepare(tiny_scenario(model=model), Sequential()).cost
    assert cost.model_at(1).sparse == UNLIKE["alike"][0].own.sparse
    rows = cost.part(make_batch([], [99])).at(1)
    assert (rows.context, rows.scanned) == (2, 100)


def test_transfers_have_the_sizes_of_their_layer():
    """Attention on the CPU: what goes down and up for one decode, and for a prompt of 10 tokens."""
    model = tiny_model_of("states", 3)
    scenario = tiny_scenario(model=model)
    cost = prepare(scenario, Sequential()).cost
    graph = scenario.graph
    kinds = model.layer_kinds
    for layer, kind in enumerate(kinds):
        down, up = (node for node in graph.at(layer) if node and node.lane in ("d2h", "h2d") and node.carries)
        state = kind.own.recurrence
        one = model.of_kind(kind)
        sent = state.taken if state else one.q_size + 2 * one.kv_size
        kept = 4 * state.state if state else 10 * 2 * 2 * one.kv_size
        assert cost.transfer(down, Rows(decode=1, emits=1), layer) == 2 * sent
        assert cost.transfer(down, Rows(prefill=10, emits=1), layer) == kept
        assert cost.transfer(up, Rows(decode=1, emits=1), layer) == 2 * (state.given if state else one.attn_size)


def test_streamed_caches_are_as_wide_as_in_their_layer():
    model = tiny_model_of("heads", 3)
    streamed = fetch(kv) | gpu(qkv, attention, out_proj, moe)
    scenario = tiny_scenario(model=model, pipeline=streamed)
    cost = prepare(scenario, Sequential()).cost
    for layer, kind in enumerate(model.layer_kinds):
        node = next(node for node in scenario.graph.at(layer) if node and node.kind is NodeKind.KV_IN)
        assert cost.transfer(node, Rows(decode=1, context=11), layer) == 10 * 2 * model.of_kind(kind).kv_elements


def test_the_ledger_has_the_states_of_all_requests():
    model = tiny_model_of("states", 6)
    scenario = tiny_scenario([30] * 5, [4] * 5, model=model, blocks=100)
    states = [entry for entry in fits(scenario, Sequential()).host.entries if entry.name == "states"]
    each = sum(kind.own.recurrence.state for kind in model.layer_kinds if kind.own.recurrence)
    assert [entry.bytes for entry in states] == [5 * each * 4]
    assert model.state_elements * 6 == each


@pytest.mark.parametrize("kind", UNLIKE)
def test_the_ledger_has_the_weights_and_caches_of_every_layer(kind):
    model = tiny_model_of(kind, 5)
    scenario = tiny_scenario(model=model, blocks=50)
    found = fits(scenario, Sequential())
    each = [model.of_kind(layer) for layer in model.layer_kinds]
    weights = sum(op.weight_bytes(one, BF16) for one in each for op in BUILT_IN.values() if _has(op, one))
    assert found.gpu["weights"] + found.host["weights"] == pytest.approx(
        weights + embedding_bytes(scenario.model, scenario.precision)
    )
    assert found.host["KV cache"] == pytest.approx(50 * 4 * sum(2 * one.kv_elements for one in each))


def _has(op, model):
    return op.name != "experts" or not model.dense_layers


def test_streaming_the_cache_of_layers_with_states_is_refused():
    streamed = fetch(kv) | gpu(qkv, attention, out_proj, moe)
    with pytest.raises(ScenarioError, match="keep states in the place of keys"):
        tiny_scenario(model=tiny_model_of("states"), pipeline=streamed)


def test_a_model_without_any_cache_is_refused():
    model = replace(tiny_model(2), recurrence=ONE)
    with pytest.raises(ScenarioError, match="no layer of tiny keeps keys and values"):
        tiny_scenario().on(model=model)


def test_the_kinds_are_told_in_words():
    own = Own(counted=Counted(1, 1), recurrence=ONE)
    assert LayerKind(own=own).value == "delta rule"
    assert LayerKind(dense=True, own=own).value == "dense delta rule"
    assert LayerKind(own=Own(sparse=Sparse(top=3))).value == "top 3"
    assert LayerKind(own=Own(sparse=Sparse(ratio=8, window=5))).value == "all of 8 tokens each, window 5"
    assert LayerKind(own=Own(formats=(("experts", 0.5625),))).value == "full 4.5-bit"


def test_a_format_of_an_unknown_operation_is_refused():
    with pytest.raises(ScenarioError, match="give bytes per weight of embed, qkv"):
        replace(tiny_model(2), formats=(("mlp", 0.5),))
    with pytest.raises(ScenarioError, match="formats"):
        replace(tiny_model(2), formats=(("qkv", -1.0),))


FORMULAS = {
    "MoE-Lens": lambda model: streaming(model, wb.machines["a40"]),
    "MoE-CAP, bytes": lambda model: kv_read_bytes(model, 1, 10),
    "MoE-CAP, FLOP": lambda model: token_flops(model, 10),
    "MoE-Lightning": lambda model: Job(model, wb.machines["a40"], prompt_len=10, output_len=5),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("kind", UNLIKE)
def test_formulas_for_one_kind_of_cache_refuse_several(name, kind):
    with pytest.raises(ScenarioError, match="counts the same KV cache in every layer, and tiny has"):
        FORMULAS[name](tiny_model_of(kind))
    FORMULAS[name](tiny_model(4))
