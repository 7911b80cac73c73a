"""The virtual clock: what it lays out, what it counts, and that its two details agree."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from tests.systems import PIPELINES, VSL
from workbench.core.errors import CapacityError, ScenarioError, ScheduleError
from workbench.core.result import Source
from workbench.core.timeline import ITERATION
from workbench.hardware.assembly import machine
from workbench.hardware.profile import Cores, OpTime, Profile
from workbench.models import models
from workbench.perfmodels import bound
from workbench.pipeline import cpu, fetch, gpu
from workbench.scenario import Memory
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import CGOPipe, Overlap, Sequential, Step, VSLPipe
from workbench.schedules.plan import busy_seconds
from workbench.serving import prepare
from workbench.serving.task_cost import profile_shape
from workbench.simulate import Detail, clock, late_bar, simulate
from workbench.simulate.clock import UNSEEN, IterationClock
from workbench.simulate.loading import Loader
from workbench.stages import Op, attention, moe, out_proj, qkv, weights


def test_a_simulation_says_so():
    result = simulate(tiny_scenario(requests=3), VSLPipe())
    assert result.source is Source.SIMULATED
    assert (result.model, result.machine) == ("tiny", "small")
    assert result.facts["requests"] == "3"
    assert result.facts["pipeline"] == str(VSL)


@pytest.mark.parametrize("detail", Detail)
def test_a_simulation_that_is_told_to_ends_early_and_says_so(detail, monkeypatch):
    monkeypatch.setattr(clock, "loader", Loader)  # the compiled kernels play these few iterations in one stretch
    scenario = tiny_scenario(requests=40)
    whole = simulate(scenario, VSLPipe(), detail=detail)
    asked = iter([False, False, True])
    some = simulate(scenario, VSLPipe(), detail=detail, until=lambda: next(asked))
    assert some.stopped
    assert 0 < some.generated < whole.generated
    assert some.steps.seconds == whole.steps.seconds[: some.iterations]
    assert simulate(scenario, VSLPipe(), detail=detail, until=lambda: False) == whole
    assert simulate(scenario, VSLPipe(), detail=detail, until=lambda: True).iterations == 1


def as_fast(scenario, factor: float, spread: tuple[float, float] = (1.0, 1.0)):
    """The scenario on a computer whose operations take so many times a microsecond per token."""
    names = ("embed", "head", *(str(stage.op) for stage in scenario.pipeline.stages))
    ops = [OpTime(op, n, (1.0, 100.0), (1e-6 * factor, 1e-4 * factor)) for op in names for n in (1, 2)]
    profile = Profile(profile_shape(scenario.model, scenario.precision), tuple(ops), iteration=1e-6, spread=spread)
    return scenario.on(machine=replace(scenario.machine, cores=Cores.of(2), profiles=(profile,)))


@pytest.mark.parametrize("schedule", [Sequential(), Sequential(prefetch=True), VSLPipe(), CGOPipe(2)], ids=repr)
@pytest.mark.parametrize("h2d", [1e6, 1e9])
def test_the_interval_holds_for_operations_as_fast_and_as_slow_as_the_calibration_saw_them(schedule, h2d):
    scenario = tiny_scenario([8] * 6, [5] * 6, machine=small_machine(h2d=h2d))
    scenario = scenario.on(scheduler=ResourceAware(token_budget=100))  # else it follows from the times
    fast, usual, slow = (simulate(as_fast(scenario, factor, (0.8, 1.3)), schedule) for factor in (0.8, 1.0, 1.3))
    low, high = usual.interval
    assert f"(90 % within {low:.4g} to {high:.4g})" in str(usual)
    assert low <= slow.gen_tok_s * (1 + 1e-9)
    assert slow.gen_tok_s < usual.gen_tok_s < fast.gen_tok_s
    assert fast.gen_tok_s <= high * (1 + 1e-9)
    if schedule == Sequential():
        unseen = UNSEEN * usual.seconds
        longest = usual.seconds + np.hypot(slow.seconds - usual.seconds, unseen)
        shortest = usual.seconds - np.hypot(usual.seconds - fast.seconds, unseen)
        assert (low, high) == pytest.approx((usual.generated / longest, usual.generated / shortest), rel=1e-3)


def test_only_calibrated_computers_give_an_interval():
    assert simulate(tiny_scenario(requests=3), VSLPipe()).interval is None


def test_every_request_gets_all_its_tokens():
    result = simulate(tiny_scenario([5, 9, 3], [4, 1, 6]), VSLPipe())
    assert result.generated == 11
    assert result.processed == (5 + 3) + (9 + 0) + (3 + 5)
    assert sum(result.steps.prefill) == 17
    assert sum(result.steps.decode) == 8
    assert result.iterations == len(result.steps.seconds) == 6


def test_seconds_are_the_sum_of_the_iterations():
    result = simulate(tiny_scenario([8] * 6, [5] * 6, blocks=9), VSLPipe())
    assert result.preemptions > 0
    assert result.seconds == pytest.approx(sum(result.steps.seconds))
    assert result.processed == 6 * 12 + result.recomputed


def test_blocks_in_use_are_recorded_per_iteration():
    result = simulate(tiny_scenario([4, 4], [3, 3], block=4), Sequential())
    assert result.steps.used_blocks == (2, 4, 4)
    assert max(simulate(tiny_scenario([8] * 6, [5] * 6, blocks=9), Sequential()).steps.used_blocks) <= 9


def test_first_tokens_come_with_the_prefill_and_gaps_are_the_iterations_between():
    result = simulate(tiny_scenario([4], [3]), Sequential())
    first, *rest = result.steps.seconds
    assert result.ttft == pytest.approx(first)
    assert result.tbt == pytest.approx(sum(rest) / 2)


def test_requests_of_one_token_have_no_gaps():
    result = simulate(tiny_scenario([4, 4], [1, 1]), Sequential())
    assert result.tbt != result.tbt


def test_a_task_timeline_has_every_task_that_takes_time_on_its_lane():
    scenario = tiny_scenario([4, 4], [2, 2])
    result = simulate(scenario, VSLPipe(), detail=Detail.TASK)
    first = [span for span in result.timeline if span.iteration == 0]
    prepared = prepare(scenario, VSLPipe())
    weights_only = [span for span in first if span.name.startswith("W")]
    assert [span.lane for span in weights_only] == ["h2d"] * len(weights_only)
    assert len(weights_only) == len([task for task in prepared.lowering.tasks(Step.FIRST) if task.weights_of])
    assert {span.lane for span in result.timeline} == {"gpu", "cpu", "d2h", "h2d"}
    assert result.timeline.end == pytest.approx(result.seconds)


def test_lanes_never_run_two_computations_at_once():
    result = simulate(tiny_scenario([9] * 8, [4] * 8, blocks=20), VSLPipe(), detail=Detail.TASK)
    for lane in ("gpu", "cpu", "d2h"):
        spans = sorted((span.start, span.end) for span in result.timeline if span.lane == lane)
        assert all(later[0] >= earlier[1] - 1e-12 for earlier, later in pairwise(spans))


def test_an_iteration_timeline_has_one_span_per_iteration():
    result = simulate(tiny_scenario([4, 4], [2, 2]), VSLPipe())
    assert [span.name for span in result.timeline] == ["8 prefill + 0 decode", "0 prefill + 2 decode"]
    assert {span.lane for span in result.timeline} == {"step"}


@pytest.mark.parametrize("schedule", [Sequential(2), VSLPipe(1e-4)], ids=str)
def test_busy_time_is_the_same_in_both_details(schedule):
    scenario = tiny_scenario([9] * 8, [4] * 8, model=tiny_model(7), blocks=20)
    by_task, by_iteration = (simulate(scenario, schedule, detail=detail) for detail in (Detail.TASK, Detail.ITERATION))
    for lane, busy in by_task.busy.items():
        assert by_iteration.busy[lane] == pytest.approx(busy, rel=1e-9)


def test_sequential_takes_the_sum_of_its_tasks():
    scenario = tiny_scenario([4], [1])
    prepared = prepare(scenario, Sequential())
    tasks = prepared.lowering.tasks(Step.FIRST | Step.LAST)
    result = simulate(scenario, Sequential(), detail=Detail.TASK)
    assert result.seconds == pytest.approx(sum(result.busy.values()))
    assert set(busy_seconds(tasks, [0.0] * len(tasks))) == set(result.busy)


def test_overlap_saves_time_and_never_costs_any_here():
    scenario = tiny_scenario([30] * 40, [8] * 40, machine=small_machine(dram=2e8))
    overlapped, in_turn = (simulate(scenario, schedule) for schedule in (VSLPipe(), Sequential(2)))
    assert overlapped.seconds < 0.9 * in_turn.seconds


@pytest.mark.parametrize("detail", Detail)
def test_attention_and_streaming_share_the_hosts_memory(detail):
    """As fast as DRAM, the link leaves attention nothing while it streams: overlap cannot beat one after the other."""
    fast = {"gpu": 1e15, "hbm": 1e15, "cpu": 1e15, "d2h": 1e15, "gpu_memory": 1e12}
    shared, own = (
        tiny_scenario([60] * 40, [8] * 40, machine=small_machine(h2d=1e8, dram=dram, **fast)) for dram in (1e8, 1e15)
    )
    contended, free = (simulate(scenario, VSLPipe(), detail=detail) for scenario in (shared, own))
    moved = bound(shared, VSLPipe()).limits["DRAM bandwidth"]
    assert contended.seconds * (1 + 1e-12) >= moved > 1.2 * free.seconds


@pytest.mark.parametrize("detail", Detail)
def test_a_link_that_is_slower_than_all_else_never_waits_under_vslpipe(detail):
    """Each iteration between the first and the last takes as long as what it moves to the GPU, ends included."""
    scenario = tiny_scenario([9] * 8, [6] * 8, model=tiny_model(7), machine=small_machine(h2d=1e6))
    *_, step, _ = simulate(scenario, VSLPipe(), detail=detail).steps.seconds
    cost = prepare(scenario, VSLPipe()).cost
    weights_alone = cost.fetch(7 * cost.weights_per_layer)
    assert weights_alone <= step < 1.01 * weights_alone


def test_fewer_layers_than_the_iteration_detail_looks_at_are_exact():
    for layers in (1, 2, 3, 4):
        scenario = tiny_scenario([9] * 4, [3] * 4, model=tiny_model(layers))
        by_task, by_iteration = (simulate(scenario, VSLPipe(), detail=detail) for detail in Detail)
        assert by_iteration.seconds == pytest.approx(by_task.seconds, rel=1e-12)


def test_a_users_operation_is_priced_by_its_own_work():
    from workbench.stages import Work

    probe = Op("probe", ("x",), ("x",), work=lambda rows, model, precision: Work(1e9 * rows.tokens, 0))
    plain = fetch(weights) | gpu(qkv, attention, out_proj, moe)
    seconds = [
        simulate(tiny_scenario([10], [1], pipeline=p), Sequential()).seconds for p in (plain, plain >> gpu(probe))
    ]
    assert seconds[1] - seconds[0] == pytest.approx(4 * 10 * 1e9 / 1e11)


@pytest.mark.parametrize(
    ("scenario", "schedule", "error"),
    [
        pytest.param(tiny_scenario(pipeline=PIPELINES["all_gpu"]), VSLPipe(), ScheduleError, id="shape"),
        pytest.param(tiny_scenario(machine=small_machine(gpu_memory=1e5)), VSLPipe(), CapacityError, id="slots"),
        pytest.param(
            tiny_scenario(pipeline=gpu(qkv, attention, out_proj, moe, Op("mystery", ("x",), ("x",)))),
            Sequential(),
            ScenarioError,
            id="no work",
        ),
    ],
)
def test_what_does_not_go_together_fails_before_any_work(scenario, schedule, error):
    with pytest.raises(error):
        simulate(scenario, schedule)


def test_every_task_tells_which_other_let_it_begin():
    """On the critical path of each iteration, from its end to its begin, no second is unaccounted for."""
    result = simulate(tiny_scenario([9] * 4, [3] * 4), Sequential(), detail=Detail.TASK)
    for number in range(result.iterations):
        spans = {f"{span.lane} {span.name}": span for span in result.timeline.window(number, number + 1)}
        last = max(spans.values(), key=lambda span: span.end)
        path = last.end - last.start
        while last.after != ITERATION:
            assert spans[last.after].end == pytest.approx(last.start)
            last = spans[last.after]
            path += last.end - last.start
        assert path == pytest.approx(result.steps.seconds[number])


@pytest.mark.parametrize("detail", Detail)
def test_a_long_simulation_shows_how_many_tokens_it_has_made(detail, monkeypatch, capsys):
    monkeypatch.setattr(late_bar, "DELAY", 0.0)
    simulate(tiny_scenario(8, 4, 3), Sequential(), detail=detail)
    shown = capsys.readouterr().err
    assert "simulate" in shown
    assert "/12 " in shown


def test_a_short_simulation_shows_nothing_and_makes_no_bar(capsys):
    clock = IterationClock(prepare(tiny_scenario(8, 4, 3), Sequential()))
    clock.bar.add(12)
    assert clock.bar._bar is None
    simulate(tiny_scenario(8, 4, 3), Sequential())
    assert not capsys.readouterr().err


def test_layers_of_an_empty_part_are_skipped_no_sooner_than_their_lane_is_free():
    """One request in two micro-batches, first layers on the CPU: the empty part's tasks wait for the other's."""
    on_cpu = cpu(qkv, attention, out_proj, moe)
    on_gpu = gpu(qkv, attention, out_proj, moe)
    roomy = machine("h200-sxm", "xeon-8380", memory="4TB")
    scenario = tiny_scenario([15], [4], pipeline=on_cpu[:3] + on_gpu[3:]).on(
        model=models["qwen3-30b-a3b"],
        machine=roomy,
        memory=Memory(kv_capacity="1GB"),
    )
    each, skipping = (simulate(scenario, Overlap(), detail=detail).seconds for detail in Detail)
    assert skipping == pytest.approx(each, rel=0.01)
