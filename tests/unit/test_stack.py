"""Stacks: ranges of layers, how they are put together, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import OWN, small_machine, tiny_model_of, tiny_scenario
from tests.systems import PIPELINES, STREAMED, VSL
from workbench.core.errors import PipelineError, ScenarioError
from workbench.perfmodels import bound, moe_lens, moe_lightning
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.scenario import Scenario
from workbench.schedules import Overlap, Sequential, VSLPipe, contenders
from workbench.serving import fits, prepare
from workbench.simulate import simulate
from workbench.stages import Op, Work, attention, combine, experts, moe, out_proj, qkv, route

A = gpu(qkv, attention, out_proj, moe)
B = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)


def edges(stack, layers):
    return [(each.first, each.stop) for each in stack.over(layers)]


def test_open_and_negative_ends_are_set_against_the_model():
    assert edges(A[:3] + B[3:], 8) == [(0, 3), (3, 8)]
    assert edges(A[:-3] + B[-3:], 8) == [(0, 5), (5, 8)]
    assert edges(A[:-3] + B[5:], 8) == [(0, 5), (5, 8)]
    assert edges(A[:2] + B[2:4] + A[4:], 5) == [(0, 2), (2, 4), (4, 5)]
    assert edges(A[:], 5) == [(0, 5)]


REFUSED = {
    "a single layer": (lambda: A[3], r"takes a range of layers, as in pipeline\[2:10\], not \[3\]"),
    "a step": (lambda: A[::2], "whole numbers with step 1"),
    "a half": (lambda: A[:1.5], "whole numbers with step 1"),
    "no layer": (lambda: A[2:2], r"\[2:2\] holds no layer; leave this range out"),
    "the wrong way round": (lambda: A[5:2], r"\[5:2\] holds no layer; write the smaller number first"),
    "no ranges": (lambda: A + B, r"say which: experts_on_cpu\[:26\]"),
    "one range": (lambda: A[:3] + B, "give its layers"),
    "a gap": (lambda: A[:3] + B[4:], r"\[:3\] and \[4:\] leave out layer 3; let the second begin at 3"),
    "an overlap": (lambda: A[:4] + B[2:], "both have layers 2 to 3; let the second begin at 4"),
    "nothing behind the last": (lambda: A[:] + B[3:], "ends with the last layer"),
    "stages behind a stack": (lambda: A[:3] >> B, "cut the whole layer"),
    "a stack behind stages": (lambda: A >> B[3:], "cut the whole layer"),
    "a fetch beside a stack": (lambda: fetch(experts.weights) | A[:3], "cut the whole layer"),
    "a stack beside a fetch": (lambda: A[:3] | A, "cut the whole layer"),
    "too few layers": (lambda: (A[:3] + B[3:]).over(3), r"\[3:\] holds none of the model's 3 layers; leave"),
    "too many layers": (lambda: (A[:3] + B[3:9]).over(4), r"\[3:9\] ends at layer 9, and the model has 4; write"),
    "a torn stack": (lambda: (A[:-3] + B[4:]).over(8), r"see \[4:\], where layer 5 is next"),
    "no first layer": (lambda: A[2:].over(4), r"see \[2:\], where layer 0 is next"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_is_no_stack_is_told_with_its_mend(case):
    make, said = case
    with pytest.raises(PipelineError, match=said):
        make()


def test_a_stack_is_kept_in_a_file_and_compared(tmp_path: Path):
    scenario = tiny_scenario(8, 4, 3, pipeline=B[:-2] + A[-2:])
    path = scenario.save(tmp_path / "scenario.json")
    assert Scenario.load(path).pipeline == scenario.pipeline
    assert not Scenario.load(path).diff(scenario)
    other = scenario.on(pipeline=A)
    assert scenario.diff(other) == {"pipeline": (str(B[:-2] + A[-2:]), str(A))}


def test_a_file_with_a_torn_stack_is_refused_in_one_sentence(tmp_path: Path):
    path = tiny_scenario(8, 4, 3, pipeline=B[:2] + A[2:]).save(tmp_path / "scenario.json")
    text = path.read_text(encoding="utf-8")
    for wrong in (text.replace("[\n    0,\n    2\n   ]", "[0, 1]"), text.replace('"layers"', '"rows"')):
        assert wrong != text
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises((ScenarioError, PipelineError)):
            Scenario.load(path)


def test_the_papers_models_refuse_stacks_by_name():
    stack = Pipeline(VSL.chain)[:2] + VSL[2:]
    scenario = tiny_scenario(8, 4, 12, pipeline=stack)
    for predict in (moe_lens.predict, moe_lightning.predict):
        with pytest.raises(ScenarioError, match="takes one pipeline for all layers"):
            predict(scenario, VSLPipe())


def test_contenders_of_a_stack_are_those_that_take_all_ranges():
    resident = Pipeline(VSL.chain)
    names = [schedule.name for schedule in contenders(resident[:2] + VSL[2:])]
    assert names == ["Sequential(prefetch=True)", "FlexGenS3", "FastDecode", "CGOPipe", "VSLPipe", "Overlap"]
    assert [schedule.name for schedule in contenders(VSL[:-1] + STREAMED[-1:])] == [
        "Sequential(prefetch=True)",
        "Overlap",
    ]


def test_two_ranges_of_one_pipeline_are_that_pipeline():
    for schedule in (Sequential(2, prefetch=True), VSLPipe(), Overlap()):
        whole, cut = (tiny_scenario(8, 4, 12, pipeline=wired) for wired in (VSL, VSL[:1] + VSL[1:]))
        assert simulate(cut, schedule).seconds == simulate(whole, schedule).seconds
        assert bound(cut, schedule).seconds == bound(whole, schedule).seconds
        assert str(fits(cut, schedule)) == str(fits(whole, schedule))


def test_a_stack_of_resident_and_streamed_layers_lies_between_both():
    resident = Pipeline(VSL.chain)
    scenarios = [tiny_scenario(8, 4, 12, pipeline=wired) for wired in (VSL, resident[:2] + VSL[2:], resident)]
    slow, mixed, fast = (simulate(of, Overlap()).seconds for of in scenarios)
    assert fast < mixed < slow
    moved = [prepare(of, Overlap()).cost.weights_per_layer for of in scenarios]
    assert moved[1] == moved[0] / 2
    assert moved[2] == 0


def test_weights_that_a_layer_lacks_are_neither_moved_nor_held():
    """A user's operation that dense layers do not have."""
    own = replace(OWN, name="mine", present=lambda model, kind: not kind.dense, params=lambda model: 1000)
    pipeline = fetch(own.weights) | gpu(own, qkv, attention, out_proj, moe)
    prepared = prepare(tiny_scenario(8, 4, 3, pipeline=pipeline, model=tiny_model_of("dense", 4)), Sequential())
    kinds = prepared.scenario.model.layer_kinds
    assert [prepared.cost.layer_weights(layer) for layer in range(4)] == [0 if kind.dense else 2000 for kind in kinds]
    sparse = sum(not kind.dense for kind in kinds)
    without = fits(prepared.scenario.on(pipeline=PIPELINES["all_gpu"]), Sequential())
    assert fits(prepared.scenario, Sequential()).host["weights"] - without.host["weights"] == 2000 * sparse


def test_a_rate_that_only_layers_with_experts_need_is_missed_before_any_work():
    """The first layer of this model has no experts."""
    machine = small_machine()
    machine = replace(machine, cpu=replace(machine.cpu, flops=(("fp32", 1e10),)))
    scenario = tiny_scenario(8, 4, 3, pipeline=B, model=tiny_model_of("dense", 4), machine=machine)
    with pytest.raises(ScenarioError, match="has no known FLOP rate for bf16"):
        fits(scenario, Sequential())


def test_an_operation_without_work_is_told_of_in_any_range():
    free = Op("free", ("x",), ("x",))
    stack = A[:2] + (gpu(free) >> A)[2:]
    with pytest.raises(ScenarioError, match="op 'free' declares no work"):
        simulate(tiny_scenario(8, 4, 3, pipeline=stack), Sequential())
    priced = Op("free", ("x",), ("x",), work=lambda rows, model, precision: Work(1e3 * rows.tokens, 0.0, "bf16"))
    assert simulate(tiny_scenario(8, 4, 3, pipeline=A[:2] + (gpu(priced) >> A)[2:]), Sequential()).seconds > 0


ON_CPU = cpu(qkv, attention, out_proj, route)
OWN_LAYER = gpu(qkv, attention, out_proj, OWN, moe)
WHOLE = {
    "all on the GPU": (A, {}, True),
    "all on the CPU": (PIPELINES["all_cpu"], {}, True),
    "experts elsewhere": (B, {}, False),
    "weights that come": (STREAMED, {}, False),
    "an operation of one's own": (OWN_LAYER, {}, False),
    "experts in two sets": (gpu(qkv, attention, out_proj, route, experts[:2], experts[2:], combine), {}, False),
    "experts that come late": (ON_CPU >> cpu(experts, defer=1) >> cpu(combine), {}, False),
    "experts that are left out": (ON_CPU >> cpu(experts, skip=1) >> cpu(combine), {}, False),
    "shared experts": (A, {"kind": "shared"}, False),
}


@pytest.mark.parametrize(("pipeline", "model", "whole"), WHOLE.values(), ids=list(WHOLE))
def test_a_node_with_a_whole_layer_is_known(pipeline, model, whole):
    chosen = tiny_model_of(model["kind"]) if model else None
    stack = prepare(tiny_scenario(pipeline=pipeline, model=chosen), Sequential()).lowering.stack
    found = [node for node in stack.at(0) if node is not None and stack.is_whole(node.stages, 0)]
    assert bool(found) is whole
