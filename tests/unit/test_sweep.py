"""Predictions over KV capacities, and their picture."""

import sys

import pytest

from tests.builders import tiny_scenario
from tests.systems import STREAMED
from workbench.analysis.sweep import sweep
from workbench.core.errors import ScenarioError, ScheduleError
from workbench.core.result import Source
from workbench.core.timeline import Span, Timeline
from workbench.perfmodels import bound
from workbench.plots import middle, plot_lanes
from workbench.schedules import Sequential, VSLPipe
from workbench.simulate import Detail, simulate

SCHEDULES = (Sequential(), VSLPipe())


def capacity(scenario, blocks: int) -> float:
    """Bytes of so many KV blocks."""
    return blocks * scenario.memory.kv_block * scenario.model.kv_bytes_per_token("bf16")


def test_every_point_is_what_the_readers_say():
    scenario = tiny_scenario(8, 4, 12, blocks=6)
    (point,) = sweep(scenario, SCHEDULES, kv_capacity=[capacity(scenario, 6)]).points
    read = [bound(scenario, SCHEDULES[0]), *(simulate(scenario, schedule) for schedule in SCHEDULES)]
    assert [result.gen_tok_s for result in point.results] == [result.gen_tok_s for result in read]


def test_more_cache_never_lowers_the_bound():
    scenario = tiny_scenario(8, 4, 12)
    found = sweep(scenario, SCHEDULES, kv_capacity=[capacity(scenario, blocks) for blocks in (3, 6, 12, 24, 48)])
    bounds = [point.results[0].gen_tok_s for point in found.points]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1]


def test_a_capacity_that_cannot_serve_says_why_and_the_others_stand():
    scenario = tiny_scenario(8, 4, 2)
    small, enough = sweep(scenario, SCHEDULES, kv_capacity=[capacity(scenario, 2), capacity(scenario, 3)]).points
    assert small.results == ()
    assert "needs a KV cache of 11 tokens" in small.problem
    assert len(enough.results) == 3
    assert not enough.problem


def test_a_schedule_that_does_not_take_the_pipeline_spoils_nothing():
    scenario = tiny_scenario(8, 4, 2, pipeline=STREAMED)
    found = sweep(scenario, (VSLPipe(), Sequential()), kv_capacity="1MB")
    (point,) = found.points
    assert [result.schedule for result in point.results] == ["Sequential", "Sequential"]
    ((name, why),) = point.refused
    assert name == "VSLPipe"
    assert "does not take this pipeline: its layers are fetch(weights) | gpu(...)" in why
    assert found.to_pandas()["problem"].tolist()[-1] == why
    with pytest.raises(ScheduleError, match="VSLPipe does not take this pipeline"):
        sweep(scenario, VSLPipe(), kv_capacity="1MB")


def test_what_no_capacity_mends_is_raised():
    scenario = tiny_scenario(8, 4, 2)
    for wrong in (["VSLPipe"], [], VSLPipe, None):
        with pytest.raises(ScenarioError, match=r"schedules, such as \[Sequential\(prefetch=True\), VSLPipe\(\)\]"):
            sweep(scenario, wrong, kv_capacity=["1MB"])


def test_one_schedule_and_one_capacity_make_a_sweep_too():
    scenario = tiny_scenario(8, 4, 2)
    (one,) = sweep(scenario, VSLPipe(), kv_capacity="1MB").points
    (same,) = sweep(scenario, (schedule for schedule in [VSLPipe()]), kv_capacity=[1e6]).points
    assert [result.seconds for result in one.results] == [result.seconds for result in same.results]


def test_every_capacity_is_read_before_the_first_simulation(monkeypatch):
    monkeypatch.setattr(sys.modules["workbench.analysis.sweep"], "simulate", None)
    with pytest.raises(ValueError, match="kv_capacity"):
        sweep(tiny_scenario(8, 4, 2), VSLPipe(), kv_capacity=["1MB", "-3"])


def test_table_and_picture_hold_every_result():
    scenario = tiny_scenario(8, 4, 6)
    found = sweep(scenario, SCHEDULES, kv_capacity=[capacity(scenario, blocks) for blocks in (2, 6, 12)])
    table = found.to_pandas()
    assert list(table.columns[:3]) == ["kv_capacity", "source", "schedule"]
    assert len(table) == len(found.pairs()) == 6
    labels = {line.get_label(): line for line in found.plot().lines}
    assert set(labels) == {"bound", "Sequential, simulated", "VSLPipe, simulated"}
    simulated = table[(table.source == "simulated") & (table.schedule == "VSLPipe")]
    assert list(labels["VSLPipe, simulated"].get_ydata()) == list(simulated.gen_tok_s)


def test_lane_charts_share_one_time_axis():
    scenario = tiny_scenario(8, 4, 6)
    results = [simulate(scenario, schedule, detail=Detail.TASK) for schedule in SCHEDULES]
    axes = plot_lanes(results)
    assert [ax.get_title(loc="left").partition(",")[0] for ax in axes] == [
        f"{Source.SIMULATED.value}: {result.schedule}" for result in results
    ]
    longest = max(result.timeline.window(*middle(results[0].timeline)).seconds for result in results)
    assert {ax.get_xlim() for ax in axes} == {(0, longest)}


@pytest.mark.parametrize(("iterations", "expected"), [(0, (0, 1)), (1, (0, 1)), (2, (0, 2)), (5, (1, 3)), (10, (4, 6))])
def test_middle_lies_within_the_run(iterations, expected):
    assert middle(Timeline([Span("gpu", "A0", i, i + 1, i) for i in range(iterations)])) == expected
