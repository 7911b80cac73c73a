"""One settled iteration: who is in it, what it takes, and that it goes together with the readers."""

from itertools import pairwise

import numpy as np
import pytest

import workbench as wb
from tests.systems import GOLDEN, STREAMED, VSL
from workbench.core.errors import CapacityError, ScenarioError
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.schedules import CGOPipe, KTransformers, LayerStreaming, Schedule, Sequential, VSLPipe
from workbench.simulate import Detail, in_flight, steady, steady_rates
from workbench.stages import attention, combine, experts, moe, out_proj, qkv, route

JOB = wb.Scenario(
    VSL,
    wb.models["mixtral-8x7b"],
    wb.machines["a40"],
    wb.Memory("30GB"),
    wb.Workload.lengths(98, 128, 1),
    wb.ResourceAware(token_budget=16_000),
)


@pytest.mark.parametrize("requests, prefills", [(1, 0), (64, 0), (65, 1), (128, 1), (256, 2), (1280, 10)])
def test_requests_stand_at_evenly_spread_points_of_their_lives(requests: int, prefills: int) -> None:
    result = steady(in_flight(JOB, requests), Sequential())
    assert result.generated == requests
    assert result.processed == requests - prefills + 98 * prefills
    assert result.source is wb.Source.SIMULATED
    assert f"{98 * prefills} prefill + {requests - prefills} decode" in result.facts["iteration"]


def test_one_request_takes_as_long_as_the_weights() -> None:
    """One token has next to nothing to compute, so that streaming all experts is the whole iteration."""
    model, layer = JOB.model, fetch(experts.weights) | gpu(qkv, attention, out_proj, moe)
    weights = 2 * model.num_hidden_layers * model.num_local_experts * model.expert_params
    result = steady(in_flight(JOB.on(pipeline=layer), 1), LayerStreaming())
    assert result.seconds == pytest.approx(weights / JOB.machine.link.h2d, rel=0.01)
    assert result.utilisation["h2d"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", GOLDEN)
def test_both_details_agree(name: str) -> None:
    pipeline, schedule = GOLDEN[name]
    job = in_flight(JOB.on(pipeline=pipeline, model=wb.models["deepseek-v2-lite"]), 100)
    whole, few = (steady(job, schedule, detail=detail) for detail in (Detail.TASK, Detail.ITERATION))
    assert few.seconds == pytest.approx(whole.seconds, rel=0.01)


@pytest.mark.parametrize("schedule", [Sequential(4), VSLPipe(), CGOPipe()], ids=lambda schedule: schedule.name)
def test_timeline_is_of_this_iteration_alone(schedule: Schedule) -> None:
    result = steady(in_flight(JOB, 600), schedule)
    assert {span.iteration for span in result.timeline} == {0}
    assert result.timeline.begin >= 0
    assert result.timeline.end == pytest.approx(result.seconds, rel=0.01)
    for lane in ("gpu", "cpu", "d2h"):
        spans = sorted((s.start, s.end) for s in result.timeline if s.lane == lane)
        assert all(b >= e - 1e-12 for (_, e), (b, _) in pairwise(spans))
        assert sum(e - b for b, e in spans) == pytest.approx(result.busy[lane])


def test_a_served_stream_settles_to_it() -> None:
    """The serving loop with a paced scheduler and as many in flight makes iterations that take as long."""
    job = in_flight(JOB.on(workload=wb.Workload.lengths(8, 16, 1)), 160)
    served = wb.simulate(
        job.on(workload=wb.Workload.lengths(8, 16, 10 * 64), scheduler=wb.ResourceAware(token_budget=10 * 8 + 150)),
        VSLPipe(),
        detail=Detail.TASK,
    )
    alike = [
        seconds
        for seconds, prefill, decode in zip(
            served.steps.seconds, served.steps.prefill, served.steps.decode, strict=True
        )
        if (prefill, decode) == (80, 150)
    ]
    assert np.median(alike) == pytest.approx(steady(job, VSLPipe()).seconds, rel=0.01)


def test_in_flight_takes_requests_in_turn_and_holds_them() -> None:
    lengths = wb.Workload("two", np.array([5, 40]), np.array([4, 10]))
    held = in_flight(JOB.on(workload=lengths), 3)
    assert held.workload.prompt_len.tolist() == [5, 40, 5]
    assert held.kv_blocks == 1 + 4 + 1  # 8, 49 and 8 tokens in blocks of 16
    assert steady(held, Sequential()).generated == 3
    with pytest.raises(CapacityError, match=r"3 requests .* need 5 blocks of KV, the cache has 4"):
        steady(held.on(memory=wb.Memory(4 * 16 * 131072.0)), Sequential())
    with pytest.raises(ScenarioError, match="0 requests"):
        in_flight(JOB, 0)


def test_rates_end_where_memory_does() -> None:
    rates = steady_rates(JOB, {LayerStreaming(): STREAMED, VSLPipe(): VSL}, (64, 4096))
    assert {name: list(curve) for name, curve in rates.items()} == {"LayerStreaming": [64], "VSLPipe": [64, 4096]}
    assert rates["VSLPipe"][4096] == pytest.approx(steady(in_flight(JOB, 4096), VSLPipe()).gen_tok_s, rel=0.01)


def test_rate_of_few_is_the_mean_of_iterations_with_a_prompt_and_without() -> None:
    layer = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    job, schedule = JOB.on(pipeline=layer), KTransformers()
    begins, runs = (steady(in_flight(job, 32), schedule, phase=phase) for phase in (0.0, 0.5))
    assert (begins.processed, runs.processed) == (31 + 98, 32)
    assert begins.seconds > 1.5 * runs.seconds
    (rate,) = steady_rates(job, {schedule: layer}, [32])[schedule.name].values()
    assert rate == pytest.approx(32 / (0.25 * begins.seconds + 0.75 * runs.seconds), rel=0.01)
