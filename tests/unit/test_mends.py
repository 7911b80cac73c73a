"""What is wrong with a wiring, where, and what mends it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import tiny_model
from tests.systems import APART, PIPELINES, VSL
from workbench.core.errors import PipelineError
from workbench.pipeline import (
    Fork,
    Pipeline,
    added,
    cpu,
    divided,
    fault_of,
    fetch,
    gpu,
    lacking,
    load,
    offload,
    placed,
    removed,
    resolve,
    with_set,
)
from workbench.pipeline.elements import located_stages
from workbench.stages import (
    BUILT_IN,
    ExpertSet,
    Op,
    Place,
    Stage,
    attention,
    combine,
    decode_attention,
    embed,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
)

GPU, CPU = Place.GPU, Place.CPU
WHOLE = gpu(qkv, attention, out_proj, moe)
BEFORE = gpu(qkv, attention, out_proj)


def labels(pipeline: Pipeline, *ops: Op) -> list[str]:
    return [mend.label for mend in fault_of(pipeline, ops).mends]


@pytest.mark.parametrize("pipeline", [*PIPELINES.values(), VSL, APART])
def test_a_layer_has_no_fault(pipeline):
    assert fault_of(pipeline) is None


@pytest.mark.parametrize(
    "pipeline, path, first",
    [
        (Pipeline(), None, "Place a whole layer on the GPU"),
        (gpu(qkv, prefill_attention, out_proj, moe), None, "Add decode_attention on the GPU"),
        (gpu(qkv, attention, decode_attention, out_proj, moe), (3,), "Remove the second decode_attention"),
        (fetch(kv) | cpu(qkv, attention, out_proj, moe), (2,), "Remove fetch(kv)"),
        (fetch(experts.weights) | cpu(qkv, attention, out_proj, moe), None, "Remove fetch(experts.weights)"),
        (gpu(prefill_attention, qkv, decode_attention, out_proj, moe), (0,), "Move prefill_attention behind qkv"),
        (gpu(route, qkv, attention, out_proj, experts, combine), (0,), "Move route behind out_proj"),
        (gpu(qkv, attention, out_proj, route, moe), (5,), "Remove the second route"),
        (gpu(qkv, qkv, attention, out_proj, moe), (1,), "Remove the second qkv"),
        (gpu(qkv, attention, qkv, out_proj, moe), (3,), "Remove the second qkv"),
        (gpu(qkv, attention, out_proj, route, experts, combine, route), (7,), "Remove the second route"),
        (gpu(qkv, attention, out_proj, route, experts.prefill, experts, combine), (5,), "Remove experts.prefill"),
        (gpu(qkv, attention, out_proj, route, experts, experts.prefill, combine), (6,), "Remove experts.prefill"),
        (gpu(qkv, attention, out_proj, experts, combine), (4,), "Add route on the GPU"),
        (gpu(qkv, attention, out_proj, route, experts.prefill, combine), (6,), "Add experts.decode on the GPU"),
        (BEFORE >> offload >> load >> gpu(moe), (4,), "Remove offload"),
        (Pipeline((*BEFORE.chain, *(Stage(op, CPU) for op in moe))), (4,), "Put offload before route"),
        (Pipeline((*WHOLE.chain, Stage(embed, GPU))), (7,), "Remove embed"),
        (
            Pipeline((*BEFORE.chain, Fork((gpu(route).chain, cpu(experts).chain)), Stage(combine, GPU))),
            (4,),
            "Put them one after the other",
        ),
    ],
)
def test_a_fault_has_its_place_and_its_first_mend(pipeline, path, first):
    fault = fault_of(pipeline)
    assert fault.path == path
    assert fault.mends[0].label == first
    assert 1 <= len(fault.mends) <= 3
    assert len({mend.pipeline for mend in fault.mends}) == len(fault.mends)
    assert fault_of(fault.mends[0].pipeline) is None


def added_by(pipeline: Pipeline) -> dict[str, list[str]]:
    """The operations that a wiring lacks, with the labels of the edits that add them."""
    return {op.name: [mend.label.removeprefix("Add ") for mend in mends] for op, mends in lacking(pipeline)}


@pytest.mark.parametrize(
    "pipeline, labels",
    [
        (WHOLE, {}),
        (VSL, {}),
        (gpu(qkv, attention, moe), {"out_proj": ["out_proj on the GPU", "out_proj on the CPU"]}),
        (
            gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(moe),
            {"out_proj": ["out_proj on the GPU", "out_proj on the CPU"]},
        ),
        (cpu(qkv, attention, moe), {"out_proj": ["out_proj on the CPU", "out_proj on the GPU"]}),
        (
            gpu(qkv, decode_attention, out_proj, moe),
            {"prefill_attention": ["prefill_attention on the GPU", "prefill_attention on the CPU"]},
        ),
        (
            gpu(qkv, attention),
            {
                "out_proj": ["out_proj on the GPU", "out_proj on the CPU"],
                "route": ["route on the GPU", "out_proj and route on the CPU"],
                "experts": ["route and experts on the GPU", "out_proj, route and experts on the CPU"],
                "combine": ["route, experts and combine on the GPU", "out_proj, route, experts and combine on the CPU"],
            },
        ),
    ],
)
def test_what_a_layer_lacks_is_added_on_either_device_that_of_the_one_that_follows_first(pipeline, labels):
    assert added_by(pipeline) == labels


@pytest.mark.parametrize("pipeline", [WHOLE, VSL, gpu(qkv, attention), gpu(qkv, attention, moe)])
def test_an_edit_that_adds_what_a_layer_lacks_gives_no_fault(pipeline):
    for _, mends in lacking(pipeline):
        assert all(fault_of(mend.pipeline) is None for mend in mends)
    assert fault_of(pipeline) is None


def test_what_is_taken_out_of_a_layer_is_put_back_where_it_was():
    without = {stage.op: removed(VSL, path) for path, stage in located_stages(VSL.chain)}
    sound = {op: each for op, each in without.items() if fault_of(each) is None}
    assert sound.keys() == {out_proj, combine}
    for op, each in sound.items():
        ((found, mends),) = lacking(each)
        assert found == op
        assert mends[0].pipeline == VSL


@given(st.permutations([qkv, *attention, out_proj, *moe]), st.lists(st.sampled_from(Place), min_size=7, max_size=7))
def test_in_any_order_the_first_mends_lead_to_the_layer(ops, devices):
    """Where all operations are there, none is added, removed or placed on another device on the way."""
    pipeline = Pipeline(tuple(Stage(op, device) for op, device in zip(ops, devices, strict=True)))
    for _ in range(3 * len(ops)):
        fault = fault_of(pipeline)
        if fault is None:
            break
        assert not fault.mends[0].label.startswith(("Add", "Remove", "Start", "Place"))
        pipeline = fault.mends[0].pipeline
    after = [stage.op for stage in pipeline.stages]
    assert [op for op in after if op not in attention] == [qkv, out_proj, *moe]
    assert set(after[1:3]) == set(attention)
    assert {stage.op: stage.device for stage in pipeline.stages} == dict(zip(ops, devices, strict=True))


@pytest.mark.parametrize("at", range(4))
def test_route_before_out_proj_is_refused(at):
    """All buffers are written, but the residual stream would be read before `out_proj` has added to it."""
    ops = [qkv, *attention, out_proj, experts, combine]
    early = gpu(*ops[:at], route, *ops[at:])
    with pytest.raises(PipelineError, match=r"gpu\(route\) stands before gpu\(out_proj\)"):
        resolve(early)


def test_a_whole_mixture_before_attention_is_refused():
    with pytest.raises(PipelineError, match=r"gpu\(route\) stands before gpu\(out_proj\)"):
        resolve(gpu(moe, qkv, attention, out_proj))


def test_an_operation_that_is_there_twice_is_refused():
    with pytest.raises(PipelineError, match=r"gpu\(out_proj\) computes again what gpu\(out_proj\) computes"):
        resolve(gpu(qkv, attention, out_proj, out_proj, moe))


def test_a_fault_speaks_as_the_code_does():
    with pytest.raises(PipelineError) as of_code:
        gpu(qkv) >> cpu(attention)
    assert fault_of(Pipeline((*gpu(qkv).chain, *cpu(attention).chain))).text == str(of_code.value)
    with pytest.raises(PipelineError) as of_layer:
        resolve(gpu(qkv))
    assert fault_of(gpu(qkv)).text == str(of_layer.value)


def test_a_missing_stage_can_be_added_on_both_devices():
    assert labels(gpu(qkv, prefill_attention, out_proj, moe)) == [
        "Add decode_attention on the GPU",
        "Add decode_attention on the CPU",
    ]
    assert labels(gpu(qkv, attention, out_proj, experts, combine)) == [
        "Add route on the GPU",
        "Add route on the CPU",
        "Remove experts",
    ]


def test_what_is_fetched_in_vain_can_be_placed_where_it_is_read():
    assert labels(fetch(experts.weights) | cpu(qkv, attention, out_proj, moe))[1] == "Place experts on the GPU"
    assert labels(fetch(kv) | cpu(qkv, attention, out_proj, moe))[1] == "Place decode_attention on the GPU"


def test_too_many_transfers_are_mended_by_places():
    chain = []
    for number in range(8):
        there = Op(f"own{number}", ("x",), ("x",))
        chain += [Stage(there, CPU), Stage(Op(f"back{number}", ("x",), ("x",)), GPU)]
    pipeline = gpu(qkv, attention, out_proj, moe)
    for stage in chain:
        pipeline = pipeline >> (offload if stage.device is CPU else load) >> Pipeline((stage,))
    fault = fault_of(pipeline)
    assert "separate" in fault.text
    assert fault.path is None
    assert fault.mends[0].label == "Place own0 on the GPU"


def test_an_own_operation_is_added_only_if_it_is_known():
    reader = Op("reader", ("notes",), ("x",))
    writer = Op("writer", ("x",), ("notes",))
    layer = WHOLE >> gpu(reader)
    assert labels(layer) == ["Remove reader"]
    assert labels(layer, writer)[0] == "Add writer on the GPU"
    assert fault_of(layer, [writer]).mends[0].pipeline == WHOLE >> gpu(writer, reader)


def test_a_mend_adds_no_shared_experts_that_the_model_does_not_have():
    """Else removing and adding them would follow one another for ever."""
    own = Op("own", ("x", "routed", "shared"), ("x",))
    model = tiny_model()
    pipeline = gpu(qkv, attention, out_proj, route, experts, shared_experts, own)
    seen = []
    while (fault := fault_of(pipeline, [own], model)) is not None:
        assert pipeline not in seen
        seen.append(pipeline)
        pipeline = fault.mends[0].pipeline
    assert seen
    assert shared_experts not in [stage.op for stage in pipeline.stages]


def test_operations_that_wait_for_one_another_are_removed():
    one, other = Op("one", ("b",), ("a",)), Op("other", ("a",), ("b",))
    fault = fault_of(WHOLE >> gpu(one, other))
    assert [mend.label for mend in fault.mends] == ["Remove one"]
    assert fault_of(fault.mends[0].pipeline).mends[0].pipeline == WHOLE


def test_experts_on_each_device_are_offered_split_over_both():
    twice = added(WHOLE, experts, CPU, (6,))
    fault = fault_of(twice, model=tiny_model())
    labels = ["Split experts over both devices", "Remove the second experts", "Remove the first experts"]
    assert [mend.label for mend in fault.mends] == labels
    assert fault.mends[0].pipeline == divided(WHOLE, (5,), slice(2))
    alike = fault_of(added(WHOLE, experts, GPU, (6,)), model=tiny_model())
    assert [mend.label for mend in alike.mends] == labels[1:2]


@pytest.mark.parametrize("device", [GPU, CPU])
def test_a_set_of_experts_alone_is_mended_by_its_rest_on_the_other_device_or_by_all_experts(device):
    whole = placed(WHOLE, (5,), device)
    ((path, _),) = ((path, stage) for path, stage in located_stages(whole.chain) if stage.op is experts)
    fault = fault_of(with_set(whole, path, slice(1)), model=tiny_model())
    assert fault.path == path
    assert "experts[:1] is a part of the experts" in fault.text
    others, every = fault.mends
    assert others.label == f"Compute all others on the {device.other.value.upper()}"
    sets = {stage.op.name: stage.device for _, stage in located_stages(others.pipeline.chain) if stage.op.subset}
    assert sets == {"experts[:1]": device, "experts[~:1]": device.other}
    assert fault_of(others.pipeline, model=tiny_model()) is None
    assert every.pipeline == whole


def test_a_set_that_has_all_experts_of_the_model_is_no_part_of_them():
    model = tiny_model()
    assert fault_of(with_set(WHOLE, (5,), slice(model.num_local_experts)), model=model) is None


def test_a_second_set_of_one_name_is_named_as_the_cause():
    chain = (*BEFORE.chain, *gpu(route).chain, *(Stage(experts[ExpertSet("hot", ((n,),))], GPU) for n in (0, 1)))
    fault = fault_of(Pipeline(chain))
    assert "two sets of experts in one pipeline are called 'hot'" in fault.text
    assert fault.path == (6,)
    assert [mend.label for mend in fault.mends] == ["Remove the second experts[hot]"]


def test_an_element_of_an_arm_is_found_there():
    arms = Fork((gpu(decode_attention).chain, cpu(prefill_attention).chain))
    fault = fault_of(Pipeline((*gpu(qkv).chain, arms, *gpu(out_proj, moe).chain)))
    assert fault.path == (1, 1, 0)
    assert fault.mends[0].label == "Put offload before prefill_attention"


def test_every_built_in_operation_alone_leads_to_a_layer():
    for op in BUILT_IN.values():
        pipeline, steps = cpu(op), 0
        while (fault := fault_of(pipeline)) is not None:
            pipeline, steps = fault.mends[0].pipeline, steps + 1
            assert steps < 10
        assert op in [stage.op for stage in pipeline.stages]
