"""Order and overlap: how batches are split, which pipelines a schedule takes, and what weights it transfers."""

from collections import Counter

import pytest
from hypothesis import given

from tests.builders import batches, make_batch, tiny_scenario
from tests.examples import examples
from tests.systems import PIPELINES, STREAMED, VSL
from workbench.analysis.compare import compare
from workbench.core.errors import ScheduleError
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.pipeline.stack_graph import stack_graph
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.resource_aware import ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import (
    CGOPipe,
    FastDecode,
    Fiddler,
    FlexGenS3,
    FlexGenS4,
    KTransformers,
    LayerStreaming,
    Lowering,
    Overlap,
    Schedule,
    Sequential,
    Step,
    VSLPipe,
    WeightPlace,
    contenders,
)
from workbench.schedules.contenders import every_candidate
from workbench.schedules.micro_batches import MicroBatched
from workbench.schedules.plan import Carry
from workbench.serving import prepare
from workbench.simulate import simulate
from workbench.stages import (
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
)

SCHEDULES = [
    Sequential(),
    Sequential(3),
    Sequential(2, prefetch=True),
    VSLPipe(),
    VSLPipe(weight_slots=3),
    CGOPipe(3),
    FastDecode(2),
    *(FlexGenS3(3, place) for place in WeightPlace),
]


def run_of(iterations: int) -> list[Step]:
    """The steps of a run."""
    steps = [Step.MIDDLE] * iterations
    steps[0] |= Step.FIRST
    steps[-1] |= Step.LAST
    return steps


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_contenders_begin_with_the_baseline_that_prefetches_and_take_the_pipeline(name):
    found = contenders(PIPELINES[name])
    assert found[0] == Sequential(prefetch=True)
    stack = stack_graph(PIPELINES[name], 3)
    lowered = [schedule.tasks(stack, Step.MIDDLE) for schedule in found]
    assert len(set(lowered)) == len(lowered)


def test_contenders_are_all_schedules_that_take_the_pipeline():
    known = Schedule.__subclasses__() + MicroBatched.__subclasses__()
    every = {schedule.__name__ for schedule in known if schedule.__module__.startswith("workbench.")}
    named = {schedule.name.partition("(")[0] for schedule in every_candidate()}
    assert named == every - {"MicroBatched"}
    assert [schedule.name for schedule in contenders(VSL)[1:]] == [
        "FlexGenS3",
        "FastDecode",
        "CGOPipe",
        "VSLPipe",
        "Overlap",
    ]
    assert [schedule.name for schedule in contenders(PIPELINES["flexgen_s4"])[1:]] == ["FlexGenS4", "Overlap"]


@examples(60)
@given(batches())
def test_splitting_parts_a_batch_without_loss_or_repetition(batch):
    for schedule in SCHEDULES:
        parts = schedule.split(batch)
        assert len(parts) == schedule.parts
        assert Counter(rectangle for part in parts for rectangle in part) == Counter(batch)


@examples(60)
@given(batches())
def test_parts_are_balanced_in_decode_and_in_prefill_tokens(batch):
    a, b = VSLPipe().split(batch)
    assert abs(a.rows.decode - b.rows.decode) <= 1
    longest = max(batch.prefill_len.tolist(), default=0)
    assert abs(a.rows.prefill - b.rows.prefill) <= longest


def test_equal_prompts_are_shared_evenly():
    a, b = VSLPipe().split(make_batch([7] * 6, [3] * 10))
    assert (a.rows.prefill, b.rows.prefill) == (21, 21)
    assert (a.rows.context, b.rows.context) == (20, 20)


def test_the_longest_prompt_is_balanced_by_the_others():
    a, b = VSLPipe().split(make_batch([1, 2, 3, 6]))
    assert sorted((a.rows.prefill, b.rows.prefill)) == [6, 6]


def test_neighbours_in_age_go_to_different_parts():
    a, b = VSLPipe().split(make_batch([], [9, 8, 3, 2]))
    assert a.context.tolist() == [9, 3]
    assert b.context.tolist() == [8, 2]


@pytest.mark.parametrize("name", ["flexgen_s4", "ktransformers", "all_gpu", "all_cpu"])
def test_vslpipe_refuses_a_pipeline_of_another_shape(name):
    with pytest.raises(ScheduleError) as error:
        VSLPipe().lower(PIPELINES[name], make_batch([3]))
    assert str(error.value) == (
        f"VSLPipe does not take this pipeline: its layers are {SHAPES[name]}, where VSLPipe needs gpu(...) >> offload "
        ">> cpu(...) >> load >> gpu(...). Wire it so, or use Sequential(prefetch=True) or Overlap(), which take any "
        "pipeline."
    )


SHAPES = {
    "vslpipe": "fetch(weights) | gpu(...) >> offload >> cpu(...) >> load >> gpu(...)",
    "flexgen_s4": "fetch(weights, kv) | gpu(...)",
    "ktransformers": "gpu(...) >> (gpu(...) | offload >> cpu(..., defer=3) >> load) >> gpu(...)",
    "all_gpu": "gpu(...)",
    "all_cpu": "cpu(...)",
    "streamed": "fetch(weights) | gpu(...)",
    "entered": "cpu(...) >> load >> gpu(...) >> offload",
}
ON_GPU = "its routed experts are not on the cpu"
IN_DRAM = "its KV cache is on the cpu"
WITHOUT_EXPERTS = {
    "vslpipe": f"{ON_GPU}, {IN_DRAM} and it fetches weights",
    "flexgen_s4": f"{ON_GPU}, {IN_DRAM} and it fetches weights, kv",
    "all_gpu": ON_GPU,
    "all_cpu": IN_DRAM,
    "streamed": f"{ON_GPU} and it fetches weights",
    "entered": ON_GPU,
}
"""What a schedule with experts on the CPU says of each pipeline that it refuses."""
ON_CPU = "gpu(...) >> offload >> cpu(...) >> load >> gpu(...)"
EXPERTS = "gpu(..., route) >> (gpu(shared_experts) | offload >> cpu(experts) >> load) >> gpu(combine)"
NEEDS = {
    CGOPipe(): (ON_CPU, "vslpipe"),
    FastDecode(): (ON_CPU, "vslpipe"),
    FlexGenS3(): (ON_CPU, "vslpipe"),
    FlexGenS4(): ("fetch(weights, kv) | gpu(qkv, attention, out_proj, moe)", "flexgen_s4"),
    LayerStreaming(): ("fetch(weights) | gpu(...)", "streamed"),
    KTransformers(): (EXPERTS, "ktransformers"),
    Fiddler(): (EXPERTS, "ktransformers"),
}
"""The shape that each schedule names, and the one pipeline of these that it takes."""
OTHERS = {**PIPELINES, "streamed": STREAMED, "entered": cpu(qkv) >> load >> gpu(attention, out_proj, moe) >> offload}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("schedule", NEEDS, ids=str)
def test_a_schedule_says_which_pipeline_it_needs(schedule, name):
    needed, taken = NEEDS[schedule]
    if name == taken:
        assert schedule.lower(OTHERS[name], make_batch([3], [2])).tasks
        return
    with pytest.raises(ScheduleError) as error:
        schedule.lower(OTHERS[name], make_batch([3], [2]))
    found = WITHOUT_EXPERTS[name] if needed == EXPERTS else f"its layers are {SHAPES[name]}"
    named = type(schedule).__name__
    assert str(error.value).startswith(
        f"{named} does not take this pipeline: {found}, where {named} needs {needed}. Wire it so, or use Sequential("
    )


def test_a_schedule_says_which_layers_of_a_stack_differ():
    every_other = VSL[:1] + PIPELINES["all_gpu"][1:3] + VSL[3:]
    with pytest.raises(ScheduleError) as error:
        VSLPipe().lower(every_other, make_batch([3], layers=4))
    assert f": its layers 0, 3 are {SHAPES['vslpipe']} and its layers 1 to 2 are gpu(...), where" in str(error.value)


@pytest.mark.parametrize("schedule", [KTransformers(), Fiddler()], ids=str)
def test_experts_on_the_cpu_take_no_streamed_cache(schedule):
    layer = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    assert schedule.lower(layer, make_batch([3], [2])).tasks
    with pytest.raises(ScheduleError, match=type(schedule).__name__):
        schedule.lower(fetch(kv) | layer, make_batch([3], [2]))


def test_deferral_needs_a_schedule_that_knows_of_it():
    late = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1) >> load >> gpu(combine)
    for schedule in (VSLPipe(), CGOPipe()):
        with pytest.raises(ScheduleError, match="defer=1"):
            schedule.lower(late, make_batch([3], [2]))


@pytest.mark.parametrize("schedule", [CGOPipe, FastDecode])
def test_looking_two_micro_batches_ahead_needs_two(schedule):
    with pytest.raises(ScheduleError, match=f"{schedule.__name__} needs at least 2 micro-batches, not 1"):
        schedule(1)


def test_pages_share_what_a_layer_streams():
    prepared = prepare(tiny_scenario(), CGOPipe(3))
    pages = [task for task in prepared.lowering.tasks(Step.MIDDLE) if task.weights_of]
    assert [(task.layer, task.page) for task in pages[:4]] == [(1, (0, 3)), (1, (1, 3)), (1, (2, 3)), (2, (0, 3))]
    sizes = [prepared.cost.weight_transfer(task) for task in pages[:3]]
    assert sum(sizes) == prepared.cost.weights_per_layer == prepared.slot_bytes
    assert max(sizes) - min(sizes) <= 128


def test_a_place_of_weights_reads_well_in_a_name():
    assert FlexGenS3(2, WeightPlace.PAGED).name == "FlexGenS3(micro_batches=2, weights=WeightPlace.PAGED)"


def test_vslpipe_refuses_the_mirrored_shape():
    mirrored = cpu(qkv) >> load >> gpu(attention) >> offload >> cpu(out_proj, moe)
    with pytest.raises(ScheduleError):
        VSLPipe().lower(mirrored, make_batch([3]))


def test_sequential_takes_every_pipeline():
    for pipeline in PIPELINES.values():
        assert Sequential().lower(pipeline, make_batch([3], [2])).tasks


@pytest.mark.parametrize("micro_batches", [0, -1])
def test_sequential_needs_a_micro_batch(micro_batches):
    with pytest.raises(ScheduleError, match=f"at least one micro-batch, not {micro_batches}"):
        Sequential(micro_batches)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_vslpipe_needs_packets_that_take_time(seconds):
    with pytest.raises(ScheduleError, match="packet_seconds must be positive"):
        VSLPipe(packet_seconds=seconds)


@pytest.mark.parametrize("slots", [1, 2.0, None])
def test_vslpipe_needs_two_slots_for_weights(slots):
    with pytest.raises(ScheduleError, match="weight_slots must be at least 2"):
        VSLPipe(weight_slots=slots)


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("layers", [1, 2, 3, 7])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_run_transfers_every_layers_weights_once_per_iteration(schedule, layers, iterations):
    lowering = Lowering(schedule, stack_graph(VSL, layers))
    transferred = Counter(
        node
        for step in run_of(iterations)
        for task in lowering.tasks(step)
        for node in task.weights_of
        if not task.page.number
    )
    assert transferred == {
        (layer, node): iterations for layer in range(layers) for node in lowering.stack.streamed(layer)
    }


def test_bytes_transferred_are_layers_times_what_one_layer_streams():
    scenario = tiny_scenario()
    prepared = prepare(scenario, VSLPipe())
    moved = sum(
        prepared.cost.weight_transfer(task)
        for step in run_of(3)
        for task in prepared.lowering.tasks(step)
        if task.weights_of
    )
    assert moved == 3 * prepared.layers * prepared.cost.weights_per_layer
    streamed = scenario.model.layer_params * 2
    assert prepared.cost.weights_per_layer == streamed


@pytest.mark.parametrize(
    "fetched", [pytest.param(fetch(experts.weights), id="experts"), pytest.param(fetch(qkv.weights), id="qkv")]
)
def test_vslpipe_transfers_only_what_is_fetched(fetched):
    layer = fetched | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
    lowering = Lowering(VSLPipe(), stack_graph(layer, 4))
    brought = [node for step in run_of(3) for task in lowering.tasks(step) for node in task.weights_of]
    assert Counter(brought) == {(layer, lowering.stack.streamed(layer)[0]): 3 for layer in range(4)}


def test_nothing_is_loaded_before_the_first_layer_except_in_the_first_iteration():
    lowering = Lowering(VSLPipe(), stack_graph(VSL, 4))
    assert lowering.tasks(Step.FIRST)[0].weights_of == ((0, 0),)
    assert not lowering.tasks(Step.MIDDLE)[0].weights_of
    last = [task.weights_of for task in lowering.tasks(Step.LAST) if task.weights_of]
    assert last[-1] == ((3, 4),)


def test_tasks_are_lowered_once_per_kind_of_iteration():
    lowering = Lowering(VSLPipe(), stack_graph(VSL, 3))
    assert lowering.tasks(Step.MIDDLE) is lowering.tasks(Step.MIDDLE)
    assert lowering.tasks(Step.MIDDLE) is not lowering.tasks(Step.FIRST)


def test_a_schedule_is_named_after_its_class():
    assert VSLPipe().name.startswith("VSLPipe")
    assert "2" in Sequential(micro_batches=2).name


@pytest.mark.parametrize("parts", [0, 1.5, "2", True])
def test_micro_batches_that_are_no_whole_number_are_refused(parts):
    with pytest.raises(ScheduleError, match="Sequential needs at least one micro-batch"):
        Sequential(micro_batches=parts)


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_vslpipe_computes_nothing_before_its_weights_are_there(slots):
    plan = VSLPipe(weight_slots=slots).lower(VSL, make_batch([3], [2], layers=6), Step.FIRST)
    before = list[set[int]]()
    brought = dict[tuple[int, int], int]()
    for index, task in enumerate(plan.tasks):
        before.append(set(task.after).union(*(before[other] for other in task.after)))
        if task.carry is Carry.NONE:
            brought = dict.fromkeys(task.weights_of, index) | brought  # the next iteration's come again
    for index, task in enumerate(plan.tasks):
        if task.layer >= 0 and task.node in plan.stack.at(task.layer):
            transfer = brought.get((task.layer, plan.stack.at(task.layer).index(task.node)))
            assert transfer is None or transfer in before[index]
    assert brought


def test_each_systems_schedule_names_the_scheduler_of_that_system():
    static = (CGOPipe(3), FastDecode(3), FlexGenS3(3), FlexGenS4(3))
    assert {schedule.scheduler for schedule in static} == {StaticBatching(3)}
    assert (LayerStreaming().scheduler, VSLPipe().scheduler) == (StaticBatching(), ResourceAware())
    assert KTransformers().scheduler == Fiddler().scheduler == ContinuousBatching()
    assert Overlap().scheduler is Sequential().scheduler is None


def test_a_comparison_names_the_schedulers_if_they_differ():
    of = tiny_scenario(scheduler=ContinuousBatching())
    alike = compare([simulate(of, VSLPipe()), simulate(of, Sequential())])
    assert [row[0] for row in alike.rows()] == ["VSLPipe", "Sequential"]
    static = simulate(of.on(scheduler=StaticBatching(1)), Sequential())
    unlike = compare([alike.results[0], static])
    assert [row[0] for row in unlike.rows()] == ["VSLPipe, ContinuousBatching", "Sequential, StaticBatching"]
    other = compare([static, simulate(of.on(scheduler=StaticBatching(2)), Sequential())])
    assert [row[0] for row in other.rows()] == [
        f"Sequential, StaticBatching(micro_batches={count}, size=None, token_budget=None)" for count in (1, 2)
    ]
