"""A live run can be watched, paused, resumed and stopped, and tells why it failed."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest

import workbench as wb
from tests.live.world import machine, requests, scenario
from workbench.core.errors import EngineError
from workbench.core.quiet import Noise
from workbench.engine import RunState, engine, live
from workbench.hardware.profile import Pace
from workbench.kernels import features
from workbench.models import ModelConfig
from workbench.schedules import Schedule, Sequential, VSLPipe

ASKED = requests((5, 9, 3, 12), 12)


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task of the gpu lane takes 5 ms longer, so that a run lasts."""
    compute = engine.Forward.compute

    def later(self, *args):
        time.sleep(5e-3)
        return compute(self, *args)

    monkeypatch.setattr(engine.Forward, "compute", later)


def test_it_gives_what_run_gives(tiny: ModelConfig):
    case = scenario(tiny, ASKED)
    live_run = wb.start(case, VSLPipe())
    result = live_run.wait(60)
    assert live_run.state is RunState.FINISHED
    assert result.tokens == wb.run(case, VSLPipe()).tokens
    progress = live_run.progress
    assert (progress.emitted, progress.total) == (48, 48)
    assert progress.iterations == result.iterations


@pytest.mark.usefixtures("slow")
def test_while_paused_no_task_starts_and_no_time_passes(tiny: ModelConfig):
    live_run = wb.start(scenario(tiny, ASKED), Sequential())
    until(lambda: live_run.progress.emitted > 0)
    live_run.pause()
    until(lambda: live_run.state is RunState.PAUSED)
    time.sleep(0.1)  # tasks under way end
    before, spans = live_run.progress, len(live_run.timeline)
    time.sleep(0.3)
    after = live_run.progress
    assert (after.emitted, after.iterations, after.seconds) == (before.emitted, before.iterations, before.seconds)
    assert len(live_run.timeline) == spans
    live_run.resume()
    result = live_run.wait(60)
    assert result.tokens == wb.run(scenario(tiny, ASKED), Sequential()).tokens
    assert live_run.state is RunState.FINISHED


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe()], ids=str)
def test_it_tells_its_phases_and_how_far_an_iteration_is(tiny: ModelConfig, schedule: Schedule):
    phases = list[str]()
    seen = list[engine.UnderWay]()
    live_run = wb.start(scenario(tiny, ASKED), schedule)
    while not live_run.state.ended:
        phases.append(live_run.phase)
        under_way = live_run.under_way
        if under_way is not None:
            seen.append(under_way)
        time.sleep(1e-3)
    assert "reading the weights" in phases
    assert live_run.under_way is None
    first = [each for each in seen if each.iteration == 1]
    assert {each.prefill for each in first} == {5 + 9 + 3 + 12}
    assert {each.layer for each in first} == set(range(1, tiny.num_hidden_layers + 1))
    shares = [each.share for each in first]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < shares[-1]
    assert all(0 < each.seconds < 30 for each in seen)
    assert {each.prefill for each in seen if each.iteration == 5} == {0}


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("paused", [False, True])
def test_stopping_keeps_what_was_served(tiny: ModelConfig, paused: bool):
    live_run = wb.start(scenario(tiny, ASKED), Sequential())
    until(lambda: live_run.progress.emitted > 0)
    if paused:
        live_run.pause()
    begin = time.monotonic()
    live_run.stop()
    result = live_run.wait(30)
    assert time.monotonic() - begin < 1.0
    assert live_run.state is RunState.STOPPED
    assert result.stopped
    whole = wb.run(scenario(tiny, ASKED), Sequential()).tokens
    assert 0 < sum(map(len, result.tokens)) < sum(map(len, whole))
    assert all(part == all_of_it[: len(part)] for part, all_of_it in zip(result.tokens, whole, strict=True))


@pytest.mark.usefixtures("slow")
def test_what_was_stopped_stays_stopped(tiny: ModelConfig):
    live_run = wb.start(scenario(tiny, ASKED), Sequential())
    until(lambda: live_run.progress.emitted > 0)
    live_run.stop()
    live_run.resume()
    live_run.pause()
    assert live_run.wait(30).stopped


def test_stopping_before_the_first_iteration_measures_nothing(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    begun, measure = threading.Event(), live._measure

    def late(*args):
        begun.wait()
        return measure(*args)

    monkeypatch.setattr(live, "_measure", late)
    live_run = wb.start(scenario(tiny, ASKED), Sequential())
    live_run.stop()
    begun.set()
    with pytest.raises(EngineError, match="stopped before its first iteration"):
        live_run.wait(30)
    assert live_run.state is RunState.STOPPED


def test_an_error_is_kept_and_raised_where_it_is_waited_for(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    def fail(self, *args):
        raise ZeroDivisionError("struck")

    monkeypatch.setattr(engine.Forward, "compute", fail)
    live_run = wb.start(scenario(tiny, ASKED), VSLPipe())
    with pytest.raises(ZeroDivisionError, match="struck"):
        live_run.wait(30)
    assert live_run.state is RunState.FAILED
    assert isinstance(live_run.error, ZeroDivisionError)


@pytest.mark.usefixtures("slow")
def test_waiting_can_time_out_and_goes_on(tiny: ModelConfig):
    live_run = wb.start(scenario(tiny, ASKED), Sequential())
    until(lambda: live_run.progress.emitted > 0)
    with pytest.raises(TimeoutError, match=r"has not ended within 0.01 s"):
        live_run.wait(0.01)
    live_run.stop()
    live_run.wait(30)


def test_what_cannot_run_is_told_before_anything_is_loaded(tiny: ModelConfig):
    elsewhere = wb.machines["a40"]
    with pytest.raises(EngineError):
        wb.start(scenario(tiny, ASKED, on=elsewhere), Sequential())


def test_lanes_are_busy_as_long_as_they_worked(tiny: ModelConfig):
    live_run = wb.start(scenario(tiny, ASKED, on=machine(link=2e6, throttled=True)), Sequential())
    until(lambda: live_run.progress.iterations > 1)
    during = live_run.progress
    assert 0 < during.busy["h2d"] <= during.seconds * 1.01 + 0.05
    live_run.stop()
    live_run.wait(30)


def test_it_tells_what_others_took_of_the_cores(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "listening", lambda: nullcontext(Noise(0.4)))
    assert wb.run(scenario(tiny, ASKED), Sequential()).others == 0.4


@pytest.mark.parametrize(("threads", "known"), [(1, True), (2, False)])
def test_the_time_of_a_teams_first_thread_is_not_its_lanes(threads, known, tiny: ModelConfig, monkeypatch):
    """It waits for the others, which would be told as cores that other programs took."""
    monkeypatch.setattr(engine.Engine, "paced", lambda *_: Pace(threads, threads, "", 0.0, 0.0))
    measured = wb.run(scenario(tiny, ASKED), Sequential())
    computed = [span for span in measured.timeline if span.lane in ("gpu", "cpu")]
    assert {math.isfinite(span.cpu) for span in computed} == {known}


def test_it_tells_what_computed_each_lane(tiny: ModelConfig):
    measured = wb.run(scenario(tiny, ASKED), Sequential())
    assert measured.backend == f"both lanes on the CPU, by Numba ({features().path.name.lower()}) and torch"
    assert wb.simulate(scenario(tiny, ASKED), Sequential()).backend == ""
