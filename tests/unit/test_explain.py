"""The difference between a run and its simulation, by cause: nothing is lost and nothing counted twice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import scenarios, tiny_scenario
from tests.examples import examples
from workbench.analysis.explain import beyond_bound, explain, in_words, lane_of, residual
from workbench.core.result import Source
from workbench.core.timeline import Span, Timeline
from workbench.perfmodels import bound
from workbench.schedules import Sequential
from workbench.simulate import Detail, simulate

SIMULATED = simulate(tiny_scenario(8, 1, 1), Sequential(), detail=Detail.TASK)


def result(source: Source, seconds: float, *spans: Span):
    busy = {lane: sum(s.end - s.start for s in spans if s.lane == lane) for lane in ("gpu", "cpu", "d2h", "h2d")}
    return replace(SIMULATED, source=source, seconds=seconds, busy=busy, timeline=Timeline(list(spans)))


def test_each_cause_gets_its_seconds():
    simulated = result(
        Source.SIMULATED,
        10.0,
        Span("gpu", "A", 0.0, 4.0, 0),
        Span("cpu", "C", 4.0, 5.0, 0),
        Span("gpu", "B", 5.0, 9.0, 0),
    )
    measured = result(
        Source.MEASURED,
        15.0,
        Span("gpu", "A", 0.0, 5.0, 0, 4.5),  # half a second more work, half a second without its core
        Span("cpu", "C", 5.0, 8.0, 0, 3.0),  # the gpu lane waits two seconds longer
        Span("gpu", "B", 8.0, 12.0, 0, 4.0),  # and two more seconds pass between iterations
    )
    assert residual(measured, simulated) == {
        "gpu work": pytest.approx(0.5),
        "core taken from gpu": pytest.approx(0.5),
        "between iterations": pytest.approx(2.0),
        "gpu waiting": pytest.approx(2.0),
    }


@examples(25)
@given(scenarios(), st.floats(0.5, 2.0), st.floats(0.0, 1.0))
def test_the_causes_add_up_to_the_whole_difference(case, stretch, own):
    scenario, schedule = case
    simulated = simulate(scenario, schedule, detail=Detail.TASK)
    spans = [
        s._replace(start=s.start * stretch, end=s.end * stretch, cpu=(s.end - s.start) * own)
        for s in simulated.timeline
    ]
    measured = replace(
        simulated, source=Source.MEASURED, seconds=simulated.seconds * stretch + 1.0, timeline=Timeline(spans)
    )
    causes = residual(measured, simulated)
    assert sum(causes.values()) == pytest.approx(measured.seconds - simulated.seconds, abs=1e-9)
    assert sum(residual(simulated, simulated).values()) == pytest.approx(0.0, abs=1e-12)


@examples(40)
@given(scenarios())
def test_what_lies_beyond_the_bound_is_work_and_waiting_of_the_lane_that_sets_it(case):
    scenario, schedule = case
    simulated, least = simulate(scenario, schedule), bound(scenario, schedule)
    causes = beyond_bound(simulated, least)
    assert sum(causes.values()) == pytest.approx(simulated.seconds - least.seconds, abs=1e-9 + 1e-9 * simulated.seconds)
    lane = lane_of(least.binding)
    assert not lane or list(causes) == [f"{lane} work beyond the least", f"{lane} waiting"]
    assert list(causes.values())[1] >= -1e-9 * simulated.seconds


@pytest.mark.parametrize(
    ("binding", "lane", "words"),
    [
        ("h2d link", "h2d", "the link to the GPU (h2d)"),
        ("d2h", "d2h", "the link to the host (d2h)"),
        ("gpu compute", "gpu", "the GPU"),
        ("cpu", "cpu", "the CPU"),
        ("KV memory", "", "KV memory"),
        ("cores that both lanes share", "", "cores that both lanes share"),
    ],
)
def test_what_binds_is_said_in_words(binding, lane, words):
    assert (lane_of(binding), in_words(binding)) == (lane, words)


def test_what_rounding_leaves_is_not_told_and_large_numbers_are_whole():
    least = replace(SIMULATED, source=Source.BOUND, seconds=SIMULATED.seconds / 300, iterations=1)
    played = replace(SIMULATED, iterations=1150, busy={"h2d": least.seconds + 1e-15})
    (sentence,) = explain([least, played])
    assert "(0.33%)" in sentence
    assert "h2d work beyond the least +0 us" in sentence
    assert "in 1,150 times the least number of iterations" in sentence


@pytest.mark.parametrize(("rate", "told"), [(0.79, True), (0.81, False), (1.0, False), (1.19, False), (1.21, True)])
def test_a_run_outside_of_the_interval_says_so_and_when_the_computer_was_calibrated(rate, told):
    simulated = replace(
        SIMULATED,
        interval=(0.8 * SIMULATED.gen_tok_s, 1.2 * SIMULATED.gen_tok_s),
        facts={**SIMULATED.facts, "measured": "2026-11-20T12:00:00+00:00"},
    )
    measured = replace(simulated, source=Source.MEASURED, seconds=SIMULATED.seconds / rate)
    (sentence,) = explain([simulated, measured])
    assert ("outside the 90 % interval" in sentence) is told
    assert ("(2026-11-20)" in sentence) is told


@pytest.mark.parametrize(("others", "told"), [(0.0, False), (0.02, False), (0.31, True)])
def test_a_run_that_others_disturbed_says_so(others, told):
    measured = replace(SIMULATED, source=Source.MEASURED, seconds=2 * SIMULATED.seconds, others=others)
    (sentence,) = explain([SIMULATED, measured])
    assert ("Others took 31% of the cores meanwhile." in sentence) is told
