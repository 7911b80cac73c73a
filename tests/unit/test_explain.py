"""The difference between a run and its simulation, by cause: nothing is lost and nothing counted twice."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import scenarios, tiny_scenario
from tests.examples import examples
from workbench.analysis.explain import beyond_bound, explain, residual
from workbench.analysis.wording import in_words, lane_of
from workbench.core.result import Result, Source
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
        ("KV memory", "", "the size of the KV cache"),
        ("DRAM bandwidth", "", "the bandwidth of the host's memory"),
        ("cores that both lanes share", "", "the speed of the cores that both lanes share"),
        ("a limit of one's own", "", "a limit of one's own"),
    ],
)
def test_what_binds_is_said_in_words(binding, lane, words):
    assert (lane_of(binding), in_words(binding)) == (lane, words)


def test_small_shares_keep_their_digits_and_large_numbers_are_whole():
    least = replace(SIMULATED, source=Source.BOUND, seconds=1.0, iterations=1, limits={"h2d link": 1.0})
    played = replace(SIMULATED, seconds=300.0, iterations=1150, busy={"h2d": 270.0})
    (sentence,) = explain([least, played])
    assert ", 0.33 % of the bound's 1): the link spends 90 % of 300 s on " in sentence
    assert "(1,150 iterations, where 1 would do)" in sentence
    assert "fuller batches about 270 times" in sentence


def told(measured: Result, simulated: Result) -> str:
    """The sentence that compares a run with its simulation."""
    return next(said for said in explain([simulated, measured]) if " were simulated (" in said)


SHORT = result(Source.SIMULATED, 10.0, Span("gpu", "A", 0.0, 4.0, 0), Span("cpu", "C", 4.0, 5.0, 0))


@pytest.mark.parametrize(
    ("seconds", "gpu", "own", "cpu", "says"),
    [
        (
            16.0,
            9.0,
            9.0,
            1.0,
            "worked 5.0 s more and was idle 1.0 s more between iterations; its tasks took 2.25 times",
        ),
        (
            16.0,
            9.0,
            4.0,
            1.0,
            "was without its cores 5.0 s more and was idle 1.0 s more between iterations; run it again",
        ),
        (16.0, 4.0, 4.0, 1.0, "was idle 6.0 s more between iterations; that is 6 s more per iteration"),
        (14.0, 4.0, 4.0, 5.0, "waited 4.0 s more for other parts; the CPU worked 5.00 times as long as expected"),
        (9.0, 3.0, 3.0, 1.0, "worked 1.0 s less."),
        (10.1, 4.1, 4.1, 1.0, "worked 0.1 s more."),
    ],
)
def test_a_run_is_told_by_cause_in_one_unit_with_what_would_help(seconds, gpu, own, cpu, says):
    spans = (Span("gpu", "A", 0.0, gpu, 0, own), Span("cpu", "C", gpu, gpu + cpu, 0, cpu))
    measured = replace(result(Source.MEASURED, seconds, *spans), iterations=1)
    sentence = told(measured, SHORT)
    assert f"output tok/s, {1000 / seconds:.0f} %): the GPU {says}" in sentence


@examples(30)
@given(st.lists(st.floats(0.1, 9.0), min_size=4, max_size=4), st.floats(0.0, 1.0))
def test_the_seconds_that_are_told_add_up_to_the_difference(lengths, own):
    gpu, cpu, again, between = lengths
    spans = (
        Span("gpu", "A", 0.0, gpu, 0, own * gpu),
        Span("cpu", "C", gpu, gpu + cpu, 0, cpu),
        Span("gpu", "B", gpu + cpu, gpu + cpu + again, 0, again),
    )
    sentence = told(result(Source.MEASURED, gpu + cpu + again + between, *spans), SHORT)
    took, foreseen = (float(amount) for amount in re.findall(r"([\d.]+) s (?:where|were)", sentence))
    causes = re.findall(r"([\d.]+) s (more|less)", sentence.partition("):")[2].partition(";")[0])
    difference = sum(float(amount) if word == "more" else -float(amount) for amount, word in causes)
    assert took - foreseen == pytest.approx(difference, abs=1e-9)


def test_without_tasks_a_run_is_told_by_work_and_idle_time():
    bare = {"timeline": Timeline(), "seconds": 16.0}
    measured = replace(SHORT, source=Source.MEASURED, busy={"gpu": 6.0, "cpu": 1.0}, **bare)
    assert told(measured, SHORT).endswith(": the GPU worked 2.0 s more and was idle 4.0 s more.")


@pytest.mark.parametrize(("rate", "told"), [(0.79, True), (0.81, False), (1.0, False), (1.19, False), (1.21, True)])
def test_a_run_outside_of_the_interval_says_so_and_when_the_computer_was_calibrated(rate, told):
    simulated = replace(
        SIMULATED,
        interval=(0.8 * SIMULATED.gen_tok_s, 1.2 * SIMULATED.gen_tok_s),
        facts={**SIMULATED.facts, "measured": "2026-11-20T12:00:00+00:00"},
    )
    measured = replace(simulated, source=Source.MEASURED, seconds=SIMULATED.seconds / rate)
    said = explain([simulated, measured])
    outside = [sentence for sentence in said if "outside the simulation's 90 % interval" in sentence]
    assert len(outside) == told
    assert all("(2026-11-20); run it again" in sentence for sentence in outside)


@pytest.mark.parametrize(("others", "shown"), [(0.0, False), (0.02, False), (0.31, True)])
def test_a_run_that_others_disturbed_says_so(others, shown):
    measured = replace(SIMULATED, source=Source.MEASURED, seconds=2 * SIMULATED.seconds, others=others)
    assert ("other programs took 31 % of the cores meanwhile" in told(measured, SIMULATED)) is shown
