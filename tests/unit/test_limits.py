"""The sentence on one result: each kind with figures worked out by hand, and shares that always add up."""

import re
from dataclasses import replace

import pytest
from hypothesis import given

from tests.builders import scenarios, small_machine, tiny_scenario
from tests.examples import examples
from workbench.analysis.explain import explain, headline
from workbench.analysis.shadow_prices import RESOURCES
from workbench.core.result import Result, Source
from workbench.core.timeline import ITERATION, Span, Timeline
from workbench.perfmodels import bound
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.simulate import Detail, simulate

LABELS = {"A": "qkv", "B": "out_proj route experts combine", "C": "decode_attention", "W": "weights"}


def result(source=Source.SIMULATED, seconds=100.0, schedule="Sequential", **fields):
    known = {"model": "m", "machine": "pc", "generated": 1000, "processed": 3000, "iterations": 50}
    return Result(source=source, seconds=seconds, schedule=schedule, **(known | fields))


def least(seconds=60.0, iterations=50, **limits):
    return result(Source.BOUND, seconds, iterations=iterations, limits={"h2d link": seconds} | limits)


def test_waiting_is_told_by_what_was_waited_for():
    """Of ten seconds the link works six; it waits three for the CPU, and one for the GPU."""
    spans = [
        Span("h2d", "W0", 0.0, 3.0, after=ITERATION),
        Span("cpu", "C0", 3.0, 6.0, after="h2d W0"),
        Span("h2d", "W1", 6.0, 9.0, after="cpu C0"),
        Span("gpu", "B0", 9.0, 10.0, after="h2d W1"),
    ]
    busy = {"h2d": 6.0, "cpu": 3.0, "gpu": 1.0, "d2h": 0.0}
    played = result(seconds=10.0, busy=busy, timeline=Timeline(spans, LABELS))
    assert headline([played]) == (
        "Waiting limits Sequential (simulated 100 output tok/s): even the busiest part, the link to the GPU (h2d), "
        "spends 60 % of 10 s on work, 30 % waiting for the CPU (decode_attention) and 10 % waiting for the GPU "
        "(out_proj, ..., combine); a faster CPU, a faster GPU or more overlap would give up to 1.67 times this "
        "throughput."
    )
    (told,) = explain([least(6.0), played])
    assert "(simulated 100 output tok/s, 60 % of the bound's 166.7)" in told


def test_without_tasks_it_says_how_to_learn_the_cause():
    told = headline([result(busy={"gpu": 80.0, "h2d": 10.0})])
    assert told == (
        "The GPU limits Sequential (simulated 10 output tok/s): the GPU spends 80 % of 100 s on work and 20 % waiting; "
        "more overlap (a timeline of every task tells what it waits for) would give up to 1.25 times this "
        "throughput."
    )


def test_less_waiting_gives_no_more_than_the_bound():
    played = result(busy={"gpu": 50.0, "h2d": 10.0})
    allowed = result(Source.BOUND, 90.0, limits={"cores compute": 90.0})
    assert "would give up to 2.00 times" in headline([played])
    assert "would give up to 1.11 times" in headline([played, allowed])


def test_a_faster_device_may_give_more_than_the_bound_of_this_hardware():
    """The CPU makes the GPU wait for 4.5 of 10 seconds, and the host's memory allows 9."""
    spans = [Span("gpu", "B0", 0.0, 5.5), Span("cpu", "C0", 5.5, 10.0, after="gpu B0"), Span("gpu", "B1", 10.0, 10.0)]
    spans[-1] = Span("gpu", "B1", 10.0, 10.0 + 1e-9, after="cpu C0")
    played = result(seconds=10.0, busy={"gpu": 5.5, "cpu": 4.5}, timeline=Timeline(spans, LABELS))
    allowed = result(Source.BOUND, 9.0, limits={"DRAM bandwidth": 9.0})
    told = headline([allowed, played])
    assert "a faster CPU would give up to 1.82 times this throughput and more overlap up to 1.11 times" in told
    assert "more overlap would give up to 1.11 times" in headline([allowed, played], hardware=False)
    assert "faster" not in headline([allowed, played], hardware=False)


def test_a_bound_that_is_reached_or_refuted_is_told_so():
    played = result(busy={"gpu": 50.0})
    reached = result(Source.BOUND, 99.0, limits={"cores compute": 99.0})
    assert headline([reached, played]).endswith("; the bound allows hardly more.")
    refuted = result(Source.BOUND, 110.0, limits={"cores compute": 110.0})
    assert "would give up to 2.00 times" in headline([refuted, played])


def test_faster_hardware_is_left_out_where_it_is_told_elsewhere():
    played = result(busy={"h2d": 100.0, "gpu": 50.0})
    others = [least(100.0)]
    assert headline([*others, played]).endswith(
        "; a link twice as fast would give up to 2.00 times this throughput with the same batches."
    )
    assert headline([*others, played], hardware=False).endswith(
        "spends 100 % of 100 s on work; only less work or faster hardware would give more."
    )


def test_small_causes_of_waiting_are_told_together():
    spans = [
        Span("gpu", "A0", 0.0, 80.0),
        Span("cpu", "C0", 80.0, 90.0, after="gpu A0"),
        Span("h2d", "H0", 90.0, 96.0, after="cpu C0"),
        Span("gpu", "B0", 97.0, 97.5, after="h2d H0"),
        Span("d2h", "Q0", 97.5, 100.0, after="gpu B0"),
    ]
    busy = {"gpu": 80.5, "cpu": 10.0, "h2d": 6.0, "d2h": 2.5}
    told = headline([result(busy=busy, timeline=Timeline(spans, LABELS))])
    assert "10 % waiting for the CPU (decode_attention), 6 % waiting for the link to the GPU (h2d) and " in told
    assert "spends 81 % of 100 s on work" in told  # 80.5, and the rest 2.5 and 1: together 100
    assert told.partition(";")[0].endswith(" and 3 % waiting otherwise")
    assert "a faster CPU, a faster link or more overlap would give up to 1.24 times this throughput" in told


def test_more_iterations_than_needed_are_told_with_the_gain_of_fuller_batches():
    """Half as many iterations again: 90 seconds where the bound has 60."""
    played = result(iterations=75, busy={"h2d": 90.0, "gpu": 70.0})
    assert headline([least(**{"gpu compute": 40.0}), played]) == (
        "The link to the GPU (h2d) limits Sequential (simulated 10 output tok/s, 60 % of the bound's 16.67): the link "
        "spends 60 % of 100 s on unavoidable work, 30 % on possibly avoidable work (75 iterations, where 50 would do) "
        "and 10 % waiting; more overlap (a timeline of every task tells what it waits for) would give up to "
        "1.11 times this throughput, fuller batches about 1.50 times and a link twice as fast up to 1.43 times with "
        "the same batches (then the GPU limits)."
    )


def test_tokens_that_are_computed_again_are_told_if_they_explain_the_work():
    played = result(busy={"h2d": 90.0}, processed=4500, recomputed=1500)
    told = headline([least(), played])
    assert "30 % on possibly avoidable work (1,500 tokens are computed again after a preemption)" in told
    assert "a KV cache that needs no preemption about 1.50 times" in told
    unexplained = headline([least(), replace(played, processed=3001, recomputed=1)])
    assert "30 % on possibly avoidable work and 10 % waiting" in unexplained
    assert "preemption" not in unexplained
    assert "avoiding that work up to 1.50 times" in unexplained


def test_little_waiting_is_told_without_its_causes():
    spans = [
        Span("gpu", "A0", 0.0, 97.0),
        Span("cpu", "C0", 97.0, 98.0, after="gpu A0"),
        Span("h2d", "H0", 98.0, 100.0, after="cpu C0"),
    ]
    told = headline([result(busy={"gpu": 97.0, "cpu": 1.0, "h2d": 2.0}, timeline=Timeline(spans, LABELS))])
    assert "spends 97 % of 100 s on work and 3 % waiting;" in told


def test_work_beyond_the_least_of_a_lane_that_is_not_the_bounds_is_not_divided():
    """The bound's figure for the GPU, 10 s, may be far below what the GPU must do."""
    told = headline([least(**{"gpu compute": 10.0}), result(busy={"gpu": 90.0, "h2d": 61.0})])
    assert "the GPU spends 90 % of 100 s on work and 10 % waiting" in told
    assert "avoidable" not in told


@pytest.mark.parametrize(
    ("busy", "limits", "told"),
    [
        ({"h2d": 99.0, "gpu": 30.0}, {}, "would give up to 2.00 times this throughput with the same batches."),
        (
            {"h2d": 99.0, "gpu": 80.0},
            {},
            "would give up to 1.25 times this throughput with the same batches (then the GPU",
        ),
        (
            {"h2d": 99.0, "gpu": 30.0},
            {"DRAM bandwidth": 90.0},
            "would give up to 1.11 times this throughput with the same batches (then the bandwidth of",
        ),
        ({"cpu": 99.0}, {"DRAM bandwidth": 99.0}, "a CPU and host memory twice as fast would give up to 2.00 times"),
        ({"h2d": 99.0, "gpu": 99.0}, {}, "; only less work or faster hardware would give more."),
        ({"gpu": 99.0}, {"cores that both lanes share": 90.0}, "; only less work or faster hardware would give more."),
    ],
)
def test_faster_hardware_gains_until_something_else_limits(busy, limits, told):
    assert told in headline([least(**{"h2d link": 99.0, "seconds": 99.0} | limits), result(busy=busy)])


def test_a_faster_schedule_is_the_advice():
    slow, fast = result(busy={"gpu": 50.0}), result(seconds=40.0, schedule="VSLPipe", busy={"gpu": 38.0})
    told = explain([least(), replace(least(), schedule="VSLPipe"), slow, fast])
    assert told[0].startswith("The GPU limits VSLPipe (simulated 25 output tok/s")
    assert (
        told[1] == "Of the 2 schedules that were simulated, VSLPipe is the fastest: 2.50 times as fast as Sequential."
    )
    assert told[2].endswith("50 % waiting; VSLPipe gives 2.50 times this throughput.")


def test_the_headline_is_of_the_fastest_measurement_before_any_simulation():
    simulated = result(seconds=10.0, busy={"gpu": 10.0})
    slow, fast = (result(Source.MEASURED, seconds, busy={"gpu": 9.0}) for seconds in (30.0, 20.0))
    assert "(measured 50 output tok/s)" in headline([simulated, slow, fast])
    assert "(simulated 100 output tok/s, 50 % of the bound's 200)" in headline([least(5.0), simulated])


def test_a_disturbed_measurement_is_to_be_repeated_before_anything_else():
    disturbed = result(Source.MEASURED, busy={"gpu": 60.0}, others=0.8)
    quick = result(Source.MEASURED, seconds=99.0 / 2, schedule="Other", busy={"gpu": 40.0})
    told = explain([least(), disturbed, quick])[-1]
    assert told.endswith("; other programs took 80 % of the cores meanwhile, so run it again without them.")
    little = replace(disturbed, others=0.03)
    assert explain([least(), little, quick])[-1].endswith("; Other gives 2.02 times this throughput.")


def test_late_requests_limit_what_waits_for_them():
    late = result(Source.BOUND, 90.0, limits={"the last arrival": 90.0, "gpu compute": 5.0})
    assert headline([late, result(busy={"gpu": 6.0})]) == (
        "The arrival of the requests limits Sequential (simulated 10 output tok/s, 90 % of the bound's 11.11): the "
        "last one comes after 90 s and all are served 10 s later, after 100 s; nothing that is faster gives more than "
        "1.11 times this throughput."
    )
    assert headline([late]) == (
        "At most 11.11 output tok/s are possible in any order of tasks: the last arrival limits them."
    )


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (40.0, "; without this limit, the CPU would allow 1.50 times as many."),
        (59.9, " limits them, and the CPU would allow hardly more."),
        (0.0, " limits them."),
    ],
)
def test_a_bound_tells_what_sets_it_and_what_comes_next(second, told):
    said = headline([least(**{"cpu compute": second})])
    assert said.startswith("At most 16.67 output tok/s are possible in any order of tasks: the link to the GPU (h2d)")
    assert said.endswith(told)


def test_results_without_lanes_say_what_they_can():
    published = result(Source.PUBLISHED)
    assert headline([published]) == (
        "Sequential (published 10 output tok/s) does not tell its limits; bound and simulate tell what this hardware "
        "allows."
    )
    predicted = result(Source.PREDICTED, predictor="A", limits={"KV memory": 100.0})
    assert "(predicted by A 10 output tok/s) is limited by the size of the KV cache;" in headline(
        [published, predicted]
    )


def test_nothing_has_no_headline():
    assert explain([]) == []
    with pytest.raises(ValueError, match="at least one Result"):
        headline([])


@examples(40)
@given(scenarios())
def test_the_shares_of_the_time_add_up_and_are_of_the_busiest_lane(case):
    """However the time is divided up, the percentages after the colon sum to 100, and those of waiting to the rest."""
    played = simulate(*case, detail=Detail.TASK)
    least = bound(*case)
    for results in ([played], [least, played]):
        said = headline(results).partition("):")[2].partition(";")[0]
        shares = [(int(share), kind) for share, kind in re.findall(r"(\d+) % (of|on|waiting)", said)]
        assert sum(share for share, _ in shares) == 100
        idle = 1 - max(played.busy.values()) / played.seconds
        waited = sum(share for share, kind in shares if kind == "waiting")
        assert waited == pytest.approx(
            100 * idle, abs=4
        )  # each of up to five parts is rounded to less than one percent


@pytest.mark.parametrize(
    ("resource", "slow", "lane"),
    [
        ("link", {"h2d": 1e8}, "h2d"),
        ("GPU", {"gpu": 1e8, "hbm": 1e9}, "gpu"),
        ("CPU", {"cpu": 1e7, "dram": 1e8}, "cpu"),
    ],
)
@pytest.mark.parametrize("schedule", [Sequential(prefetch=True), VSLPipe()], ids=str)
def test_no_simulation_with_twice_the_device_gains_more_than_is_said(resource, slow, lane, schedule):
    scenario = tiny_scenario(
        [8] * 12, [6] * 12, machine=small_machine(**slow), scheduler=ResourceAware(token_budget=64)
    )
    least, before = bound(scenario, schedule), simulate(scenario, schedule)
    after = simulate(RESOURCES[resource](scenario, 2.0), schedule)
    assert max(before.busy, key=before.busy.get) == lane
    said = headline([least, before])
    found = re.search(r"twice as fast (?:would give )?up to ([\d.]+) times", said)
    assert found is not None, said
    assert 1 < after.gen_tok_s / before.gen_tok_s <= float(found[1]) + 0.005
