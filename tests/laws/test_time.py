"""Law 3: what is bounded is never beaten. Law 7: the same again gives the same. Both details of time agree."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.builders import scenarios, small_machine, streaming, tiny_model, tiny_scenario
from tests.examples import examples
from tests.systems import PIPELINES, VSL
from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels import bound
from workbench.pipeline import Pipeline
from workbench.scenario import Memory
from workbench.schedules import Sequential, VSLPipe
from workbench.simulate import Detail, simulate

RESIDENT = Pipeline(VSL.chain)
FAST = {"gpu": 1e15, "hbm": 1e15, "cpu": 1e15, "dram": 1e15, "h2d": 1e15, "d2h": 1e15}


def preempting(**slow: float):
    """Two of four requests are preempted once, so two decodes become part of a longer prefill."""
    machine = small_machine(**FAST | slow)
    return tiny_scenario([4] * 4, [4] * 4, blocks=10, block=2, pipeline=RESIDENT, machine=machine), Sequential()


def tiny_prefills(name: str):
    """Iterations of one prefill token and no decode."""
    machine = small_machine(**FAST | {"hbm": 1e6, "dram": 1e6})
    return tiny_scenario([1] * 3, [1] * 3, blocks=1, block=1, pipeline=PIPELINES[name], machine=machine), Sequential()


@examples(100)
@given(scenarios(), st.sampled_from(Detail))
@example(tiny_prefills("all_gpu"), Detail.TASK)
@example(tiny_prefills("all_cpu"), Detail.TASK)
@example(preempting(cpu=1e5), Detail.TASK)
@example(preempting(dram=1e5), Detail.TASK)
@example(preempting(h2d=1e4), Detail.TASK)
@example(preempting(d2h=1e4), Detail.TASK)
def test_no_simulation_beats_the_bound(case, detail):
    scenario, schedule = case
    least = bound(scenario, schedule)
    simulated = simulate(scenario, schedule, detail=detail)
    assert least.seconds <= simulated.seconds * (1 + 1e-9)
    assert least.iterations <= simulated.iterations
    assert least.gen_tok_s * (1 + 1e-9) >= simulated.gen_tok_s


@examples(30)
@given(scenarios(), st.sampled_from(Detail))
def test_the_same_scenario_gives_the_identical_timeline_and_steps(case, detail):
    scenario, schedule = case
    once, again = (simulate(scenario, schedule, detail=detail) for _ in range(2))
    assert [span[:5] for span in once.timeline] == [span[:5] for span in again.timeline]
    assert once.steps == again.steps
    assert (once.seconds, once.busy, once.ttft) == (again.seconds, again.busy, again.ttft)


@examples(50)
@given(scenarios(layers=st.integers(4, 24)))
def test_few_layers_tell_the_time_of_all_within_one_percent(case):
    scenario, schedule = case
    by_task, by_iteration = (simulate(scenario, schedule, detail=detail) for detail in (Detail.TASK, Detail.ITERATION))
    assert by_iteration.seconds == pytest.approx(by_task.seconds, rel=0.01)
    assert by_iteration.steps.prefill == by_task.steps.prefill
    for lane, busy in by_task.busy.items():
        assert by_iteration.busy[lane] == pytest.approx(busy, rel=0.01)


@examples(25)
@given(scenarios(layers=st.integers(4, 12)))
def test_each_iteration_is_as_long_in_both_details(case):
    scenario, schedule = case
    by_task, by_iteration = (simulate(scenario, schedule, detail=detail) for detail in (Detail.TASK, Detail.ITERATION))
    assert by_iteration.steps.seconds == pytest.approx(by_task.steps.seconds, rel=0.01)


def slowed_by_its_link(slots: int):
    """Small transfers wait for whole weights, which are one packet."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    scenario = tiny_scenario(49, 6, 6, model=tiny_model(24, num_experts_per_tok=3, **sizes), token_budget=64)
    return scenario.on(machine=machines["moe-cap-a6000"], memory=Memory(kv_capacity="1GB")), VSLPipe(weight_slots=slots)


def agree(scenario, schedule):
    """Both details take as long in every iteration and overall, as the lanes do, and no less than the bound."""
    by_task, by_iteration = (simulate(scenario, schedule, detail=detail) for detail in (Detail.TASK, Detail.ITERATION))
    assert by_iteration.seconds == pytest.approx(by_task.seconds, rel=0.01)
    assert by_iteration.steps.seconds == pytest.approx(by_task.steps.seconds, rel=0.01)
    assert by_iteration.busy == pytest.approx(by_task.busy, rel=0.01)
    assert bound(scenario, schedule).seconds <= min(by_task.seconds, by_iteration.seconds) * (1 + 1e-9)


@examples(60)
@given(streaming(layers=st.integers(5, 40)))
@example(slowed_by_its_link(2))
@example(slowed_by_its_link(3))
def test_deep_stacks_and_links_as_fast_as_what_they_feed_take_as_long_in_both_details(case):
    agree(*case)


@examples(40)
@given(scenarios())
def test_a_lane_is_never_busier_than_the_run_is_long(case):
    scenario, schedule = case
    result = simulate(scenario, schedule, detail=Detail.TASK)
    assert all(busy <= result.seconds * (1 + 1e-9) for busy in result.busy.values())
    spans = {
        lane: sorted((s.start, s.end) for s in result.timeline if s.lane == lane) for lane in ("gpu", "cpu", "d2h")
    }
    for ordered in spans.values():
        slack = result.seconds * 1e-12
        assert all(later[0] >= earlier[1] - slack for earlier, later in pairwise(ordered))


@pytest.mark.parametrize("name", models)
def test_every_model_of_the_catalogue_is_bounded_and_simulated(name):
    a40 = machines["a40"]
    roomy = replace(a40, gpu=replace(a40.gpu, memory=1e12), cpu=replace(a40.cpu, memory=1e13))
    scenario = tiny_scenario([300, 20, 150], [30, 60, 1], model=models[name], machine=roomy, blocks=200)
    least = bound(scenario, VSLPipe())
    by_task, by_iteration = (simulate(scenario, VSLPipe(), detail=detail) for detail in Detail)
    assert least.seconds <= min(by_task.seconds, by_iteration.seconds) * (1 + 1e-9)
    assert by_iteration.seconds == pytest.approx(by_task.seconds, rel=0.01)
    assert ("layers" in least.facts, "windows" in least.facts) == (
        models[name].dense_layers > 0,
        models[name].windowed_layers > 0,
    )


def test_a_deep_model_is_read_off_few_layers():
    scenario = tiny_scenario([20] * 30, [6] * 30, model=tiny_model(80), blocks=60, machine=small_machine(h2d=1e9))
    by_task, by_iteration = (simulate(scenario, VSLPipe(1e-4), detail=detail) for detail in Detail)
    assert by_iteration.seconds == pytest.approx(by_task.seconds, rel=1e-3)
