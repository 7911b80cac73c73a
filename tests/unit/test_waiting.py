"""What a lane waited for: the chain of tasks that ran in its idle time, by hand, and nothing lost in any simulation."""

import pytest
from hypothesis import given

from tests.builders import scenarios
from tests.examples import examples
from workbench.analysis.waiting import Cause, waits
from workbench.core.timeline import ITERATION, Span, Timeline
from workbench.simulate import Detail, simulate

ROUND = Timeline(
    [
        Span("gpu", "A0a", 0.0, 2.0, after=ITERATION),
        Span("d2h", "Q0a", 2.0, 3.0, after="gpu A0a"),
        Span("cpu", "C0a", 3.0, 7.0, after="d2h Q0a"),
        Span("gpu", "B0a", 7.0, 8.0, after="cpu C0a"),
        Span("gpu", "A1a", 8.5, 9.5, after="gpu B0a"),
        Span("h2d", "W1", 10.0, 12.0, 1, after=ITERATION),
        Span("gpu", "B1a", 12.0, 13.0, 1, after="h2d W1"),
        Span("cpu", "C1a", 13.0, 15.0, 1, after="gpu B1a"),
    ]
)


def test_idle_time_goes_to_the_tasks_that_ran_in_the_chain_up_to_the_next_one():
    """The GPU waits from 2 to 7 for a transfer and the CPU, from 8 to 8.5 and from 9.5 to 10 for no task, then for
    the link, and at the end for the CPU."""
    assert waits(ROUND, "gpu") == {
        Cause("d2h", "Q"): 1.0,
        Cause("cpu", "C"): 4.0 + 2.0,
        Cause("", ""): 0.5 + 0.5,
        Cause("h2d", "W"): 2.0,
    }


def test_the_iteration_before_is_followed_to_its_last_task():
    timeline = Timeline(
        [
            Span("h2d", "W0", 0.0, 1.0),
            Span("gpu", "A0", 1.0, 5.0, after="h2d W0"),
            Span("h2d", "W1", 5.0, 6.0, 1, after=ITERATION),
        ]
    )
    assert waits(timeline, "h2d") == {Cause("gpu", "A"): 4.0}


def test_a_lane_that_never_rests_waits_for_nothing():
    assert waits(Timeline([Span("gpu", "A", 0.0, 1.0), Span("gpu", "B", 1.0, 2.0, after="gpu A")]), "gpu") == {}


@examples(40)
@given(scenarios())
def test_the_causes_add_up_to_the_idle_time_of_every_lane(case):
    timeline = simulate(*case, detail=Detail.TASK).timeline
    for lane in timeline.lanes:
        idle = timeline.seconds
        until = timeline.begin
        for span in sorted((span for span in timeline if span.lane == lane), key=lambda span: span.start):
            idle -= max(0.0, span.end - max(span.start, until))
            until = max(until, span.end)
        found = waits(timeline, lane)
        assert sum(found.values()) == pytest.approx(idle, abs=1e-9 * timeline.seconds + 1e-12)
        assert min(found.values(), default=0.0) >= 0
        assert all(cause.lane != lane for cause in found)
