"""The dashboard without a browser: sliders are set in plain Python, the live run is a stand-in."""

import base64
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from workbench.core.errors import CapacityError, EngineError
from workbench.core.result import Result, Source
from workbench.engine import RunState
from workbench.hardware import machines
from workbench.scenario import Scenario
from workbench.schedules import Schedule, Sequential, VSLPipe, contenders
from workbench.serving import Progress, fits
from workbench.simulate import Detail, simulate
from workbench.widgets import Dashboard
from workbench.widgets.dashboard import dashboard
from workbench.widgets.dashboard.controls import Controls
from workbench.widgets.dashboard.curves import EMPTY, CurvePicture, top_of
from workbench.widgets.dashboard.predictions import outward
from workbench.widgets.dashboard.settings import (
    full_link,
    ladder,
    random_tokens,
    scenario_of,
    settings_of,
    suitable_kv,
    whole_ladder,
    why_not_live,
)
from workbench.widgets.parts.monitor import CHANNELS, Monitor
from workbench.widgets.parts.newest import Newest

SECONDS = 20.0  # that a test waits for what takes a moment


class StandIn:
    """A live run that does as it is told and serves nothing."""

    def __init__(self, scenario: Scenario, schedule: Schedule) -> None:
        self.scenario, self.schedule = scenario, schedule
        self.state, self.error = RunState.LOADING, None
        self.progress = Progress(total=int(scenario.workload.output_len.sum()), blocks=scenario.kv_blocks)

    def serve(self, iterations: int, emitted: int) -> None:
        self.state = RunState.RUNNING
        counts = {"iterations": iterations, "emitted": emitted, "prefill": 4 * emitted, "used_blocks": 3}
        self.progress = replace(self.progress, seconds=float(iterations), busy={"gpu": iterations / 2}, **counts)

    def pause(self) -> None:
        self.state = RunState.PAUSED

    def resume(self) -> None:
        self.state = RunState.RUNNING

    def stop(self) -> None:
        self.state = RunState.STOPPED

    def finish(self) -> None:
        self.serve(3, self.progress.total)
        self.state = RunState.FINISHED

    def fail(self, error: Exception) -> None:
        self.error, self.state = error, RunState.FAILED

    def wait(self, timeout: float | None = None) -> Result:
        played = simulate(self.scenario, self.schedule, detail=Detail.TASK)
        return replace(played, source=Source.MEASURED, stopped=self.state is RunState.STOPPED)


@pytest.fixture
def scenario() -> Scenario:
    """One that this computer could run, if its model had the weights it claims to have."""
    machine = replace(small_machine(), host=platform.node())
    model = replace(tiny_model(), path=Path("nowhere"))
    return tiny_scenario(8, 4, 12, model=model, machine=machine, blocks=16)


@pytest.fixture
def runs(monkeypatch) -> list[StandIn]:
    started: list[StandIn] = []

    def start(scenario: Scenario, schedule: Schedule) -> StandIn:
        started.append(StandIn(scenario, schedule))
        return started[-1]

    monkeypatch.setattr(dashboard, "start", start)
    return started


@pytest.fixture
def board(scenario, runs):
    shown = Dashboard(scenario)
    yield shown
    shown.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def step(slider, by: int) -> None:
    values = [value for _, value in slider.options]
    slider.value = values[values.index(slider.value) + by]


def drawn(board: Dashboard) -> bytes:
    assert board._painter.wait(SECONDS)
    return bytes(board.curves.value)


# ------------------------------------------------------------------------------------------------------- the settings


def test_settings_of_a_scenario_make_that_scenario_again(scenario):
    again = scenario_of(scenario, settings_of(scenario, VSLPipe()), random_tokens)
    assert (again.model, again.machine, again.kv_blocks) == (scenario.model, scenario.machine, scenario.kv_blocks)
    assert (again.workload.prompt_len == 8).all()
    assert (again.workload.output_len == 4).all()
    assert simulate(again, VSLPipe()).seconds == simulate(scenario, VSLPipe()).seconds


def test_another_model_is_kept_in_its_own_precision(scenario):
    chosen = scenario.on(memory=replace(scenario.memory, weights="bf16", kv="bf16"))
    settings = replace(settings_of(chosen, VSLPipe()), model=tiny_model(2, dtype="fp32"))
    other = scenario_of(chosen, settings, random_tokens)
    assert (other.precision.weights, other.precision.kv) == ("fp32", "fp32")
    assert other.kv_blocks == chosen.kv_blocks


def test_a_slower_link_throttles_and_the_full_one_does_not(scenario):
    settings = settings_of(scenario, VSLPipe())
    slow = scenario_of(scenario, replace(settings, link=1e6), random_tokens).machine
    assert (slow.link.h2d, slow.link.d2h, slow.throttled) == (1e6, 1e6, True)
    assert not scenario_of(scenario, settings, random_tokens).machine.throttled


def test_a_cache_too_small_is_an_error_in_one_sentence(scenario):
    with pytest.raises(CapacityError, match=r"needs a KV cache of 11 tokens"):
        scenario_of(scenario, replace(settings_of(scenario, VSLPipe()), kv_tokens=8), random_tokens)


def test_why_not_live_names_what_is_missing(scenario):
    assert "has lengths but no tokens" in why_not_live(scenario)
    ready = scenario.on(workload=random_tokens(scenario.model, 2, 8, 4))
    assert why_not_live(ready) == ""
    assert why_not_live(ready.on(model=tiny_model())) == "tiny has no weights here"
    assert why_not_live(ready.on(machine=small_machine())) == "small is not this computer"


@pytest.mark.parametrize("machine", ["a40", "moe-lightning-s2", "ktransformers-a100"])
def test_another_machine_comes_with_its_own_link_and_a_suitable_cache(scenario, machine):
    """Of a scenario on a slow link with a small cache nothing is left where a server is chosen."""
    slow = scenario.on(machine=scenario.machine.limit(link=1e6))
    controls = Controls(slow, (VSLPipe(), Sequential()))
    assert controls.settings == settings_of(slow, VSLPipe())
    controls.model.value = dict(controls.model.options)["mixtral-8x7b"]
    controls.machine.value = dict(controls.machine.options)[machine]
    now = controls.settings
    assert now.link == full_link(machines[machine])
    assert now.kv_tokens >= now.requests * (now.prompt_len + now.output_len)
    chosen = scenario_of(slow, now, random_tokens)
    assert fits(chosen, VSLPipe())
    best = max(
        simulate(scenario_of(slow, replace(now, kv_tokens=step), random_tokens), VSLPipe()).gen_tok_s
        for step in controls.kv_steps
        if step <= now.kv_tokens
    )
    assert simulate(chosen, VSLPipe()).gen_tok_s >= 0.99 * best
    controls.model.value = dict(controls.model.options)[scenario.model.name]
    controls.machine.value = dict(controls.machine.options)[scenario.machine.name]
    assert controls.settings == settings_of(slow, VSLPipe())


def test_where_no_cache_fits_the_least_is_offered(scenario):
    full = settings_of(scenario.on(machine=small_machine(gpu_memory=1.0)), VSLPipe())
    assert suitable_kv(scenario, full, (64.0, 128.0)) == 64.0


def test_ladders_pass_through_their_anchor_in_quarter_octaves():
    steps = ladder(13.0, 2.0, 100.0)
    assert 13.0 in steps
    assert 2.0 <= steps[0] < steps[-1] <= 100.0
    assert all(high / low == pytest.approx(2**0.25) for low, high in pairwise(steps))
    assert whole_ladder(4, 1, 8) == (1, 2, 3, 4, 5, 6, 7, 8)


def test_points_are_taken_from_the_chosen_one_outward():
    steps = ladder(16.0, 1.0, 256.0)
    chosen = outward(steps, steps[7], 9)
    assert chosen[0] == steps[7]
    assert {*steps[::4]} <= {*chosen}
    far = [max(step / steps[7], steps[7] / step) for step in chosen]
    assert far == sorted(far)


# --------------------------------------------------------------------------------------------------------- the curves


def test_moving_a_slider_draws_other_curves(board):
    before = drawn(board)
    step(board.controls.requests, 2)
    assert drawn(board) != before
    assert before.startswith(b"\x89PNG")


def test_the_curves_are_what_simulate_says_of_the_last_value(board, scenario):
    for _ in range(4):
        step(board.controls.requests, 1)
    drawn(board)
    chosen = scenario_of(scenario, board.controls.settings, random_tokens)
    for schedule in contenders(scenario.layer):
        points = curve(board, f"{schedule.name}, simulated")
        assert len(points) > 8
        for capacity, rate in points:
            at = chosen.on(memory=replace(chosen.memory, kv_capacity=float(capacity)))
            assert simulate(at, schedule).gen_tok_s == rate


def curve(board: Dashboard, label: str) -> list[tuple[float, float]]:
    (line,) = (line for line in board._picture.ax.lines if line.get_label() == label)
    return line.get_xydata().tolist()


def test_a_picture_on_a_copied_frame_is_the_one_drawn_anew(board):
    drawn(board)
    pairs, capacity = board._whole, board._predictions.capacity(board.controls.settings)
    ends = (capacity / 8, capacity * 8)
    again, once = CurvePicture(), CurvePicture()
    again.png(pairs[:-3], capacity / 2, ends)
    frame = again._frame
    assert again.png(pairs, capacity, ends) == once.png(pairs, capacity, ends)
    assert again._frame is frame


def test_curves_that_are_not_whole_leave_the_earlier_ones_in_pale(board, scenario):
    drawn(board)
    pairs, capacity = board._whole, board._predictions.capacity(board.controls.settings)
    picture, lines = CurvePicture(), ["bound", *contenders(scenario.layer)]
    picture.png(pairs[: len(lines)], capacity, (capacity / 8, capacity * 8), before=pairs)
    pale = [line for line in picture.ax.lines if line.get_alpha()]
    assert len(pale) == len(lines)
    assert len(picture.ax.get_legend().get_texts()) == len(lines)
    picture.png(pairs, capacity, (capacity / 8, capacity * 8))
    assert not [line for line in picture.ax.lines if line.get_alpha()]


def test_a_picture_without_a_point_says_so(board):
    board.controls.model.value = dict(board.controls.model.options)["deepseek-v3"]
    drawn(board)
    assert board._picture.ax.texts[0].get_text() == EMPTY
    assert board._picture.ax.get_legend() is None


@pytest.mark.parametrize(("most", "top"), [(0.9, 1.0), (1.2, 1.5), (147.0, 150.0), (149.0, 200.0), (980.0, 1000.0)])
def test_the_upright_axis_ends_at_a_round_value_above_all_rates(scenario, most, top):
    result = simulate(scenario, VSLPipe())
    assert top_of([(1.0, replace(result, seconds=result.generated / most))]) == top


def test_a_bad_setting_is_told_and_going_back_mends_it(board):
    board.controls.kv_tokens.value = board.controls.kv_steps[0]
    board.controls.output_len.value = board.controls.output_len.options[-1][1]
    drawn(board)
    assert "or shorten the request" in board.said.value
    assert board.live.start.disabled
    board.controls.output_len.value = 4
    drawn(board)
    assert board.said.value.startswith("At ")
    assert not board.live.start.disabled


def test_what_cannot_run_live_can_be_predicted_and_says_why(board):
    board.controls.machine.value = dict(board.controls.machine.options)["a40"]
    drawn(board)
    assert board.live.status.value == "Cannot run live: a40 is not this computer."
    before = drawn(board)
    board.controls.model.value = dict(board.controls.model.options)["mixtral-8x7b"]
    assert drawn(board) != before
    assert board.live.status.value == "Cannot run live: mixtral-8x7b has no weights here."
    assert board.live.start.disabled


def test_an_unexpected_error_of_a_workload_is_seen(scenario):
    def broken(*sizes: object) -> object:
        if sizes[1] != 12:
            raise ZeroDivisionError("no such workload")
        return random_tokens(*sizes)

    board = Dashboard(scenario, workload=broken)
    step(board.controls.requests, 1)
    drawn(board)
    assert "ZeroDivisionError: no such workload" in board.said.value
    board.close()


def test_the_still_is_the_picture(board):
    bundle = board._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == board.curves.value
    assert "application/vnd.jupyter.widget-view+json" in bundle


# ------------------------------------------------------------------------------------------------------- the live run


def test_a_run_is_started_watched_paused_and_finished(board, runs):
    live = board.live
    live.start.click()
    (run,) = runs
    assert run.schedule == Sequential(prefetch=True)
    assert (live.start.disabled, live.pause.disabled, live.stop.disabled) == (True, False, False)
    assert board.controls.requests.disabled
    run.serve(2, 20)
    until(lambda: live.bar.value == 20)
    until(lambda: len(live.strip._history) > 0)
    live.pause.click()
    assert run.state is RunState.PAUSED
    assert live.pause.description == "Resume"
    live.pause.click()
    assert run.state is RunState.RUNNING
    run.finish()
    until(lambda: not live.start.disabled)
    assert "finished" in live.status.value
    assert live.bar.value == live.bar.max == 48
    assert not board.controls.requests.disabled


def test_a_finished_run_is_drawn_and_explained(board, runs):
    before = drawn(board)
    board.live.start.click()
    runs[0].finish()
    until(lambda: not board.live.start.disabled)
    assert drawn(board) != before
    assert [track["title"].partition(":")[0] for track in board.gantt.tracks] == ["simulated", "measured"]
    assert "measured" in board.words.value
    step(board.controls.requests, 1)
    drawn(board)
    assert "D" not in [line.get_marker() for line in board._picture.ax.lines], "a point of other settings"
    step(board.controls.requests, -1)
    drawn(board)
    assert "D" in [line.get_marker() for line in board._picture.ax.lines]


def test_a_stopped_run_tells_what_it_served_and_is_no_point(board, runs):
    board.live.start.click()
    runs[0].serve(2, 20)
    board.live.stop.click()
    until(lambda: not board.live.start.disabled)
    assert "stopped" in board.live.status.value
    assert "Stopped after 48 tokens" in board.words.value
    drawn(board)
    assert "D" not in [line.get_marker() for line in board._picture.ax.lines]


def test_an_engine_error_is_shown_and_the_next_run_can_start(board, runs):
    board.live.start.click()
    runs[0].fail(EngineError("lane <gpu> broke; mend it."))
    until(lambda: not board.live.start.disabled)
    assert "lane &lt;gpu&gt; broke; mend it." in board.live.status.value
    board.live.start.click()
    assert len(runs) == 2


def test_a_start_that_is_refused_says_why(board, monkeypatch):
    def refuse(*_: object) -> object:
        raise EngineError("the weights are gone; bring them back.")

    monkeypatch.setattr(dashboard, "start", refuse)
    board.live.start.click()
    assert "the weights are gone" in board.live.status.value
    assert not board.live.start.disabled


def test_a_second_click_starts_no_second_run(board, runs):
    board.live.start.click()
    board.live._on_start(None)
    assert len(runs) == 1


def test_the_cell_run_again_closes_the_old_dashboard_and_stops_its_run(board, scenario, runs):
    board.live.start.click()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("dashboard-")]
    again = Dashboard(scenario)
    assert runs[0].state is RunState.STOPPED
    assert board.comm is None
    assert board.controls.requests.comm is None
    until(lambda: not any(thread.is_alive() for thread in threads))
    again.close()
    assert not Dashboard._opened


# ------------------------------------------------------------------------------------------------------- the machinery


def test_rates_are_taken_over_the_last_seconds():
    monitor = Monitor(window=2.0)
    for second in range(1, 11):
        tokens = 10 * second if second <= 5 else 50 + 40 * (second - 5)
        busy = {"gpu": 0.5 * second}
        readings = monitor.read(Progress(seconds=float(second), iterations=second, emitted=tokens, busy=busy))
    output, _, _, _, gpu, *_ = readings
    assert output.value == pytest.approx(40)
    assert output.note == "25 overall"
    assert gpu.value == pytest.approx(0.5)
    assert len(readings) == len(CHANNELS)


def test_a_long_iteration_leaves_the_rate_of_the_last_ones():
    monitor = Monitor(window=1.0)
    monitor.read(Progress(seconds=1.0, iterations=1, emitted=10))
    monitor.read(Progress(seconds=2.0, iterations=2, emitted=20))
    assert monitor.read(Progress(seconds=9.0, iterations=2, emitted=20))[0].value == pytest.approx(10)


def test_of_values_that_wait_only_the_newest_is_worked_on():
    begun, go, done = threading.Event(), threading.Event(), []

    def work(value: int, overtaken: Callable[[], bool]) -> None:
        begun.set()
        go.wait(SECONDS)
        done.append((value, overtaken()))

    worker = Newest(work, "test")
    worker.put(1)
    assert begun.wait(SECONDS)
    worker.put(2)
    worker.put(3)
    go.set()
    assert worker.wait(SECONDS)
    assert done == [(1, True), (3, False)]
    worker.close()


def test_cancelled_work_gives_up_and_later_work_is_done():
    done = []

    def work(value: int, overtaken: Callable[[], bool]) -> None:
        if value == 1:
            until(overtaken)
        else:
            done.append((value, overtaken()))

    worker = Newest(work, "test")
    worker.put(1)
    until(lambda: worker._busy)
    worker.cancel()
    assert worker.wait(SECONDS)
    worker.put(2)
    assert worker.wait(SECONDS)
    assert done == [(2, False)]
    worker.close()
