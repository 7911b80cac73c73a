"""What was measured, where it is looked up, and what correcting it by a run leaves on it."""

from dataclasses import replace

import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from tests.systems import VSL
from workbench.core.errors import ScenarioError
from workbench.core.records import from_plain, to_plain
from workbench.core.result import Source
from workbench.core.timeline import overlap, tasks_during
from workbench.hardware.profile import Contention, Cores, InOneCall, Losses, OpTime, Pace, Profile
from workbench.perfmodels import bound
from workbench.pipeline import Pipeline, cpu, gpu, load, offload
from workbench.pipeline.layer_graph import EMBED, Node, NodeKind
from workbench.schedules import CGOPipe, FastDecode, FlexGenS3, KTransformers, Sequential, VSLPipe
from workbench.schedules.base import Step
from workbench.schedules.plan import RESTS, Task, Turns, busy_seconds, play
from workbench.serving import prepare
from workbench.serving.task_cost import profile_shape
from workbench.simulate import Detail, simulate
from workbench.stages import (
    Place,
    Rows,
    Stage,
    attention,
    combine,
    decode_attention,
    experts,
    moe,
    out_proj,
    qkv,
    route,
)

EXPERTS_ON_CPU = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)


def timed(scenario, seconds=(1e-5, 1e-3), **rest):
    """The scenario on a computer whose operations were measured: 10 us per token, on one thread and two.

    `seconds` are those for one token and for 100.
    """
    names = ("embed", "head", *(str(stage.op) for stage in scenario.pipeline.stages))
    ops = tuple(OpTime(op, n, (1.0, 100.0), seconds) for op in names for n in (1, 2))
    profile = Profile(profile_shape(scenario.model, scenario.precision), ops, **rest)
    return scenario.on(machine=replace(scenario.machine, cores=Cores.of(2), profiles=(profile,)))


def test_records_and_digests_keep_the_keys_that_were_saved_before():
    cores = Cores(1, 1, 2, gpu_slowdown=0.1, cpu_slowdown=0.2, gpu_team_slowdown=0.3, cpu_team_slowdown=0.4)
    profile = Profile("", (), dispatch=1e-6)
    saved = {"gpu": 1, "cpu": 1, "alone": 2, "spare": 0, "mover": 0.0}
    saved |= {"gpu_drag": 0.1, "cpu_drag": 0.2, "gpu_team_drag": 0.3, "cpu_team_drag": 0.4}
    assert to_plain(cores) == saved
    assert to_plain(profile)["hand_over"] == 1e-6
    assert from_plain(Cores, saved) == cores
    assert from_plain(Profile, to_plain(profile)) == profile
    assert repr(cores) == f"Cores({', '.join(f'{key}={value!r}' for key, value in saved.items())})"
    assert "hand_over=1e-06" in repr(profile)
    assert repr(profile).endswith("resident=None)")  # as before there were layers in one call
    assert "in_one_call=InOneCall(saved=0.001, rows=4, entries=9)" in repr(
        replace(profile, in_one_call=InOneCall(1e-3, 4, 9))
    )


def test_times_with_weights_where_they_are_come_before_others_and_others_before_none():
    there = OpTime("experts", 1, (1.0, 2.0), (2.0, 3.0))
    here = OpTime("experts", 1, (1.0, 2.0), (1.0, 2.0), resident=True)
    profile = Profile("", (there, here))
    assert profile.find("experts", 1, resident=True) == here
    assert profile.find("experts", 1) == there
    assert Profile("", (here,)).find("experts", 1) == here
    assert profile.find("experts", 2) is None


def test_operations_on_a_card_have_times_of_their_own():
    scenario = tiny_scenario(pipeline=EXPERTS_ON_CPU)
    ops = tuple(OpTime("experts", threads, (1.0, 9.0), (seconds, seconds)) for threads, seconds in ((0, 1.0), (3, 5.0)))
    profile = Profile(profile_shape(scenario.model, scenario.precision), ops)
    machine = replace(scenario.machine, cores=Cores.beside_card(5), profiles=(profile,))
    prepared = prepare(scenario.on(machine=machine), Sequential())
    rows = Rows(prefill=7)
    assert prepared.cost.call(Stage(experts, Place.GPU), machine.cores.gpu)(rows)[0] == 1.0
    assert prepared.cost.call(Stage(experts, Place.CPU), machine.cores.cpu)(rows)[0] == 5.0
    tasks = prepared.lowering.tasks(Step.MIDDLE)
    pace = prepared.plans.pace(tasks, [prepared.cost.by_kind(lambda _: rows)], machine.cores)
    assert (pace.gpu, pace.cpu) == (0, 3)


@pytest.mark.parametrize("schedule", [Sequential(2, prefetch=True), VSLPipe(), CGOPipe(2)], ids=lambda each: each.name)
def test_a_card_without_times_is_predicted_as_one_of_the_catalogue(schedule):
    """Its lanes share the host's memory and no cores."""
    scenario = tiny_scenario([8] * 12, [5] * 12, machine=small_machine(h2d=5e8))
    here = scenario.on(machine=replace(scenario.machine, cores=Cores.beside_card(4)))
    assert bound(here, schedule).seconds == pytest.approx(bound(scenario, schedule).seconds)
    for detail in Detail:
        found = simulate(here, schedule, detail=detail).seconds
        assert found == pytest.approx(simulate(scenario, schedule, detail=detail).seconds)


def test_weights_that_go_to_a_card_slow_the_cpu_lane_down_as_measured():
    scenario = tiny_scenario([8] * 12, [5] * 12, machine=small_machine(h2d=5e8, dram=1e7))
    seconds = []
    for slowdown in (0.0, 1e-8):
        cores = replace(Cores.beside_card(4), cpu_slowdown=slowdown)
        here = scenario.on(machine=replace(scenario.machine, cores=cores))
        prepared = prepare(here, VSLPipe())
        tasks = prepared.lowering.tasks(Step.MIDDLE)
        rows = [prepared.cost.by_kind(lambda _: Rows(decode=6, context=60, emits=6))] * 2
        pace = prepared.plans.pace(tasks, rows, cores)
        seconds.append(pace.cpu_slowdown)
    assert seconds == [0.0, pytest.approx(1 - 1 / (1 + 1e-8 * 5e8))]


@pytest.mark.parametrize("detail", Detail)
def test_lanes_that_work_at_once_slow_each_other_down_and_lanes_that_alternate_do_not(detail):
    scenario = tiny_scenario([8] * 12, [5] * 12, machine=small_machine(h2d=1e8))
    losses = Contention(0.5, 0.5)
    for schedule, together in ((Sequential(), False), (VSLPipe(), True), (CGOPipe(2), True), (FlexGenS3(2), False)):
        plain, contending = (
            simulate(timed(scenario, contention=found), schedule, detail=detail).seconds
            for found in (Contention(), losses)
        )
        assert (contending > 1.01 * plain) == together, schedule
        assert contending < 3 * plain


@pytest.mark.parametrize("lane", ["gpu", "cpu"])
def test_a_lane_waits_for_each_task_of_another_lane_that_runs_while_it_works(lane):
    """The waits for all tasks beside a lane are added to the lane's own seconds."""
    scenario = tiny_scenario([8] * 4, [5] * 4, machine=small_machine(h2d=1e8))
    wait = 1e-4
    waiting = timed(scenario, contention=Contention(**{f"{lane}_wait": wait}))
    prepared = prepare(waiting, VSLPipe())
    rows = {"gpu": Rows(prefill=80, pairs=80, emits=1), "cpu": Rows(decode=40, context=40, emits=40)}[lane]
    parts = [rows, rows]
    tasks = prepared.lowering.tasks(Step.MIDDLE)
    pace = prepared.plans.pace(tasks, parts, waiting.machine.cores)
    alone = prepared.plans.tasks(tasks, parts, pace)
    seconds = busy_seconds(tasks, alone)
    packet = prepared.lowering.schedule.packet_seconds
    laid_out = prepared.plans.lay_out(tasks, parts, packet, Pace(1, 1, "", 0.0, 0.0), 0.0)
    slowed = {name: getattr(pace.contention, name) for name in ("gpu", "cpu")}
    other = "cpu" if lane == "gpu" else "gpu"
    assert slowed[other] == 0
    spans = [(task, start, end) for task, start, end in zip(tasks, laid_out.starts, laid_out.ends, strict=True)]
    busy = [(start, end) for task, start, end in spans if task.node.lane == lane and end > start]
    others = [((start, end),) for task, start, end in spans if task.node.lane != lane]
    least = wait * tasks_during(others, busy)
    assert slowed[lane] * seconds[lane] == pytest.approx(least, rel=0.25)


def test_a_lane_waits_where_anything_works_beside_it_and_nowhere_else():
    """Lanes that alternate wait for transfers beside them alone; without prefetch there are none."""
    scenario = tiny_scenario([8] * 12, [5] * 12, machine=small_machine(h2d=1e8))
    schedules = ((Sequential(), False), (Sequential(prefetch=True), True), (VSLPipe(), True), (CGOPipe(2), True))
    for schedule, waits in schedules:
        plain = simulate(timed(scenario), schedule)
        waiting = simulate(timed(scenario, contention=Contention(gpu_wait=1e-4)), schedule)
        assert (waiting.busy["gpu"] > 1.001 * plain.busy["gpu"]) == waits, schedule


def test_plans_that_stream_no_weights_lose_what_was_measured_in_such_plans():
    losses = Losses(dispatch=1e-3, move=2e-3, contention=Contention(cpu=3.0))
    streaming = tiny_scenario([8] * 4, [5] * 4)
    resident = streaming.on(pipeline=EXPERTS_ON_CPU)
    for scenario, schedule, changes in ((streaming, VSLPipe(), False), (resident, KTransformers(), True)):
        plain, lossy = simulate(timed(scenario), schedule), simulate(timed(scenario, resident=losses), schedule)
        assert (lossy.seconds > 1.01 * plain.seconds) == changes


IN_ONE_CALL = gpu(qkv, attention, out_proj, moe)


@pytest.mark.parametrize(("requests", "entries", "passes"), [(3, 36, 4), (4, 48, 0), (3, 35, 3)])
def test_layers_in_one_call_save_few_decodes_what_was_measured(requests, entries, passes):
    """The second to the fifth pass have decodes alone; in the last one each reads 12 entries."""
    measured = {"seconds": (1e-4, 2e-4)}
    saving = measured | {"in_one_call": InOneCall(2e-6, 3, entries)}
    for pipeline, layers in ((IN_ONE_CALL, passes), (EXPERTS_ON_CPU, 0)):
        few = tiny_scenario([8] * requests, [5] * requests, pipeline=pipeline)
        plain, less = (simulate(timed(few, **how), Sequential()).seconds for how in (measured, saving))
        saved = layers * few.model.num_hidden_layers * 2e-6
        assert plain - less == pytest.approx(saved, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("saved", [1e-6, 1.0])
def test_what_layers_in_one_call_save_is_in_the_bound(saved):
    one = tiny_scenario([4], [20], pipeline=IN_ONE_CALL)
    measured = {"seconds": (1e-4, 2e-4)}
    saving = timed(one, **measured, in_one_call=InOneCall(saved, 4, 1000))
    limit = bound(saving, Sequential()).seconds
    assert 0 < limit <= simulate(saving, Sequential()).seconds * (1 + 1e-9)
    assert limit < bound(timed(one, **measured), Sequential()).seconds


@pytest.mark.parametrize("op", [experts, decode_attention])
def test_experts_and_attention_on_the_cpu_are_slowed_down_as_plans_of_their_own_were(op):
    """Where nothing is streamed."""
    layers = {experts: EXPERTS_ON_CPU, decode_attention: Pipeline(VSL.chain)}
    scenario = tiny_scenario([8] * 4, [5] * 4).on(pipeline=layers[op])
    slower = Contention(cpu=3.0)
    for attention_slower, experts_slower, slows in ((slower, None, True), (slower, Contention(), op != experts)):
        losses = Losses(contention=attention_slower, experts=experts_slower)
        found = prepare(timed(scenario, resident=losses), FastDecode()).plans.cost.losses
        assert (found.contention == slower) == slows
    assert from_plain(Losses, to_plain(losses)) == losses


def test_lanes_that_slow_one_another_down_overlap_longer():
    """The gpu lane's tasks are beside the cpu lane's twice as long once these take twice as long."""
    scenario = tiny_scenario([8] * 4, [5] * 4, machine=small_machine(h2d=1e8))
    alone = timed(scenario, contention=Contention(gpu=1.0))
    beside = timed(scenario, contention=Contention(gpu=1.0, cpu=1.0))
    found = {}
    for name, each in (("alone", alone), ("beside", beside)):
        prepared = prepare(each, VSLPipe())
        parts = [Rows(decode=40, context=40, emits=40), Rows(decode=2, context=2, emits=2)]
        tasks = prepared.lowering.tasks(Step.MIDDLE)
        found[name] = prepared.plans.pace(tasks, parts, each.machine.cores).contention
    assert 0 < found["alone"].gpu < found["beside"].gpu


GAPS = [(0.0, 0.0), (RESTS[0], 0.0), (sum(RESTS) / 2, 0.5), (RESTS[1], 1.0), (2.0, 1.0)]
"""Seconds for which the gpu lane waits, and those by which its task takes longer if it waited for weights."""


@pytest.mark.parametrize(("gap", "longer"), GAPS)
@pytest.mark.parametrize("kind", [NodeKind.WEIGHTS, NodeKind.SEGMENT])
def test_a_task_takes_longer_after_a_wait_for_weights_and_not_after_one_for_the_cpu_lane(kind, gap, longer):
    weights = kind is NodeKind.WEIGHTS
    lane = "h2d" if weights else "cpu"
    awaited = Task(Node(kind, "C", lane), 0, None if weights else 0, (0,), bulk=weights)
    tasks = [Task(EMBED, 0, 0), awaited, Task(EMBED, 0, 0, (1,)), Task(EMBED, 0, 0, (2,))]
    _, ends, busy = play(Turns.of(tasks, range(4)), [1.0, gap, 1.0, 1.0], 1.0, [0.0] * 4, cold=1.0)
    longer *= weights
    assert (busy["gpu"], busy[lane]) == pytest.approx((3.0 + longer, gap))
    assert ends == pytest.approx([1.0, 1.0 + gap, 2.0 + gap + longer, 3.0 + gap + longer])


def test_only_the_wait_for_weights_counts_where_the_cpu_lane_ends_shortly_before_them():
    tasks = [
        Task(EMBED, 0, 0),
        Task(Node(NodeKind.SEGMENT, "C", "cpu"), 0, 0, (0,)),
        Task(Node(NodeKind.WEIGHTS, "W", "h2d"), 0, None, (0,), bulk=True),
        Task(EMBED, 0, 0, (1, 2)),
    ]
    _, _, busy = play(Turns.of(tasks, range(4)), [1.0, 1.0, 1.0 + RESTS[0] / 2, 1.0], 1.0, [0.0] * 4, cold=1.0)
    assert busy["gpu"] == pytest.approx(2.0)


def test_tasks_during_counts_each_by_its_share_of_time_within_the_spans():
    busy = [(1.0, 2.0), (4.0, 6.0)]
    assert tasks_during([[(0.0, 1.0)], [(2.0, 4.0)], [(7.0, 9.0)]], busy) == 0
    assert tasks_during([[(1.0, 2.0)], [(4.5, 5.0)]], busy) == pytest.approx(2)
    assert tasks_during([[(0.0, 10.0)]], busy) == pytest.approx(0.3)
    assert tasks_during([[(1.5, 5.0)]], busy) == pytest.approx(1.5 / 3.5)
    assert tasks_during([[(1.5, 2.0), (3.0, 4.5)]], busy) == pytest.approx(1.0 / 2.0)
    assert tasks_during([[(1.5, 1.5)]], busy) == 0
    assert tasks_during([[(0.0, 1.0)]], []) == 0


def test_overlap_counts_every_second_in_which_both_work():
    assert overlap([(0, 2), (3, 5)], [(1, 4), (4.5, 9)]) == pytest.approx(1 + 1 + 0.5)
    assert overlap([(0, 1)], [(1, 2)]) == 0
    assert overlap([], [(1, 2)]) == 0


def test_a_profile_corrected_by_a_run_is_as_fast_as_it_and_says_so():
    scenario = timed(tiny_scenario(6))
    (profile,) = scenario.machine.profiles
    simulated = simulate(scenario, VSLPipe())
    slower = {lane: 1.2 * seconds for lane, seconds in simulated.busy.items()}
    measured = replace(simulated, source=Source.MEASURED, busy=slower)
    corrected = profile.corrected_by(measured, simulated)
    assert corrected.find("experts", 1).seconds == pytest.approx((1.2e-5, 1.2e-3))
    again = simulate(scenario.on(machine=replace(scenario.machine, profiles=(corrected,))), VSLPipe())
    assert sum(again.busy[lane] for lane in ("gpu", "cpu")) == pytest.approx(
        sum(slower[lane] for lane in ("gpu", "cpu"))
    )
    assert "operations x 1.2 by a run of VSLPipe" in again.facts["corrected"]
    assert "corrected" not in simulated.facts
    for wrong in ((simulated, simulated), (measured, measured), (measured, simulate(scenario, Sequential()))):
        with pytest.raises(ScenarioError, match="no run and simulation of one question"):
            profile.corrected_by(*wrong)


def test_what_was_calibrated_under_load_is_told_with_what_it_predicts():
    assert "calibrated" not in simulate(timed(tiny_scenario(6), others=0.01), VSLPipe()).facts
    facts = simulate(timed(tiny_scenario(6), others=0.4), VSLPipe()).facts
    assert facts["calibrated"] == "under load: others took 40% of the cores"


def test_measured_experts_that_are_deferred_or_skipped_are_a_share_of_the_decodes():
    """8 decodes at 10 us each: of four experts one is deferred and one is skipped, so that half is computed at once."""
    layer = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1, skip=1) >> load >> gpu(combine)
    scenario = timed(tiny_scenario(6, pipeline=layer, model=tiny_model(num_experts_per_tok=4)))
    prepared = prepare(scenario, KTransformers())
    graph = prepared.lowering.stack.graph(0)
    (now,) = (each for each in graph.nodes if each.kind is NodeKind.SEGMENT and each.lane == "cpu")
    (late,) = (each for each in graph.nodes if each.kind is NodeKind.DEFERRED)
    seconds = [prepared.cost.node(each, Rows(decode=8, emits=8), threads=1) for each in (now, late)]
    assert seconds == pytest.approx([4e-5, 2e-5])
