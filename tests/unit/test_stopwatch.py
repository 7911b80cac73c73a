"""Wall time that can be held."""

import pytest

from workbench.engine.lanes import stopwatch as module
from workbench.engine.lanes.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """The reading of the computer's clock, to be set."""
    reading = {"now": 100.0}
    monkeypatch.setattr(module.time, "perf_counter", lambda: reading["now"])
    return reading


def test_time_passes_from_the_start_and_stands_while_held(clock):
    watch = Stopwatch()
    watch.start()
    clock["now"] = 103.0
    assert watch.now == 3.0
    watch.hold()
    clock["now"] = 110.0
    assert (watch.now, watch.held) == (3.0, True)
    watch.go()
    clock["now"] = 112.0
    assert (watch.now, watch.held) == (5.0, False)


def test_what_ended_during_a_pause_ended_when_it_began(clock):
    watch = Stopwatch()
    watch.start()
    clock["now"] = 102.0
    watch.hold()
    clock["now"] = 108.0
    watch.go()
    assert [watch.at(reading) for reading in (101.0, 102.0, 105.0, 108.0, 109.0)] == [1.0, 2.0, 2.0, 2.0, 3.0]


def test_holding_twice_and_going_twice_change_nothing(clock):
    watch = Stopwatch()
    watch.start()
    watch.go()
    watch.hold()
    clock["now"] = 101.0
    watch.hold()
    clock["now"] = 102.0
    watch.go()
    watch.go()
    clock["now"] = 103.0
    assert watch.now == 1.0
    watch.start()
    assert watch.now == 0.0
