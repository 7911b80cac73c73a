"""Overlap: an order for any wiring, about as good as those of the schedules that were made for one."""

from dataclasses import replace
from statistics import median

import pytest

from tests.builders import every_wiring, tiny_scenario
from tests.examples import DEEP
from tests.systems import LIGHTNING, MIXED, PIPELINES, STREAMED, VSL
from workbench.core.errors import ScheduleError
from workbench.hardware import Machine, machines
from workbench.hardware.assembly import machine
from workbench.models import models
from workbench.perfmodels import bound
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.scenario import Memory, Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Overlap, Sequential, Step, contenders
from workbench.serving import prepare
from workbench.simulate import Detail, in_flight, simulate, steady
from workbench.stages import (
    attention,
    combine,
    decode_attention,
    experts,
    out_proj,
    prefill_attention,
    qkv,
    route,
    weights,
)
from workbench.workload import Workload

EXPERTS_ON_CPU = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
OPTIONS = [Overlap(parts, slots) for parts in (1, 2, 4, 8) for slots in (2, 3)]


def with_room(host: Machine) -> Machine:
    """The machine with memories that hold everything."""
    return replace(host, gpu=replace(host.gpu, memory=1e13), cpu=replace(host.cpu, memory=1e13))


HOSTS = {
    "a40": with_room(machines["a40"]),
    "rtx-5090": with_room(machine(gpu="rtx-5090", cpu="xeon-8380", memory="256GB")),
}
SETTINGS = [
    ("mixtral-8x7b", "a40", 98, 128, 8192),
    ("mixtral-8x7b", "a40", 98, 128, 512),
    ("qwen3-30b-a3b", "rtx-5090", 500, 100, 256),
    ("gpt-oss-120b", "rtx-5090", 1000, 50, 2048),
    ("deepseek-v2-lite", "rtx-5090", 700, 30, 700),
    ("deepseek-v3", "a40", 300, 300, 16),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_best_options_are_as_good_as_the_schedules_made_for_a_pipeline(setting: tuple) -> None:
    """A settled iteration of models that were not tuned for, under every schedule that takes each pipeline."""
    model, host, prompt, output, requests = setting
    for pipeline in (VSL, LIGHTNING, STREAMED, PIPELINES["flexgen_s4"], EXPERTS_ON_CPU):
        memory, lengths = Memory(kv_capacity="70GB"), Workload.lengths(prompt, output, 1)
        one = Scenario(pipeline, models[model], HOSTS[host], memory, lengths, ResourceAware(token_budget=16_000))
        of = in_flight(one, requests)
        named = [schedule for schedule in contenders(pipeline) if not isinstance(schedule, Overlap)]
        seconds = {each: steady(of, each, detail=Detail.ITERATION).seconds for each in (*named, *OPTIONS)}
        best = min(seconds[each] for each in OPTIONS)
        assert best <= min(seconds[each] for each in named) / 0.98, str(pipeline)


def test_every_wiring_is_no_slower_than_with_prefetch_alone() -> None:
    """A fifth of all 408 unless asked for all, on a small machine."""
    wirings = list(every_wiring())
    assert len(wirings) == 408
    ratios = []
    for pipeline in wirings[:: 1 if DEEP else 5]:
        of = tiny_scenario(30, 12, 40, pipeline=pipeline, blocks=200)
        plain = simulate(of, Sequential(prefetch=True)).seconds
        least = min(simulate(of, Overlap(parts)).seconds for parts in (1, 2, 4))
        assert least >= bound(of, Overlap()).seconds * (1 - 1e-9), str(pipeline)
        ratios.append(plain / least)
    assert min(ratios) >= 1 - 1e-9
    assert median(ratios) > 1


ATTENDING = [
    gpu(qkv) >> offload >> cpu(prefill_attention) >> load >> gpu(decode_attention, out_proj, route),
    gpu(qkv) >> offload >> cpu(attention) >> load >> gpu(out_proj, route),
    gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, route),
]


class InItsOwnOrder(Overlap):
    others = ()


@pytest.mark.parametrize("attending", ATTENDING, ids=str)
def test_prefetch_alone_is_followed_where_weights_on_their_way_slow_the_cpu_down_less(attending: Pipeline) -> None:
    """One micro-batch has nothing else to gain; in its own order all weights come beside attention or the experts."""
    pipeline = fetch(weights) | attending >> offload >> cpu(experts) >> load >> gpu(combine)
    memory, lengths = Memory(kv_capacity="30GB"), Workload.lengths(500, 100, 256)
    of = Scenario(pipeline, models["qwen3-30b-a3b"], HOSTS["rtx-5090"], memory, lengths, ResourceAware(8_000))
    plain = Sequential(prefetch=True)
    assert prepare(of, Overlap(1)).lowering.followed == plain
    seconds = simulate(of, plain).seconds
    assert simulate(of, Overlap(1)).seconds == seconds
    assert simulate(of, InItsOwnOrder(1)).seconds > seconds


def test_its_own_order_is_followed_where_micro_batches_gain() -> None:
    of = tiny_scenario(30, 12, 40, blocks=200)
    assert prepare(of, Overlap()).lowering.followed == Overlap()


def test_the_order_follows_the_prices_of_the_typical_batch() -> None:
    """What can begin first depends on the machine."""
    slow = tiny_scenario(30, 12, 40, blocks=200, pipeline=Overlap.example)
    rates = tuple((dtype, 1e6 * rate) for dtype, rate in slow.machine.cpu.flops)
    fast_cpu = replace(slow.machine.cpu, bandwidth=1e15, flops=rates)
    fast = slow.on(machine=replace(slow.machine, cpu=fast_cpu))
    first, second = ([task.name for task in prepare(of, Overlap(3)).lowering.tasks(Step.MIDDLE)] for of in (slow, fast))
    assert sorted(first) == sorted(second)
    assert first != second


def test_both_clocks_and_every_reader_have_one_order() -> None:
    of = tiny_scenario(30, 12, 40, blocks=200, pipeline=Overlap.example)
    first, second = (prepare(of, Overlap(3)).lowering.tasks(Step.MIDDLE) for _ in range(2))
    assert first == second


def test_deferred_experts_are_awaited_by_the_next_layers_experts() -> None:
    """Their lane alone no longer keeps that order."""
    late = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1) >> load >> gpu(combine)
    tasks = Overlap(2).lower(late, MIXED).tasks
    names = [task.name for task in tasks]
    for task in tasks:
        if task.name in ("C1a", "C1b"):
            assert f"D0{task.name[-1]}" in [names[other] for other in task.after]


@pytest.mark.parametrize("schedule", [Overlap(), Overlap(weight_slots=3), Overlap(1, 4)], ids=str)
@pytest.mark.parametrize("detail", Detail)
def test_weights_never_stream_two_at_once(schedule: Overlap, detail: Detail) -> None:
    """Nothing else is on the link, and no transfer waits for the one before it but in the lane."""
    host = with_room(machines["a40"])
    lengths, scheduler = Workload.lengths(98, 32, 1000), ResourceAware()
    of = Scenario(STREAMED, models["mixtral-8x7b"], host, Memory(kv_capacity="20GB"), lengths, scheduler)
    result = simulate(of, schedule, detail=detail)
    assert result.busy["h2d"] <= result.seconds
    assert bound(of, schedule).seconds <= result.seconds


@pytest.mark.parametrize("slots", [1, 0, 2.5, "two"])
def test_slots_that_cannot_be_are_refused(slots: object) -> None:
    with pytest.raises(ScheduleError, match="weight_slots must be at least 2"):
        Overlap(weight_slots=slots)
