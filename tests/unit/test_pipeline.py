"""The algebra: what `>>`, `|`, `gpu`, `cpu`, `fetch`, `offload` and `load` accept, mean and print."""

import pytest

from tests.systems import PIPELINES, VSL
from workbench.core.errors import PipelineError
from workbench.pipeline import Fork, Pipeline, cpu, fetch, gpu, load, offload, resolve
from workbench.stages import (
    Op,
    Place,
    RowClass,
    Stage,
    attention,
    combine,
    decode_attention,
    embed,
    experts,
    head,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
    weights,
)

WHOLE = gpu(qkv, attention, out_proj, moe)


def carried(pipeline: Pipeline) -> list[str]:
    """What each move of a closed layer carries, as ``buffer@rows`` words."""
    return [" ".join(f"{buffer}@{rows.value}" for buffer, rows in carried) for _, carried in resolve(pipeline).carries]


def test_gpu_of_two_operations_is_the_one_then_the_other():
    assert gpu(qkv, attention) == gpu(qkv) >> gpu(attention) == gpu(qkv, prefill_attention, decode_attention)


def test_a_pipeline_prints_as_its_user_would_write_it():
    assert str(VSL) == (
        "fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> "
        "gpu(out_proj, route, experts, combine)"
    )
    assert "(gpu(shared_experts) | offload >> cpu(experts, defer=3) >> load)" in str(PIPELINES["ktransformers"])
    assert str(gpu(route, experts, combine, skip=1)) == "gpu(route) >> gpu(experts, skip=1) >> gpu(combine)"
    assert str(cpu(experts, defer=2, skip=1)) == "cpu(experts, defer=2, skip=1)"


def test_its_html_escapes_what_users_wrote():
    layer = WHOLE >> gpu(Op("<b>", ("x",), ("x",)))
    assert "&lt;b&gt;" in layer._repr_html_()
    assert "<b>" not in layer._repr_html_()


def test_fetches_add_up_and_keep_one_spelling():
    assert fetch(kv) | fetch(weights) == fetch(weights, kv) == fetch(weights) | fetch(weights, kv)
    assert (fetch(weights) | WHOLE).fetches == (weights,)


def test_arms_of_nested_forks_lie_side_by_side():
    forked = gpu(shared_experts) | (gpu(route) | gpu(qkv))
    assert isinstance(forked.chain[0], Fork)
    assert len(forked.chain[0].arms) == 3


def test_moves_carry_what_is_read_there_before_the_next_move_back():
    to_cpu, to_gpu = carried(VSL)
    assert sorted(to_cpu.split()) == ["k@decode", "k@prefill", "q@decode", "v@decode", "v@prefill"]
    assert to_gpu == "attn@decode"


def test_a_move_looks_past_the_first_stage_on_its_side():
    layer = (
        gpu(qkv, prefill_attention, Op("early", ("x",), ("z",)))
        >> offload
        >> cpu(decode_attention)
        >> cpu(Op("late", ("z",), ("w",)))
        >> load
        >> gpu(Op("use", ("w",), ("u",)), out_proj, moe)
    )
    to_cpu, to_gpu = carried(layer)
    assert "z@prefill z@decode" in to_cpu
    assert "w@prefill" in to_gpu


def test_a_move_at_the_end_of_the_layer_serves_the_next_layer():
    layer = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, combine) >> load
    assert carried(layer)[1] == "x@prefill x@decode"


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        pytest.param(
            lambda: gpu(qkv) >> cpu(attention),
            ["cpu(", "reads", "gpu(qkv) leaves it on the gpu", "offload"],
            id="forgotten offload",
        ),
        pytest.param(
            lambda: gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> gpu(out_proj),
            ["gpu(out_proj) reads attn on the gpu", "Put load between them"],
            id="forgotten load",
        ),
        pytest.param(lambda: gpu("qkv"), ["gpu(...) takes operations", "'qkv'"], id="no operation"),
        pytest.param(lambda: gpu(qkv) >> qkv, [">> needs a pipeline", "gpu(...) or cpu(...)"], id="unplaced operation"),
        pytest.param(lambda: gpu(qkv) | qkv, ["| needs a pipeline"], id="unplaced arm"),
        pytest.param(lambda: fetch(qkv), ["fetch takes weights, kv"], id="fetch of an operation"),
        pytest.param(lambda: cpu(qkv, defer=2), ["defer=2", "routed experts"], id="deferral without experts"),
        pytest.param(lambda: cpu(experts, defer=-1), ["defer=-1", "at least 0"], id="negative deferral"),
        pytest.param(lambda: gpu(qkv, skip=2), ["skip=2", "routed experts", "same gpu(...)"], id="skipping no experts"),
        *(
            pytest.param(lambda op=op: gpu(qkv, op), [f"gpu({op.name}) cannot be placed: embedding"], id=op.name)
            for op in (embed, head)
        ),
    ],
)
def test_wiring_that_cannot_work_fails_in_the_cell_that_wires_it(wire, words):
    with pytest.raises(PipelineError) as error:
        wire()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        pytest.param(
            gpu(qkv, attention) >> offload >> gpu(out_proj, moe),
            ["offload", "moves nothing", "Remove it"],
            id="useless offload",
        ),
        pytest.param(WHOLE >> load, ["load at place 8", "moves nothing"], id="useless load"),
        pytest.param(
            gpu(attention, out_proj, moe), ["reads q of prefill rows", "no earlier stage"], id="buffer never written"
        ),
        pytest.param(gpu(qkv, out_proj, moe), ["no stage", "keeps the KV cache", "place it once"], id="no attention"),
        pytest.param(WHOLE >> gpu(decode_attention), ["exactly one", "has 2"], id="attention twice"),
        pytest.param(
            fetch(kv) | cpu(qkv, attention, out_proj, moe),
            ["fetch(kv)", "on the cpu", "Remove kv"],
            id="kv fetched for nobody",
        ),
        pytest.param(
            fetch(weights) | cpu(qkv, attention, out_proj, moe),
            ["fetch(weights) streams nothing", "Remove it"],
            id="weights fetched for nobody",
        ),
        pytest.param(
            fetch(combine.weights) | WHOLE, ["fetch(combine.weights) streams nothing"], id="operation without weights"
        ),
        pytest.param(
            gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, combine),
            ["gpu(qkv) reads x on the gpu", "cpu(combine) leaves it on the cpu", "Put load"],
            id="residual stream left on the cpu",
        ),
    ],
)
def test_a_layer_that_cannot_be_stacked_is_refused_with_its_mend(layer, words):
    with pytest.raises(PipelineError) as error:
        resolve(layer)
    for word in words:
        assert word in str(error.value)


def test_two_arms_that_write_one_buffer_are_refused():
    with pytest.raises(PipelineError, match="two arms of a fork write"):
        WHOLE >> (gpu(Op("f", ("h",), ("y",))) | gpu(Op("g", ("h",), ("y",))))


def test_two_arms_that_write_one_buffer_are_refused_also_if_the_stage_before_was_an_equal_one():
    again = Op("again", ("h",), ("y",))
    with pytest.raises(PipelineError, match="two arms of a fork write"):
        resolve(WHOLE >> gpu(again) >> (gpu(again) | gpu(again)))


def test_a_copy_that_an_arm_made_stale_is_not_read_even_if_an_equal_stage_wrote_it_before():
    again, look, use = Op("again", ("h",), ("y",)), Op("look", ("x",), ("z",)), Op("use", ("y",), ("w",))
    for before in (Op("other", ("h",), ("y",)), again):
        with pytest.raises(PipelineError, match=r"reads y on the cpu, but gpu\(again\) leaves it on the gpu"):
            resolve(WHOLE >> gpu(before) >> offload >> (gpu(again) | cpu(look)) >> cpu(use))


def test_an_arm_may_not_write_what_another_arm_reads():
    f, g = Op("f", ("x",), ("x",)), Op("g", ("x",), ("y",))
    with pytest.raises(PipelineError, match="arm"):
        resolve(WHOLE >> (gpu(f) | gpu(g)) >> gpu(Op("h", ("x", "y"), ("x",))))


def test_prefill_and_decode_rows_of_a_buffer_live_apart():
    layer = gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
    assert carried(layer)[1] == "attn@decode"
    both = gpu(qkv) >> offload >> cpu(attention) >> load >> gpu(out_proj, moe)
    assert carried(both)[1] == "attn@prefill attn@decode"


def test_kv_lives_with_decode_attention_unless_it_is_fetched():
    assert VSL.kv_device is Place.CPU
    assert PIPELINES["all_gpu"].kv_device is Place.GPU
    assert PIPELINES["flexgen_s4"].kv_device is Place.CPU


def test_fetch_streams_only_gpu_stages_with_weights():
    layer = fetch(experts.weights) | WHOLE
    assert [stage.op.name for stage in layer.stages if layer.streams(stage)] == ["experts"]
    layer = fetch(weights) | gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    assert [stage.op.name for stage in layer.stages if layer.streams(stage)] == ["qkv", "out_proj", "route"]


def test_a_users_operation_needs_only_its_rows():
    op = Op("mine", ("x",), ("y",), rows=RowClass.PREFILL)
    assert op.needs == (("x", RowClass.PREFILL),)
    assert set(decode_attention.needs) >= {("k", RowClass.PREFILL), ("v", RowClass.DECODE), ("q", RowClass.DECODE)}


@pytest.mark.parametrize(
    ("reads", "rows"), [(("x",), RowClass.PREFILL), (("k",), RowClass.ALL), (("k",), RowClass.DECODE)]
)
def test_only_attention_among_tokens_of_prompts_reads_the_past(reads, rows):
    with pytest.raises(PipelineError, match=r"Op\('mine'\) has reads_past and takes no keys of prompts; give rows="):
        Op("mine", reads, ("y",), rows=rows, reads_past=True)
    assert Op("mine", ("k",), ("y",), rows=RowClass.PREFILL, reads_past=True).reads_past


@pytest.mark.parametrize("left_out", [{"defer": 3}, {"skip": 1}], ids=["defer", "skip"])
def test_a_users_routed_operation_is_never_left_out(left_out):
    """The engine leaves out built-in experts alone, whatever the others are called."""
    for name in ("mine", "experts"):
        mine = Op(name, ("h", "gates"), ("routed",), routed=True, run=lambda h, gates: h)
        with pytest.raises(PipelineError, match=rf"cpu\({name}\) must be a whole number from 0 on, and 0 for all but"):
            Stage(mine, Place.CPU, **left_out)
        with pytest.raises(PipelineError, match="needs the routed experts, whole and for all rows, in the same"):
            cpu(mine, **left_out)


def test_resolving_tells_where_the_residual_stream_enters_and_leaves():
    inside = resolve(PIPELINES["all_cpu"])
    assert (inside.enters, inside.leaves) == (frozenset({Place.CPU}), frozenset({Place.CPU}))
    assert resolve(VSL).enters == frozenset({Place.GPU})


def test_a_layer_that_finds_the_stream_where_the_last_one_wrote_it_needs_it_there_from_the_start():
    """combine leaves x on the CPU, load copies it: out_proj reads the first of them, which layer 0 needs too."""
    layer = gpu(qkv, attention) >> offload >> cpu(out_proj) >> load >> gpu(route) >> offload >> cpu(experts, combine)
    resolved = resolve(layer >> load)
    assert resolved.enters == resolved.leaves == frozenset(Place)
    assert all(("x", rows) not in resolved.carries[0][1] for rows in RowClass)


def test_an_arm_that_writes_the_residual_stream_again_leaves_it_where_it_wrote_it():
    """Also where the same arm of the layer before wrote it last: the transfer behind the fork is needed in each."""
    beside = Op("beside", ("h",), ("aside",))
    out = Op("out", ("attn",), ("aside_too",))
    arms = gpu(experts, combine) | cpu(beside)
    layer = cpu(qkv, attention, out, route) >> load >> arms >> offload
    assert carried(layer)[1] == "x@prefill x@decode"


@pytest.mark.parametrize(
    "layer, path",
    [
        (lambda: gpu(qkv) >> offload >> cpu(decode_attention) >> gpu(out_proj), (3,)),
        (lambda: gpu(qkv) >> (gpu(decode_attention) | cpu(prefill_attention)), (1, 1, 0)),
        (lambda: resolve(gpu(qkv, attention, out_proj) >> offload >> load >> gpu(moe)), (4,)),
        (lambda: resolve(gpu(qkv, attention, attention)), (4,)),
        (lambda: resolve(fetch(kv) | cpu(qkv, attention)), (2,)),
        (lambda: resolve(gpu(qkv, prefill_attention, out_proj)), None),
        (lambda: gpu(qkv) >> gpu(route) >> (gpu(experts) | gpu(route)) >> gpu(combine), (2,)),
    ],
)
def test_an_error_tells_the_place_of_the_element_that_causes_it(layer, path):
    with pytest.raises(PipelineError) as refused:
        layer()
    assert refused.value.path == path
