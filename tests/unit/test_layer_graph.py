"""One layer as a graph: maximal runs on one device, resolved transfers, KV transfers, and what waits for what."""

import pytest

from tests.systems import PIPELINES, VSL
from workbench.core.errors import PipelineError
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.pipeline.layer_graph import TO_CPU, TO_GPU, NodeKind, layer_graph
from workbench.pipeline.stack_graph import stack_graph
from workbench.stages import Op, RowClass, attention, experts, kv, moe, out_proj, prefill_attention, qkv, weights


def described(pipeline):
    return [(node.code, node.lane, node.describe(), node.after) for node in layer_graph(pipeline).nodes]


def test_neighbours_on_one_device_become_one_segment():
    assert described(VSL) == [
        ("A", "gpu", "qkv prefill_attention", ()),
        ("Q", "d2h", "q@decode k v", (0,)),
        ("C", "cpu", "decode_attention", (1,)),
        ("H", "h2d", "attn@decode", (2,)),
        ("B", "gpu", "out_proj route experts combine", (3,)),
    ]


def test_arms_of_a_fork_wait_for_the_same_node_and_join():
    nodes = described(PIPELINES["ktransformers"])
    by_code = {code: index for index, (code, *_) in enumerate(nodes)}
    shared, join = nodes[by_code["B"]], nodes[-1]
    assert shared[2] == "shared_experts"
    assert shared[3] == nodes[by_code["Q"]][3] == (by_code["A"],)
    assert set(join[3]) == {by_code["B"], by_code["H"]}


def test_fetched_kv_travels_there_before_the_attention_and_new_kv_back_after_it():
    graph = layer_graph(PIPELINES["flexgen_s4"])
    kinds = [node.kind for node in graph.nodes]
    assert kinds == [NodeKind.SEGMENT, NodeKind.KV_IN, NodeKind.SEGMENT, NodeKind.KV_OUT, NodeKind.SEGMENT]
    before, fetched, reader, new, behind = graph.nodes
    assert (before.after, fetched.after, reader.after, new.after, behind.after) == ((), (), (0, 1), (2,), (2,))
    assert [node.describe() for node in (reader, new)] == ["prefill_attention decode_attention", "k v"]
    assert graph.sinks == (4, 3)


def test_an_own_operation_on_prompts_that_reads_no_past_does_not_wait_for_fetched_kv():
    mine = Op("mine", ("q",), ("q",), rows=RowClass.PREFILL)
    nodes = layer_graph(fetch(kv) | gpu(qkv, mine, attention, out_proj, moe)).nodes
    runs = [node.describe() for node in nodes if node.kind is NodeKind.SEGMENT]
    assert runs == ["qkv mine", "prefill_attention decode_attention", "out_proj route experts combine"]


@pytest.mark.parametrize(
    ("pipeline", "gpu_runs"),
    [
        (
            fetch(kv) | cpu(qkv, attention[0]) >> load >> gpu(attention[1], out_proj, moe) >> offload,
            ["decode_attention", "out_proj route experts combine"],
        ),
        (
            fetch(kv) | gpu(qkv, attention) >> offload >> cpu(out_proj, moe) >> load,
            ["qkv", "prefill_attention decode_attention"],
        ),
    ],
    ids=["first", "last"],
)
def test_a_reader_of_fetched_kv_at_the_edge_of_a_run_has_no_empty_segment_beside_it(pipeline, gpu_runs):
    nodes = layer_graph(pipeline).nodes
    assert [node.describe() for node in nodes if node.kind is NodeKind.SEGMENT and node.lane == "gpu"] == gpu_runs


def test_only_segments_with_fetched_weights_are_streamed():
    assert layer_graph(VSL).streamed == (0, 4)
    assert layer_graph(PIPELINES["all_gpu"]).streamed == ()
    only_experts = fetch(experts.weights) | gpu(qkv, prefill_attention) >> offload >> cpu(attention[1]) >> load >> gpu(
        out_proj, moe
    )
    assert layer_graph(only_experts).streamed == (4,)


def test_layers_on_the_cpu_are_entered_and_left_over_the_link():
    stack = stack_graph(PIPELINES["all_cpu"], 3)
    moves = [stack.before(place) for place in range(4)]
    assert moves == [TO_CPU, None, None, TO_GPU]
    assert [(move.lane, move.describe()) for move in (TO_CPU, TO_GPU)] == [("d2h", "x"), ("h2d", "x")]
    assert [stack_graph(VSL, 1).before(place) for place in range(2)] == [None, None]


def test_the_last_nodes_of_a_layer_are_what_the_next_one_waits_for():
    assert layer_graph(VSL).sinks == (4,)
    join = gpu(qkv, attention, out_proj, moe) >> (
        gpu(Op("f", ("x",), ("y",))) | offload >> cpu(Op("g", ("x",), ("z",)))
    )
    graph = layer_graph(join)
    assert [graph.nodes[index].describe() for index in graph.sinks] == ["f", "g"]


def test_equal_stages_at_two_positions_are_two_segments():
    f = Op("f", ("x",), ("y",))
    there_and_back = (
        gpu(qkv, attention, out_proj, moe, f)
        >> offload
        >> cpu(Op("g", ("y",), ("z",)))
        >> load
        >> gpu(Op("h", ("z",), ("y",)))
    )
    graph = layer_graph(there_and_back >> gpu(f))
    computing = [node for node in graph.nodes if node.kind is NodeKind.SEGMENT]
    assert computing[0].describe().endswith("f")
    assert computing[-1].describe() == "h f"


def test_a_layer_with_too_many_separate_tasks_is_refused():
    layer = gpu(qkv, attention, out_proj, moe)
    for number in range(7):
        layer = layer >> (
            gpu(Op(f"f{number}", ("x",), (f"y{number}",))) | gpu(Op(f"g{number}", ("x",), (f"z{number}",)))
        )
    with pytest.raises(PipelineError, match="at most 6 separate gpu tasks"):
        layer_graph(layer)


def test_a_stack_lists_the_implicit_nodes_too():
    assert [node.code for node in stack_graph(VSL, 2).all_nodes] == ["E", "A", "Q", "C", "H", "B", "W", "Z"]
    assert [node.code for node in stack_graph(PIPELINES["all_cpu"], 2).all_nodes] == ["E", "R", "C", "L", "Z"]


def test_weights_and_kv_fetched_together_both_appear():
    graph = layer_graph(fetch(weights, kv) | gpu(qkv, attention, out_proj, moe))
    assert graph.streamed == (0, 4)
    assert graph.nodes[1].kind is NodeKind.KV_IN
