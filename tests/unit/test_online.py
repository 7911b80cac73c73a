"""Requests that arrive: who sees them when, what they wait for, and what is told of it."""

import json
import math

import numpy as np
import pytest

from tests.builders import open_queue, small_machine, tiny_model, tiny_scenario
from tests.systems import PIPELINES
from workbench.analysis.sustained import sustained_rate
from workbench.core.errors import WorkloadError
from workbench.core.latency import Latencies, Slo, attainment
from workbench.core.result import Result
from workbench.perfmodels import bound
from workbench.perfmodels.coverage import measured_coverage, routed, skewed, uniform
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.resource_aware import ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import Sequential
from workbench.simulate import Detail, simulate
from workbench.workload import Workload

ALL = [ResourceAware(token_budget=50), StaticBatching(), ContinuousBatching(50), ChunkedPrefill(9), LayeredPrefill(9)]


def online(at, prompt, output, scheduler=None, **options):
    scenario = tiny_scenario(prompt, output, pipeline=PIPELINES["all_gpu"], scheduler=scheduler, **options)
    return scenario.on(workload=scenario.workload.arriving(at=at))


# ----------------------------------------------------------------------------------------------------------- arrivals


def test_poisson_arrivals_have_their_rate_and_are_drawn_by_the_seed():
    workload = Workload.lengths(3, 3, 20_000)
    once, again, other = (workload.arriving(rate=4.0, seed=seed).arrival for seed in (1, 1, 2))
    gaps = np.diff(once)
    assert once.tolist() == again.tolist() != other.tolist()
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    assert "arriving within" in str(workload.arriving(at=range(20_000)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "either a rate"),
        ({"rate": 1.0, "at": [0, 1]}, "either a rate"),
        ({"rate": 0}, "positive number of requests per second"),
        ({"at": [0]}, "1 arrivals of 2 requests"),
        ({"at": [1, 0]}, "ascending order"),
        ({"at": [-1, 0]}, "seconds from 0 on"),
        ({"at": [0, math.nan]}, "ascending order"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(given, words):
    with pytest.raises(WorkloadError, match=words):
        Workload.lengths(3, 3, 2).arriving(**given)


def test_a_file_may_say_when_requests_arrive(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": [1, 2], "arrival": at}) for at in (0.5, 2)), encoding="utf-8")
    assert Workload.from_jsonl(path).arrival.tolist() == [0.5, 2.0]
    path.write_text(path.read_text(encoding="utf-8") + '\n{"tokens": [1]}', encoding="utf-8")
    with pytest.raises(WorkloadError, match="2 arrivals of 3 requests"):
        Workload.from_jsonl(path)


@pytest.mark.parametrize("scheduler", ALL, ids=repr)
def test_a_queue_serves_who_was_added(scheduler):
    budget = scheduler.token_budget or 50
    queue, memory = open_queue([3, 3, 3], [2] * 3, blocks=50, block=4, budget=budget, scheduler=scheduler, there=0)
    assert queue.next() is None
    queue.add(np.array([0, 1]), np.array([3, 3]), np.array([2, 2]))
    batch = queue.next()
    assert batch.prefills.tolist() == [0, 1]
    assert not queue.ends_with(batch)
    queue.complete(batch)
    while (batch := queue.next()) is not None:
        assert 2 not in batch.requests
        queue.complete(batch)
    for further in (2, 3, 6):  # the workload has three
        queue.add(np.array([further]), np.array([3]), np.array([2]))
    served = set()
    while (batch := queue.next()) is not None:
        served |= set(batch.requests.tolist())
        queue.complete(batch)
    assert served == {2, 3, 6}
    assert (memory.free, len(memory.table)) == (50, 7)


@pytest.mark.parametrize("detail", Detail)
@pytest.mark.parametrize("scheduler", ALL, ids=repr)
def test_the_clock_waits_for_the_next_arrival_and_latencies_begin_there(scheduler, detail):
    """Far apart, every request is served alone: as fast as the first, and nothing is done in between."""
    result = simulate(online([7.0, 1000.0, 2000.0], [5] * 3, [4] * 3, scheduler), Sequential(), detail=detail)
    alone = simulate(online([0.0], [5], [4], scheduler), Sequential(), detail=detail)
    assert result.latencies.ttft == pytest.approx([alone.ttft] * 3)
    assert result.latencies.end_to_end == pytest.approx([alone.seconds] * 3)
    assert result.seconds == pytest.approx(2000 + alone.seconds)
    assert sum(result.steps.seconds) == pytest.approx(3 * alone.seconds)
    assert result.ttft == pytest.approx(alone.ttft)


@pytest.mark.parametrize("scheduler", ALL, ids=repr)
def test_all_at_once_is_offline(scheduler):
    scenario = tiny_scenario([5, 9, 3], [4, 2, 6], pipeline=PIPELINES["all_gpu"], scheduler=scheduler)
    arriving = scenario.on(workload=scenario.workload.arriving(at=[0, 0, 0]))
    once, other = (simulate(each, Sequential()) for each in (scenario, arriving))
    assert (once.steps, once.latencies) == (other.steps, other.latencies)
    assert bound(arriving, Sequential()).seconds <= other.seconds


# ---------------------------------------------------------------------------------------------------------- latencies


def test_latencies_by_hand():
    seen = Latencies((0, 2), (0.0, 1.0), (2.0, 4.0), (5.0, 4.0), (2.0, 0.0), (1.0, 2.0), (1, 1))
    assert seen.ttft.tolist() == [2, 3]
    assert seen.end_to_end.tolist() == [5, 3]
    assert seen.tbt.tolist() == [1, 2]
    assert seen.summary()["tbt"] == {"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": pytest.approx(1.99)}
    assert [seen.attainment(Slo(*slo)) for slo in ((3, 2), (2.5, 2), (3, 1.5), (1, 9))] == [1, 0.5, 0.5, 0]
    assert Latencies().summary() == {}


def test_gaps_of_a_preempted_request_hold_the_time_it_waited():
    result = simulate(tiny_scenario([8] * 6, [5] * 6, blocks=9, pipeline=PIPELINES["all_gpu"]), Sequential())
    assert result.preemptions > 0
    seen = result.latencies
    assert sum(seen.gap_count) == 6 * 4
    assert max(seen.gap) == max(seen.worst_gap) > 2 * min(seen.gap)
    assert seen.tbt.sum() == pytest.approx(sum(np.subtract(seen.last, seen.first)))


def test_gaps_are_iterations_where_nobody_is_preempted():
    result = simulate(tiny_scenario([4], [3]), Sequential())
    assert result.latencies.tbt.tolist() == pytest.approx(sorted(result.steps.seconds[1:]))
    assert result.latencies.worst_gap[0] == pytest.approx(max(result.steps.seconds[1:]))


def test_prefill_first_makes_decodes_wait_and_chunks_do_not():
    """What chunked prefill is for: a late long prompt between the tokens of who decodes."""
    at, prompt, output = [0.0, 1e-4], [4, 400], [12, 2]
    machine = small_machine(gpu=1e9)
    first, chunked = (
        simulate(online(at, prompt, output, scheduler, machine=machine), Sequential())
        for scheduler in (ContinuousBatching(500), ChunkedPrefill(20))
    )
    assert first.latencies.worst_gap[0] > 3 * chunked.latencies.worst_gap[0]
    assert first.latencies.ttft[1] < chunked.latencies.ttft[1]


def test_attainment_asks_for_the_first_token_and_every_gap():
    assert attainment([1, 1, 6], [0.1, 0.2, 0.1], Slo(5, 0.125)) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="worst_gap must be at least 0"):
        attainment([1], [-1], Slo(1, 1))


def test_the_sustained_rate_is_where_attainment_falls_below_the_target():
    scenario = tiny_scenario([30] * 40, [5] * 40, pipeline=PIPELINES["all_gpu"], scheduler=ContinuousBatching(60))
    alone = simulate(online([0.0], [30], [5], ContinuousBatching(60)), Sequential())
    slo = Slo(5 * alone.ttft, 10 * max(alone.latencies.worst_gap))
    low, high = 0.02 / alone.seconds, 50 / alone.seconds
    found = sustained_rate(scenario, Sequential(), slo, low=low, high=high, seeds=range(2))

    def attained(rate):
        each = (scenario.on(workload=scenario.workload.arriving(rate=rate, seed=seed)) for seed in range(2))
        return np.mean([simulate(one, Sequential()).attainment(slo) for one in each])

    assert low < found < high
    assert attained(found) >= 0.9 > attained(found + (high - low) / 50)
    with pytest.raises(ValueError, match="do not bracket"):
        sustained_rate(scenario, Sequential(), slo, low=low, high=2 * low, seeds=[0])


@pytest.mark.parametrize("wrong", [0, -1, math.nan, "a", None, True])
def test_an_objective_is_made_of_positive_seconds(wrong):
    with pytest.raises(ValueError, match=f"ttft of an Slo must be positive, not {wrong!r}; give seconds"):
        Slo(wrong, 1)
    with pytest.raises(ValueError, match=f"tbt of an Slo must be positive, not {wrong!r}; give seconds"):
        Slo(1, wrong)


def test_an_objective_may_leave_a_time_open():
    assert attainment([1], [9], Slo(np.float32(1), math.inf)) == 1


@pytest.mark.parametrize("slo", [(10, 1), None, 10])
def test_the_share_that_meets_no_objective_is_refused(slo):
    result = simulate(tiny_scenario([4], [3]), Sequential())
    with pytest.raises(ValueError, match=r"slo must be an objective, not .*; give wb\.Slo\(ttft=\.\.\., tbt=\.\.\.\)"):
        result.attainment(slo)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"slo": (10, 5)}, r"slo must be an objective, not \(10, 5\); give wb\.Slo"),
        ({"low": 1, "high": 0.1}, "low must be below high, not 1 and 0.1; give rates"),
        ({"low": 1, "high": 1}, "low must be below high"),
        ({"low": math.nan}, "low must be below high"),
        ({"seeds": []}, r"seeds must be whole numbers from 0 on, at least one, not \[\]; give such as range"),
        ({"seeds": 3}, "at least one, not 3; give"),
        ({"seeds": [0, -1]}, r"not \[0, -1\]; give"),
        ({"seeds": [0.5]}, r"not \[0\.5\]; give"),
        ({"seeds": "01"}, "not '01'; give"),
    ],
)
def test_a_search_for_the_sustained_rate_that_cannot_be_is_refused_before_anything_is_simulated(
    monkeypatch, given, words
):
    monkeypatch.setattr("workbench.analysis.sustained.simulate", lambda *_: pytest.fail("simulated"))
    options = {"slo": Slo(1, 1), "low": 1, "high": 2} | given
    with pytest.raises(ValueError, match=words):
        sustained_rate(tiny_scenario([4], [3]), Sequential(), **options)


# ------------------------------------------------------------------------------------- what is read, and what it takes


def test_latencies_energy_and_expert_bytes_are_kept_in_the_file(tmp_path):
    result = simulate(online([0, 1], [5, 9], [4, 2], ChunkedPrefill(4)), Sequential())
    again = Result.load(result.save(tmp_path / "r.json"))
    assert (again.latencies, again.steps, again.energy) == (result.latencies, result.steps, result.energy)
    assert again.attainment(Slo(9, 9)) == 1.0
    assert result.to_dict(timeline=False)["latencies"]["request"] == ()


def test_the_energy_of_a_simulation_is_a_models_and_says_so():
    result = simulate(tiny_scenario([8] * 4, [4] * 4), Sequential())
    assert result.energy.source.startswith("model (constants of two H100")
    assert result.energy.joules > 450 * result.seconds
    assert bound(tiny_scenario([8], [4]), Sequential()).energy is None


def test_modelled_energy_is_that_of_time_of_bytes_read_and_of_operations():
    """One prompt of 8 and 3 decodes, which read 9 + 10 + 11 KV entries; 450 W, 80 pJ per byte and 1 pJ per FLOP."""
    scenario = tiny_scenario([8], [4])
    model = scenario.model
    result = simulate(scenario, Sequential())
    kv = 30 * 4 * 2 * 2 * 16 * 2  # layers, keys and values, heads, numbers, bytes
    read = sum(result.steps.expert_bytes) + kv + 4 * model.always_bytes
    moving = result.energy.joules - 450 * result.seconds - 1e-12 * 2 * model.active_params * 11
    assert moving == pytest.approx(80e-12 * read)


def test_layered_prefill_reads_experts_of_its_group_for_all_tokens_and_of_the_others_for_decodes():
    """FULL (f c(nd + L) + (1 - f) c(nd)), SPEC 7."""
    model = routed(tiny_model(4, num_local_experts=32), skewed(32, 2))
    scenario = tiny_scenario([2, 16], [9, 2], model=model, pipeline=PIPELINES["all_gpu"], scheduler=LayeredPrefill(8))
    full, touched = model.routed_bytes, lambda tokens: model.touched_experts(tokens) / 32
    steps = simulate(scenario, Sequential()).steps
    assert steps.prefill[:3] == (2, 0, 16)  # told when they pass the last layer
    assert steps.expert_bytes[:3] == pytest.approx([full * touched(2), *[full / 2 * (touched(17) + touched(1))] * 2])


def test_chunked_prefill_reads_experts_once_per_chunk():
    model = tiny_model(4, num_local_experts=32)
    scenario = tiny_scenario([64], [1], model=model, pipeline=PIPELINES["all_gpu"], scheduler=ChunkedPrefill(16))
    assert sum(simulate(scenario, Sequential()).steps.expert_bytes) == pytest.approx(
        4 * model.routed_bytes * model.touched_experts(16) / 32
    )


def test_a_routing_is_priced_by_every_reader():
    flat = tiny_model(4, num_local_experts=32)
    even, uneven = (routed(flat, coverage(32, 2)) for coverage in (uniform, skewed))
    for tokens in (0, 0.5, 1, 2, 64, 2**17, 2**18):
        assert even.touched_experts(tokens) == pytest.approx(flat.touched_experts(tokens), rel=0.05)
    assert uneven.touched_experts(16) < 0.8 * flat.touched_experts(16)
    times = [simulate(tiny_scenario([2] * 4, [9] * 4, model=m), Sequential()).seconds for m in (flat, uneven)]
    assert times[1] < times[0]
    table = routed(flat, measured_coverage)
    assert table.touched_experts(32) / 32 == pytest.approx(0.547)
