"""Kinds of layers: their order as patterns, in a ModelConfig, from a config.json, and in a layer's graph."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import PIPELINES, tiny_model, tiny_model_of
from workbench.core.errors import PipelineError, ScenarioError
from workbench.core.records import from_plain, to_plain
from workbench.models import LayerKind, ModelConfig, model, models
from workbench.models.layers import fold, spelled, unfold
from workbench.pipeline import cpu, gpu, load, offload
from workbench.pipeline.stack_graph import stack_graph
from workbench.stages import attention, combine, experts, out_proj, qkv, route, shared_experts
from workbench.stages.ops import BUILT_IN

FULL, WINDOWED, DENSE = LayerKind.FULL, LayerKind.WINDOWED, LayerKind.DENSE
UNALIKE = [name for name in sorted(models) if models[name].dense_layers or models[name].windowed_layers]


@given(st.lists(st.sampled_from((FULL, WINDOWED, DENSE, LayerKind.DENSE_WINDOWED)), max_size=40))
def test_folded_layers_unfold_to_the_same_order(kinds):
    assert list(unfold(fold(kinds))) == kinds
    assert len(fold(kinds)) <= len(kinds)


@pytest.mark.parametrize(
    ("kinds", "layers", "words"),
    [
        ([DENSE] * 3 + [FULL] * 5, (((DENSE,), 3), ((FULL,), 5)), "3 x dense, 5 x full"),
        ([WINDOWED, FULL] * 18, (((WINDOWED, FULL), 18),), "18 x (windowed, full)"),
        (
            ([WINDOWED] * 3 + [FULL]) * 2 + [WINDOWED],
            (((WINDOWED, WINDOWED, WINDOWED, FULL), 2), ((WINDOWED,), 1)),
            "2 x (windowed, windowed, windowed, full), 1 x windowed",
        ),
    ],
)
def test_layers_fold_to_the_pattern_that_covers_most(kinds, layers, words):
    assert fold(kinds) == layers
    assert spelled(layers) == words


def test_the_catalogue_tells_the_kind_of_every_layer():
    assert fold(models["deepseek-v3"].layer_kinds) == (((DENSE,), 3), ((FULL,), 58))
    assert fold(models["mixtral-8x7b"].layer_kinds) == (((FULL,), 32),)
    assert models["gpt-oss-120b"].layers == (((WINDOWED, FULL), 18),)
    assert "18 x (windowed, full)" in models["gpt-oss-120b"]._repr_html_()


def test_a_config_json_tells_windows_and_dense_layers_together():
    raw = {
        "num_hidden_layers": 5,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "sliding_window": 8,
        "first_k_dense_replace": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    }
    kinds = model(raw, name="m").layer_kinds
    assert kinds == (LayerKind.DENSE_WINDOWED, FULL, WINDOWED, FULL, WINDOWED)


@pytest.mark.parametrize("name", UNALIKE)
def test_kinds_agree_with_the_counts_and_survive_a_file(name):
    config = models[name]
    assert len(config.layer_kinds) == config.num_hidden_layers
    assert sum(kind.dense for kind in config.layer_kinds) == config.dense_layers
    assert sum(kind.windowed for kind in config.layer_kinds) == config.windowed_layers
    assert from_plain(ModelConfig, to_plain(config)) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (((FULL,), 3),)}, "num_hidden_layers=4 and 3 of them in layers=3 x full"),
        ({"layers": (((DENSE,), 1), ((FULL,), 3))}, "first_k_dense_replace=0 and 1 of them"),
        ({"layers": (((FULL, WINDOWED), 2),), "sliding_window": 8}, "windowed_layers=0 and 2 of them"),
        ({"layers": ((("full",), 4),)}, "give patterns of LayerKind, and how often"),
        ({"layers": 4}, "give patterns of LayerKind"),
        ({"layers": (FULL,) * 4}, "give patterns of LayerKind"),
    ],
)
def test_an_order_that_contradicts_the_counts_is_refused(change, words):
    with pytest.raises(ScenarioError, match=words):
        replace(tiny_model(4), **change)


@pytest.mark.parametrize("name", sorted(models))
def test_mean_weights_of_an_operation_are_those_of_the_layers_that_have_it(name):
    config = models[name]
    each = {"experts": config.num_local_experts * config.expert_params}
    for op in BUILT_IN.values():
        having = [kind for kind in config.layer_kinds if op.is_in(config, kind)]
        total = config.num_hidden_layers * op.elements(config)
        if op.name in each:
            assert total == pytest.approx(len(having) * each[op.name])
        if op is shared_experts:
            dense = sum(kind.dense for kind in having)
            assert total == pytest.approx(dense * config.dense_params + (len(having) - dense) * config.shared_params)
        assert bool(having) or not total


def _codes(nodes):
    return [None if node is None else node.code for node in nodes]


def _operations(nodes):
    return [None if node is None else [stage.op.name for stage in node.stages] for node in nodes]


def test_a_layer_without_experts_keeps_the_node_and_empties_it():
    pipeline = gpu(qkv, *attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(shared_experts, combine)
    stack = stack_graph(pipeline, tiny_model_of("dense"))
    dense, sparse = _operations(stack.at(0)), _operations(stack.at(1))
    assert dense == [["qkv", "prefill_attention", "decode_attention", "out_proj", "route"], [], [], [], dense[4]]
    assert dense[4] == ["shared_experts", "combine"]
    assert (sparse[2], sparse[4]) == (["experts"], ["combine"])
    assert _codes(stack.at(0)) == _codes(stack.at(1)) == _codes(stack.graph(0).nodes)
    assert [node.carries for node in stack.at(0)] == [()] * 5, "nothing is moved for experts that are not there"
    assert [bool(node.carries) for node in stack.at(1)] == [False, True, False, True, False]


def test_a_model_of_equal_layers_has_the_nodes_of_the_plan_in_each():
    for pipeline in PIPELINES.values():
        stack = stack_graph(pipeline, 3)
        graph = stack.graph(0)
        assert [stack.at(layer) for layer in range(3)] == [graph.nodes, graph.nodes, graph.last]


def test_the_last_layer_defers_nothing():
    pipeline = PIPELINES["ktransformers"]
    stack = stack_graph(pipeline[:2] + pipeline[2:], 4)
    graph = stack.graph(0)
    assert [stack.at(layer) for layer in range(4)] == [graph.nodes, graph.last, graph.nodes, graph.last]


def test_layers_that_are_not_known_are_refused():
    pipeline = PIPELINES["all_gpu"]
    for layer in (-1, 3):
        with pytest.raises(PipelineError, match=f"there is no layer {layer}; give one from 0 to 2"):
            stack_graph(pipeline, tiny_model(3)).at(layer)
