"""Views without a browser: messages are sent in plain Python, the live run is a stand-in."""

import base64
import gc
import io
import json
import platform
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbconvert import HTMLExporter
from PIL import Image, PngImagePlugin

import workbench as wb
from tests.builders import small_machine, tiny_model, tiny_scenario
from tests.systems import VSL
from workbench.core.errors import EngineError, ScenarioError
from workbench.core.quiet import Noise
from workbench.core.result import Result, Source
from workbench.engine import RunState
from workbench.engine.engine import UnderWay
from workbench.hardware import Machine
from workbench.hardware.profile import Profile
from workbench.scenario import Scenario
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.serving import Progress
from workbench.serving.task_cost import profile_shape
from workbench.simulate import Detail, simulate
from workbench.widgets import Builder, Dashboard, Gantt, Strip, scenario_in, stills
from workbench.widgets.builder import View
from workbench.widgets.page import Made
from workbench.widgets.parts.gantt import _whole
from workbench.widgets.parts.monitor import CHANNELS, Monitor
from workbench.widgets.parts.newest import Newest
from workbench.widgets.parts.words import naming
from workbench.widgets.state import runs as live_runs
from workbench.widgets.state.offered import machines_offered
from workbench.widgets.stills import KEY, save_still

SECONDS = 20.0  # that a test waits for what takes a moment


class StandIn:
    """A live run that does as it is told and serves nothing."""

    def __init__(self, scenario: Scenario, schedule: Schedule) -> None:
        self.scenario, self.schedule = scenario, schedule
        self.state, self.error = RunState.LOADING, None
        self.phase, self.under_way = "", None
        self.progress = Progress(total=int(scenario.workload.output_len.sum()), blocks=scenario.kv_blocks)

    def reach(self, layer: int, seconds: float, iteration: int = 1) -> None:
        self.state = RunState.RUNNING
        prefill = 0 if iteration > 1 else int(self.scenario.workload.prompt_len.sum())
        self.under_way = UnderWay(iteration, prefill, layer, 4, (layer - 1) / 4, seconds)

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

    monkeypatch.setattr("workbench.engine.start", start)
    monkeypatch.setattr(live_runs, "PERIOD", 0.01)
    return started


@pytest.fixture
def view(scenario, runs):
    shown = Builder(scenario, names={})
    yield shown
    shown.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def say(view: View, do: str, **more: object) -> None:
    """Send what the browser sends."""
    view._received(None, {"do": do, "n": view.answered + 1, **more}, None)


def drawn(view: View) -> None:
    assert view.studio.drawing.wait(SECONDS)


def measured(view: View) -> list[dict]:
    return [row for row in view.figures["rows"] if row["source"] == "measured"]


# ------------------------------------------------------------------------------------------------------------ the view


def test_every_part_is_there_at_once_and_can_be_sent(view):
    drawn(view)
    for name in ("wiring", "code", "settings", "figures", "curves", "lanes", "live"):
        assert json.loads(json.dumps(getattr(view, name))) == getattr(view, name)
        assert getattr(view, name)
    assert view.pipeline == VSL
    assert view.schedule == Sequential(prefetch=True)


def test_every_message_is_answered_even_one_that_fails(view):
    say(view, "place", range=0, path=[99], device="gpu")
    assert view.answered == 1
    assert "99" in view.figures["problem"]
    say(view, "place", range=0, path=["x"], device="gpu")
    assert view.answered == 2
    say(view, "undo")
    assert view.answered == 3


def test_what_is_wired_is_the_scenario(view, scenario):
    assert view.scenario.diff(scenario).keys() <= {"memory.kv_capacity"}
    say(view, "open", name="FlexGenS4")
    assert view.scenario.pipeline == view.pipeline
    say(view, "clear")
    with pytest.raises(Exception, match="keeps the KV cache"):
        view.scenario  # noqa: B018


def test_two_views_stay_apart(view, scenario, runs):
    other = Dashboard(scenario, names={})
    say(other, "set", name="output_len", value=0)
    assert view.studio.settings.output_len == 4
    assert "wiring" not in other.parts
    assert "wiring" in view.parts
    other.close()


def test_a_cell_that_is_run_again_closes_its_view_and_stops_its_run(scenario, runs, monkeypatch):
    before = set(View._opened)
    made = [Made("cell-a", "1"), Made("cell-b", "2"), Made("cell-a", "3"), Made()]
    monkeypatch.setattr("workbench.widgets.page._running_cell", lambda: made.pop(0))
    first, beside = Builder(scenario, names={}), Builder(scenario, names={})
    say(first, "start")
    until(lambda: bool(runs))
    again, plain = Builder(scenario, names={}), Builder(scenario, names={})
    assert runs[0].state is RunState.STOPPED
    assert first.comm is None
    assert beside.comm is not None
    for each in (beside, again, plain):
        each.close()
    assert set(View._opened) <= before


def test_a_closed_view_leaves_no_thread(scenario, runs):
    before = {thread.ident for thread in threading.enumerate()}
    shown = Builder(scenario, names={})
    shown.close()
    until(lambda: {t.ident for t in threading.enumerate() if t.name.startswith("view-")} <= before)


def test_only_new_values_are_sent(view):
    drawn(view)
    sent = []
    view.observe(lambda change: sent.append(change.name), ["wiring", "code", "settings", "variants"])
    say(view, "no such message")
    assert sent == []


# ------------------------------------------------------------------------------------------------------------- stills


def test_the_still_is_a_picture_that_holds_its_scenario(view):
    bundle = view._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    assert picture.width > 400
    assert json.loads(picture.text[KEY])["format"]


@pytest.fixture
def chart() -> Gantt:
    """A chart with the lanes of two iterations."""
    made = Gantt()
    found = simulate(tiny_scenario(pipeline=VSL, requests=4), VSLPipe(), detail=Detail.TASK)
    made.show([("two iterations", found.timeline.window(1, 3)), ("one", found.timeline.window(1, 2))])
    return made


@pytest.fixture
def strip() -> Strip:
    """A strip with some seconds of a run."""
    made = Strip(CHANNELS)
    monitor = Monitor()
    for second in range(1, 9):
        progress = Progress(seconds=float(second), iterations=second, emitted=10 * second, busy={"gpu": 0.4 * second})
        made.add(progress.seconds, monitor.read(progress))
    return made


def test_a_lane_chart_and_its_still_say_how_names_of_tasks_are_read(chart, view):
    read = re.compile(r"(.)(\d+)([a-z]) is task \1 in layer \2, for part \3 of the batch")
    assert read.fullmatch(chart.naming)
    assert _whole(chart._titled).get_supxlabel() == chart.naming
    drawn(view)
    assert read.fullmatch(view.lanes["naming"])


@pytest.mark.parametrize(
    "names, told",
    [
        (["A1p26", "Ea", "Q12"], "A1p26 is task A in layer 1, for part p26 of the batch"),
        (
            ["W1.0", "A1a"],
            "A1a is task A in layer 1, for part a of the batch; .0 behind a layer is the first page of its weights",
        ),
        (["A₂3p26"], "A₂3p26 is task A₂ in layer 3, for part p26 of the batch"),
        (["W7"], "W7 is task W in layer 7"),
        (["my own", "A"], ""),
        ([], ""),
    ],
)
def test_names_of_tasks_are_read_by_an_example(names, told):
    assert naming(names) == told


@pytest.mark.parametrize("widget", ["view", "chart", "strip"])
def test_a_page_made_of_a_saved_notebook_shows_the_still(widget, request):
    """JupyterLab saves no states of widgets; then `jupyter nbconvert --to html` takes the picture."""
    bundle = request.getfixturevalue(widget)._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    output = nbformat.v4.new_output("display_data", data=data)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("builder", outputs=[output])])
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert data["image/png"] in page.replace("\n", "")


@pytest.mark.parametrize("ending", ["png", "svg", "html"])
def test_a_saved_picture_gives_its_scenario_back(view, tmp_path, ending):
    path = save_still(view.studio, tmp_path / f"wiring.{ending}")
    assert scenario_in(path).diff(view.scenario) == {}
    assert scenario_in(path).pipeline == view.pipeline


def test_the_browser_gets_the_scenario_for_its_pictures(view, monkeypatch):
    sent: list[str] = []
    monkeypatch.setattr(view, "send", lambda message: sent.append(base64.b64decode(message["kept"]).decode()))
    say(view, "keep")
    assert Scenario.from_dict(json.loads(sent[0]), "what was sent").diff(view.scenario) == {}
    say(view, "clear")
    say(view, "keep")
    assert sent[1:] == [""]


def test_a_scenario_of_many_requests_is_read_from_its_picture(view, tmp_path, monkeypatch):
    """Readers of PNG unpack no text that is longer than this, and refuse the whole picture."""
    for module in (stills, PngImagePlugin):
        monkeypatch.setattr(module, "MAX_TEXT_CHUNK", 100)
    assert len(view.studio.told()) > 100
    assert scenario_in(save_still(view.studio, tmp_path / "wiring.png")).diff(view.scenario) == {}


def test_a_picture_without_a_scenario_says_so(view, tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "other.png")
    (tmp_path / "other.html").write_text("<p>nothing</p>")
    for name in ("other.png", "other.html"):
        with pytest.raises(ScenarioError, match="holds no scenario"):
            scenario_in(tmp_path / name)
    with pytest.raises(ScenarioError, match=r"end it in \.png, \.svg or \.html"):
        save_still(view.studio, tmp_path / "wiring.txt")


def test_a_wiring_that_cannot_be_still_has_a_picture(view):
    say(view, "clear")
    bundle = view._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------------- the live run


def test_a_run_is_started_watched_paused_and_finished(view, runs):
    assert view.live["can"]
    say(view, "start")
    until(lambda: bool(runs))
    (run,) = runs
    assert run.schedule == Sequential(prefetch=True)
    assert len(run.scenario.workload.requests) == 12
    run.serve(2, 20)
    until(lambda: view.live["text"].startswith("20 of 48"))
    assert view.live["state"] == "running"
    assert not view.live["can"]
    before = view.studio.settings
    say(view, "set", name="output_len", value=0)
    assert view.studio.settings == before, "settings must not change under a run"
    say(view, "pause")
    until(lambda: view.live["state"] == "paused")
    say(view, "resume")
    until(lambda: view.live["state"] == "running")
    run.finish()
    until(lambda: view.live["state"] == "finished" and not view.studio.runs.busy)
    assert view.live["share"] == 1
    assert view.live["can"]


def test_the_gauges_of_a_run_that_has_ended_tell_the_rate_of_its_text(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    (run,) = runs
    run.serve(3, 48)
    run.progress = replace(run.progress, seconds=3.2)  # as of now; the last iteration ended at 3 s
    until(lambda: "15 tokens/s so far" in view.live["text"])
    run.finish()
    until(lambda: not view.studio.runs.busy)
    assert "16 tokens/s" in view.live["text"]
    *_, texts, notes = view.studio.runs._samples[-1]
    assert texts[0] == "16 tok/s"
    assert notes[0].startswith("whole run")


def test_a_finished_run_joins_the_figures_the_curves_and_the_lanes(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].finish()
    until(lambda: not view.studio.runs.busy)
    drawn(view)
    (row,) = measured(view)
    assert row["name"] == view.schedule.name
    assert [track["title"].partition(":")[0] for track in view.lanes["tracks"]] == ["simulated", "measured"]
    assert [line for line in view.curves["lines"] if line["kind"] == "measured"]
    assert any("measured" in sentence for sentence in view.figures["explain"])
    say(view, "set", name="output_len", value=0)
    drawn(view)
    assert not measured(view), "a run of other settings"
    say(view, "undo")
    drawn(view)
    assert measured(view)


def test_a_run_tells_what_it_loads_and_how_far_its_first_iteration_is(view, runs, monkeypatch):
    others = Noise(0.72)
    monkeypatch.setattr(live_runs, "NoiseMeter", lambda: SimpleNamespace(hear=lambda: others))
    say(view, "start")
    until(lambda: bool(runs))
    (run,) = runs
    run.phase = "reading the weights"
    until(lambda: view.live["text"].startswith("reading the weights"))
    assert view.live["state"] == "loading"
    run.reach(1, 1e-9)
    until(lambda: view.live["text"].startswith("iteration 1: 96 prompt tokens, layer 1 of 4"))
    assert "simulated" not in view.live["text"]
    assert view.live["share"] == 0
    run.reach(3, 1e6)
    until(lambda: "layer 3 of 4" in view.live["text"])
    assert view.live["share"] == pytest.approx(96 / 2 / (96 + 48))
    told = r"so far [\d,]+ times as long as the whole run is simulated to take; other programs take 72% of the cores"
    assert re.search(told, view.live["text"])
    run.serve(1, 12)
    run.reach(2, 3.0, iteration=2)
    until(lambda: view.live["text"].endswith("; iteration 2: layer 2 of 4"))
    run.finish()


def test_a_sweep_is_expected_to_take_what_the_last_run_took(view, runs, monkeypatch):
    monkeypatch.setattr(view.studio.runs, "_simulated", lambda *_: 48.0)
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].reach(2, 10.0)
    until(lambda: "layer 2 of 4" in view.live["text"])
    say(view, "stop")
    until(lambda: not view.studio.runs.busy)
    share = 96 / 4 / (96 + 48)
    earlier = view.studio.runs.earlier
    assert earlier.slower == pytest.approx(10.0 / share)
    assert 0 <= earlier.start < SECONDS
    drawn(view)
    assert view.curves["paced"] == str(earlier)
    assert min(view.curves["takes"].values()) > earlier.start
    told = []
    view.observe(lambda change: told.append(change["new"]["text"]), "live")
    say(view, "sweep", x="kv_capacity", points=3, schedules=[view.schedule.name])
    until(lambda: "about 3 min for 3 runs" in told)
    say(view, "stop")
    until(lambda: not view.studio.runs.busy)


def test_a_stop_is_told_at_once_and_then_what_was_done(view, runs, monkeypatch):
    monkeypatch.setattr(StandIn, "stop", lambda _: None)
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].reach(2, 5.0)
    until(lambda: "layer 2 of 4" in view.live["text"])
    said = []
    view.observe(lambda change: said.append(change["new"]["state"]), "live")
    say(view, "stop")
    assert said[0] == "stopping"
    runs[0].state = RunState.STOPPED
    until(lambda: not view.studio.runs.busy)
    told = r"after \d+ s, in the first iteration; nothing was measured"
    assert view.live["state"] == "stopped"
    assert re.fullmatch(told, view.live["text"])


def test_a_wiring_starts_again_only_once_a_run_of_it_has_ended(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    assert not view.live["again"]
    runs[0].finish()
    until(lambda: not view.studio.runs.busy)
    assert view.live["again"]
    say(view, "place", range=0, path=[0], device="cpu")
    assert not view.live["again"]
    assert view.live["stale"] == "of another wiring"
    say(view, "undo")
    assert view.live["again"]
    assert not view.live["stale"]
    say(view, "set", name="output_len", value=0)
    assert view.live["again"]
    assert view.live["stale"] == "at other settings"


def test_gauges_of_a_run_that_ended_tell_of_the_whole_run(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].serve(2, 20)
    until(lambda: len(view.studio.runs._samples) > 0)
    assert view.studio.runs._samples[-1][3][0].startswith("last ")
    runs[0].finish()
    until(lambda: not view.studio.runs.busy)
    _, _, texts, notes = view.studio.runs._samples[-1]
    assert texts[0] == "16 tok/s"
    assert notes[0].startswith("whole run; last ")


def test_a_stopped_run_is_no_figure(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].serve(2, 20)
    say(view, "stop")
    until(lambda: not view.studio.runs.busy)
    assert view.live["state"] == "stopped"
    assert view.live["text"].endswith("; it is not kept, since it was stopped")
    drawn(view)
    assert not measured(view)


def test_a_run_that_ended_tells_when_and_its_gauges_go_once_another_begins(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].serve(2, 20)
    until(lambda: view.live["state"] == "running")
    assert view.live["ended"] is None
    runs[0].finish()
    until(lambda: not view.studio.runs.busy)
    assert abs(view.live["ended"] - time.time()) < SECONDS
    assert view.studio.runs._samples
    sent = []
    view.send = lambda message, **_: sent.append((message, view.live["state"]))
    say(view, "start")
    assert sent[0] == ({"samples": [], "fresh": True}, "finished")
    assert view.live["ended"] is None
    until(lambda: len(runs) == 2)
    runs[1].stop()


def test_an_error_is_shown_and_the_next_run_can_start(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].fail(EngineError("lane broke; mend it."))
    until(lambda: not view.studio.runs.busy)
    assert view.live["text"] == "lane broke; mend it."
    assert view.live["can"]
    say(view, "start")
    until(lambda: len(runs) == 2)
    runs[1].stop()


def test_a_start_that_is_refused_says_why(view, monkeypatch):
    def refuse(*_: object) -> object:
        raise EngineError("the weights are gone; bring them back.")

    monkeypatch.setattr("workbench.engine.start", refuse)
    say(view, "start")
    until(lambda: not view.studio.runs.busy)
    assert "the weights are gone" in view.live["text"]
    assert view.live["can"]


def test_a_stop_while_a_run_starts_stops_it(view, monkeypatch):
    begun, go, made = threading.Event(), threading.Event(), []

    def slow(scenario: Scenario, schedule: Schedule) -> StandIn:
        begun.set()
        go.wait(SECONDS)
        made.append(StandIn(scenario, schedule))
        return made[0]

    monkeypatch.setattr("workbench.engine.start", slow)
    say(view, "start")
    assert begun.wait(SECONDS)
    say(view, "stop")
    go.set()
    until(lambda: bool(made) and made[0].state is RunState.STOPPED)
    until(lambda: not view.studio.runs.busy)


def test_settings_and_wiring_stay_while_a_run_is_going_on(view, runs):
    say(view, "set", name="output_len", value=0)
    say(view, "start")
    until(lambda: bool(runs))
    before = view.studio.settings
    for do, more in (("undo", {}), ("clear", {}), ("place", {"path": [0], "device": "cpu"}), ("code", {"text": "x"})):
        say(view, do, range=0, **more)
        assert view.studio.settings == before
    assert "press Stop first" in view.live["held"]
    runs[0].stop()
    until(lambda: not view.live["held"])


def test_figures_come_back_when_a_run_could_not_start(view, monkeypatch):
    def refuse(*_: object) -> object:
        raise EngineError("the weights are gone; bring them back.")

    monkeypatch.setattr("workbench.engine.start", refuse)
    say(view, "start")
    until(lambda: not view.studio.runs.busy)
    drawn(view)
    assert not view.figures["pending"]


def test_an_observer_may_answer_with_a_message(view):
    view.observe(lambda _: say(view, "pin") if not view.variants else None, "wiring")
    say(view, "set", name="output_len", value=0)
    assert len(view.variants) == 1


def test_an_answer_says_in_itself_that_it_is_one(view):
    numbers = list[int]()
    view.observe(lambda _: numbers.append(view.answered), "settings")
    before = view.answered
    say(view, "set", name="output_len", value=0)
    assert numbers == [before + 1] == [view.answered]


def test_a_closed_view_is_collected(scenario, runs):
    before = set(threading.enumerate())
    shown = Builder(scenario, names={})
    drawn(shown)
    gone = weakref.ref(shown.studio)
    shown.close()
    until(lambda: {thread for thread in threading.enumerate() if thread.name == "view-drawing"} <= before)
    del shown
    gc.collect()
    assert gone() is None


def test_a_second_start_begins_no_second_run(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    say(view, "start")
    assert len(runs) == 1


def test_as_soon_as_start_is_offered_again_it_starts(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].finish()
    until(lambda: view.live["state"] == "finished" and view.live["can"])
    say(view, "start")
    until(lambda: len(runs) == 2)
    runs[1].stop()


def test_a_sweep_keeps_what_was_measured_when_it_is_stopped(view, runs):
    say(view, "sweep", x="kv_capacity", points=5, schedules=[view.schedule.name, "VSLPipe"])
    for number in range(3):
        until(lambda: len(runs) > number)  # noqa: B023
        runs[number].finish()
    until(lambda: len(runs) > 3)
    say(view, "stop")
    until(lambda: not view.studio.runs.busy)
    assert len(view.studio.measured) == 3
    assert view.live["swept"] == "stopped in run 4 of 10; 3 points kept"
    assert not view.live["sweeping"]
    assert {run.schedule for run in runs} == {Sequential(prefetch=True), VSLPipe()}
    drawn(view)
    points = [line["points"] for line in view.curves["lines"] if line["kind"] == "measured"]
    assert sum(map(len, points)) == 3


def test_a_sweep_that_no_value_allows_ends_and_says_so(view, runs, monkeypatch):
    monkeypatch.setattr("workbench.widgets.state.studio.swept", lambda *_: [])
    say(view, "sweep", x="kv_capacity", points=5, schedules=[view.schedule.name])
    until(lambda: view.live["swept"] != "")
    assert view.live["swept"] == "found no value at which it could run"
    assert view.live["state"] == "none"
    assert view.live["can"]
    assert not runs


def test_a_sweep_says_about_how_long_it_takes_before_and_while_it_goes_on(view, runs):
    drawn(view)
    assert view.curves["takes"]
    told = []
    view.observe(lambda change: told.append(change["new"]["text"]), "live")
    say(view, "sweep", x="kv_capacity", points=3, schedules=[view.schedule.name])
    for number in range(2):
        until(lambda: len(runs) > number)  # noqa: B023
        runs[number].serve(2, 20)
        until(lambda: re.match(rf"run {number + 1} of 3, about \d+ \w+ left: KV capacity .*\. 20 of 48", told[-1]))  # noqa: B023
        runs[number].finish()
    until(lambda: len(runs) > 2)
    runs[2].finish()
    until(lambda: not view.studio.runs.busy)
    assert any(re.fullmatch(r"about \d+ \w+ for 3 runs", text) for text in told)
    assert view.live["text"].startswith("run 3 of 3: KV capacity")


def test_a_page_that_is_opened_again_gets_the_history(view, runs):
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].serve(2, 20)
    until(lambda: len(view.studio.runs._samples) > 0)
    sent = []
    view.send = lambda message, **_: sent.append(message)
    say(view, "ready")
    assert sent[0]["fresh"]
    assert len(sent[0]["samples"]) >= 1
    runs[0].stop()


# ------------------------------------------------------------------------------------------------------ a calibration


def calibrated(scenario: Scenario, others: float = 0.0) -> Machine:
    profile = Profile(profile_shape(scenario.model, scenario.precision), (), others=others)
    return replace(scenario.machine, profiles=(profile,), measured="today")


class Bench:
    """A calibration that goes on as it is told to, and gives the machine of its model or an error."""

    def __init__(self, monkeypatch, scenario: Scenario) -> None:
        self._scenario = scenario
        self.asked, self.begun, self.go = {}, threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.others = 0.0
        monkeypatch.setattr("workbench.engine.calibrate", self.calibrate)
        monkeypatch.setattr(live_runs, "_CALM", 0.0)

    def calibrate(self, model: object, *, watch: Callable[[float], object], **asked: object) -> Machine:
        self.asked = {"model": model, **asked}
        watch(0.0)
        self.begun.set()
        while not self.go.wait(0.01):
            watch(0.25)
        if self.error is not None:
            raise self.error
        return calibrated(self._scenario, others=self.others)


@pytest.fixture
def bench(monkeypatch, scenario) -> Bench:
    return Bench(monkeypatch, scenario)


def machine_shown(view: View) -> str:
    controls = {each["name"]: each for group in view.settings["groups"] for each in group["controls"]}
    return controls["machine"]["value"]


def test_a_calibration_is_offered_and_its_machine_takes_the_place_of_the_one_without(view, bench):
    before, named = view.studio.settings, machine_shown(view)
    assert view.live["calibrate"] == "Calibrate (1 to 2 min)"
    assert view.settings["uncalibrated"]
    say(view, "calibrate")
    assert bench.begun.wait(SECONDS)
    memory = before.memory
    asked = {"model": before.model, "weights": memory.weights, "kv": memory.kv, "device": "cpu", "refresh": False}
    assert bench.asked == asked
    until(lambda: re.fullmatch(r"timing operations of tiny, about \d+ s left", view.live["text"]))
    assert (view.live["state"], view.live["calibrating"], view.live["share"]) == ("loading", True, 0.25)
    assert view.live["held"].startswith("Settings and wiring stay as they are while a calibration is going on")
    bench.go.set()
    until(lambda: not view.studio.runs.busy)
    now = view.studio.settings
    assert now == before.on(machine=now.machine)
    assert now.machine.profiles
    assert machine_shown(view) == named
    assert not view.settings["uncalibrated"]
    assert (view.live["noted"], view.live["calibrate"]) == ("Calibrated for tiny.", "")
    assert (view.live["state"], view.live["calibrating"]) == ("none", False)
    say(view, "undo")
    assert view.studio.settings == before
    assert machine_shown(view) == named
    assert (view.live["noted"], view.live["calibrate"]) == ("", "Calibrate (1 to 2 min)")
    say(view, "redo")
    assert view.studio.settings == now


def test_one_that_was_calibrated_is_found_again_under_its_name(view, bench):
    named = machine_shown(view)
    bench.go.set()
    say(view, "calibrate")
    until(lambda: view.studio.settings.machine.profiles and not view.studio.runs.busy)
    found = view.studio.settings.machine
    say(view, "set", name="machine", value=next(iter(machines_offered(wb.machines["a40"]))))
    assert not view.live["calibrate"]
    say(view, "set", name="machine", value=named)
    assert view.studio.settings.machine == found
    say(view, "set", name="machine", value=next(iter(machines_offered(wb.machines["a40"]))))
    say(view, "here")
    assert view.studio.settings.machine == found


def test_a_calibration_tells_the_load_that_it_was_made_under_and_is_offered_again(view, bench):
    bench.others = 0.12
    bench.go.set()
    say(view, "calibrate")
    until(lambda: view.live["noted"] != "" and not view.studio.runs.busy)
    assert view.live["noted"] == "Calibrated for tiny, while other programs took 12 % of the cores."
    assert view.live["calibrate"] == "Calibrate again (1 to 2 min)"
    bench.others = 0.0
    say(view, "calibrate")
    until(lambda: view.live["noted"] == "Calibrated for tiny." and not view.studio.runs.busy)
    assert bench.asked["refresh"]
    assert view.live["calibrate"] == ""


def test_no_run_begins_beside_a_calibration_and_none_beside_a_run(view, bench, runs):
    say(view, "calibrate")
    assert bench.begun.wait(SECONDS)
    say(view, "start")
    say(view, "calibrate")
    assert not view.live["can"]
    say(view, "stop")
    until(lambda: not view.studio.runs.busy)
    assert not runs
    assert view.live["noted"] == "The calibration was stopped."
    assert not view.studio.settings.machine.profiles
    say(view, "start")
    until(lambda: bool(runs))
    bench.begun.clear()
    say(view, "calibrate")
    runs[0].finish()
    until(lambda: not view.studio.runs.busy)
    assert not bench.begun.is_set()


def test_the_last_run_is_shown_again_after_a_calibration_that_failed(view, bench, runs):
    say(view, "start")
    until(lambda: bool(runs))
    runs[0].finish()
    until(lambda: not view.studio.runs.busy)
    shown, samples = view.live, view.studio.runs._samples
    bench.error = EngineError("a live run goes on elsewhere; wait for it.")
    bench.go.set()
    say(view, "calibrate")
    until(lambda: view.live["noted"] != "")
    assert view.live == {**shown, "noted": f"The calibration failed: {bench.error}"}
    assert view.studio.runs._samples is samples


def test_what_cannot_be_calibrated_or_is_offers_no_calibration(scenario, runs, bench):
    away = scenario.on(machine=replace(scenario.machine, host="elsewhere"))
    without = scenario.on(model=tiny_model())
    for each in (away, without, scenario.on(machine=calibrated(scenario))):
        shown = Builder(each, names={})
        assert shown.live["calibrate"] == ""
        say(shown, "calibrate")
        assert not shown.studio.runs.busy
        shown.close()


# ------------------------------------------------------------------------------------------------------- the machinery


def test_rates_are_taken_over_the_last_seconds():
    monitor = Monitor(window=2.0)
    for second in range(1, 11):
        tokens = 10 * second if second <= 5 else 50 + 40 * (second - 5)
        busy = {"gpu": 0.5 * second}
        readings = monitor.read(Progress(seconds=float(second), iterations=second, emitted=tokens, busy=busy))
    output = readings[0]
    gpu = readings[[channel.label for channel in CHANNELS].index("gpu lane busy")]
    assert output.value == pytest.approx(40)
    assert output.text == "40 tok/s"
    assert output.note == "last 3 s; whole run 25 tok/s"
    assert gpu.value == pytest.approx(0.5)
    assert gpu.note == "last 3 s; whole run 50%"
    assert len(readings) == len(CHANNELS)


def test_gauges_of_a_run_that_ended_keep_the_most_blocks():
    monitor = Monitor()
    monitor.read(Progress(seconds=1.0, iterations=1, used_blocks=9, blocks=12))
    last = monitor.read(Progress(seconds=2.0, iterations=2, used_blocks=4, blocks=12), ended=True)
    blocks = last[[channel.label for channel in CHANNELS].index("KV blocks in use")]
    assert blocks.text == "9"
    assert blocks.note == "of 12, at most; 4 at the end"


def test_a_long_iteration_leaves_the_rate_of_the_last_ones():
    monitor = Monitor(window=1.0)
    monitor.read(Progress(seconds=1.0, iterations=1, emitted=10))
    monitor.read(Progress(seconds=2.0, iterations=2, emitted=20))
    output = monitor.read(Progress(seconds=9.0, iterations=2, emitted=20))[0]
    assert output.value == pytest.approx(10)
    assert output.note == "last 1 s; whole run 10 tok/s"


def test_the_rate_of_a_run_that_has_ended_is_until_its_last_iteration():
    monitor = Monitor()
    monitor.read(Progress(seconds=2.1, iterations=2, emitted=20))
    ended = Progress(seconds=2.0, iterations=2, emitted=20)
    assert monitor.read(ended)[0].note == "last 2 s; whole run 10 tok/s"
    assert monitor.rate == pytest.approx(10)


def test_the_lanes_of_a_run_that_was_stopped_are_read_until_its_last_iteration():
    monitor = Monitor(window=1.0)
    monitor.read(Progress(seconds=2.0, iterations=2, busy={"gpu": 1.0}))
    for seconds in (3.0, 4.5, 6.0):
        monitor.read(Progress(seconds=seconds, iterations=2, busy={"gpu": 1.0}))
    last = monitor.read(Progress(seconds=2.0, iterations=2, busy={"gpu": 1.0}), ended=True)
    gpu = last[[channel.label for channel in CHANNELS].index("gpu lane busy")]
    assert gpu.text == "50%"
    assert gpu.value == pytest.approx(0.5)


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


def test_a_pause_ends_with_a_newer_value():
    paused = []

    def work(value: float, overtaken: Callable[[], bool]) -> None:
        worker.pause(value)
        paused.append((value, overtaken()))

    worker = Newest(work, "test")
    worker.put(60 * SECONDS)
    until(lambda: worker._busy)
    worker.put(0.01)
    assert worker.wait(SECONDS)
    assert paused == [(60 * SECONDS, True), (0.01, False)]
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
