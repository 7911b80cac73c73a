"""Exploring without a browser: messages are sent in plain Python, and every number is that of a sweep."""

import base64
import io
import math
import threading
from contextlib import suppress
from dataclasses import replace

import nbformat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbconvert import HTMLExporter
from PIL import Image

import workbench as wb
from tests.builders import tiny_scenario
from tests.examples import examples
from workbench.analysis.explain import explain
from workbench.analysis.sweeps.grid import make_grid
from workbench.analysis.sweeps.reading import VARIABLES, Base, Row
from workbench.core.errors import ScenarioError
from workbench.core.result import Source
from workbench.schedules import Sequential, VSLPipe
from workbench.widgets import Explore
from workbench.widgets.explore import readings as readings_
from workbench.widgets.explore.explorer import Explorer
from workbench.widgets.explore.look import first_look, matrix, outward
from workbench.widgets.explore.measured import Measured, sweep_of
from workbench.widgets.explore.picture import number
from workbench.widgets.explore.readings import Readings

SCENARIO = tiny_scenario([8] * 6, [4] * 6)
BLOCK = SCENARIO.memory.kv_block * SCENARIO.model.kv_bytes_per_token("bf16")
SCHEDULES = [Sequential(), VSLPipe()]
OVER = {
    "memory.kv_capacity": [2 * BLOCK, 3 * BLOCK, 9 * BLOCK],
    "machine.link": ["1MB/s", "1GB/s"],
    "memory.kv_block": [4, 2],
}
SECONDS = 60.0
"""Longest time to wait for what takes a moment."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    store = tmp_path_factory.mktemp("swept") / "readings.sqlite"
    return wb.sweep(SCENARIO, over=OVER | {"schedule": SCHEDULES}, store=store)


@pytest.fixture
def view():
    shown = Explore(SCENARIO, over=OVER, schedules=SCHEDULES)
    assert shown.wait(SECONDS)
    yield shown
    shown.close()


@pytest.fixture
def opened(swept):
    shown = Explore(swept)
    yield shown
    shown.close()


def say(view, **message):
    """Send a message as the browser does, and wait until everything is read."""
    view._received(None, {**message, "n": view.answered + 1}, None)
    assert view.wait(SECONDS)


def numbers(view):
    """What the cells show, NaN for none."""
    rows = view.explored["cells"]
    return np.array([[math.nan if cell["value"] is None else cell["value"] for cell in row] for row in rows])


def same(found, expected):
    np.testing.assert_array_equal(found, expected)


# --------------------------------------------------------------------------------------------------------- pictures


def test_it_begins_with_curves_over_the_first_number_at_the_scenarios_own_values(view, swept):
    shown = view.explored
    assert (shown["kind"], shown["x"]["name"], shown["y"]["name"]) == ("lines", "kv_capacity", "schedule")
    own = {"link": 1e9, "kv_block": SCENARIO.memory.kv_block}
    part = swept.dataset.sel(own)
    same(numbers(view), part.gen_tok_s.transpose("schedule", "kv_capacity").values)
    same(np.array(shown["bounds"], dtype=float), part.bound_gen_tok_s.isel(schedule=[0]).values.T)
    assert (shown["read"], shown["of"], shown["busy"]) == (6, 6, False)


def test_controls_that_are_no_axis_choose_the_slice(view, swept):
    say(view, do="set", name="link", value=0)
    part = swept.dataset.sel(link=1e6, kv_block=SCENARIO.memory.kv_block)
    same(numbers(view), part.gen_tok_s.transpose("schedule", "kv_capacity").values)


@pytest.mark.parametrize("value", ["gen_tok_s", "ttft", "seconds"])
def test_any_two_axes_make_a_heat_map_of_any_number(view, swept, value):
    say(view, do="y", name="link")
    say(view, do="value", name=value)
    shown = view.explored
    part = swept.dataset.sel(schedule="Sequential", kv_block=SCENARIO.memory.kv_block)
    expected = part[value].transpose("link", "kv_capacity").where(part.problem == "").values
    same(numbers(view), expected)
    row, column = shown["best"]
    assert numbers(view)[row, column] == (np.nanmax if VARIABLES[value].more else np.nanmin)(expected)
    say(view, do="x", name="schedule")
    say(view, do="y", name="kv_block")
    assert numbers(view).shape == (2, 2)
    say(view, do="y", name="")
    assert view.explored["kind"] == "lines"


def test_numeric_axes_ascend_however_their_values_were_given(view, swept):
    say(view, do="x", name="kv_block")
    assert view.explored["x"]["at"] == [2.0, 4.0]
    own = {"link": 1e9, "kv_capacity": view.chosen.labels["kv_capacity"]}
    part = swept.dataset.sel(own).sortby("kv_block")
    same(numbers(view), part.gen_tok_s.transpose("schedule", "kv_block").values)


def test_axes_change_places_rather_than_meet(view):
    say(view, do="y", name="link")
    say(view, do="x", name="link")
    assert (view.explored["x"]["name"], view.explored["y"]["name"]) == ("link", "kv_capacity")
    say(view, do="y", name="link")
    assert (view.explored["x"]["name"], view.explored["y"]["name"]) == ("kv_capacity", "link")


def test_what_was_set_aside_says_its_reason(view):
    say(view, do="choose", row=1, column=0)
    cell = view.explored["cells"][1][0]
    assert cell["value"] is None
    assert "needs a KV cache of 11 tokens" in cell["why"]
    assert view.point["problem"] == cell["why"] == view.chosen.problem
    assert not view.point["busy"]


def test_a_number_that_is_not_known_is_told(view):
    say(view, do="value", name="gpu_price")
    assert view.explored["cells"][0][1]["why"] == "purchase price of the GPUs is not known here"


# ------------------------------------------------------------------------------------------------- the chosen point


def test_the_chosen_point_is_a_scenario_a_schedule_and_a_result(view):
    say(view, do="choose", row=1, column=2)
    point = view.chosen
    assert point.schedule == VSLPipe()
    assert point.scenario.memory == replace(SCENARIO.memory, kv_capacity=9 * BLOCK)
    assert point.result.gen_tok_s == wb.simulate(point.scenario, point.schedule).gen_tok_s == numbers(view)[1, 2]
    assert point.result.source is Source.SIMULATED
    assert view.point["title"] == f"KV capacity {9 * BLOCK / 1e3:.3g} kB, link 1 GB/s, KV block 4, schedule VSLPipe"
    assert view.point["sentences"] == explain([wb.bound(point.scenario, point.schedule), point.result])


def test_the_controls_stand_where_the_chosen_point_is(view):
    say(view, do="choose", row=1, column=2)
    at = {each["name"]: each.get("at", each.get("value")) for each in view.settings["groups"][0]["controls"]}
    assert at == {"kv_capacity": 2, "link": 1, "kv_block": 0, "schedule": "1"}
    assert view.explored["at"] == [1, 2]


# ------------------------------------------------------------------------------------------------------- sweeps


def test_a_sweep_opens_and_nothing_is_computed(opened, swept, monkeypatch):
    assert opened.wait(SECONDS)
    monkeypatch.setattr(readings_, "read_point", None)
    monkeypatch.setattr(Readings, "explain", lambda *_: None)
    for message in ({"do": "y", "name": "link"}, {"do": "set", "name": "schedule", "value": "1"}):
        say(opened, **message)
    part = swept.dataset.sel(schedule="VSLPipe", kv_block=4)
    same(numbers(opened), part.gen_tok_s.transpose("link", "kv_capacity").values)
    assert not opened.explored["problem"]


def test_fields_that_go_along_together_have_one_control(tmp_path):
    over = {"memory.kv_capacity": [9 * BLOCK, 3 * BLOCK], "machine.link": ["1GB/s", "1MB/s"]}
    zipped = wb.sweep(SCENARIO, VSLPipe(), over=over, zipped=True, store=tmp_path / "s")
    shown = Explore(zipped)
    (control,) = shown.settings["groups"][0]["controls"]
    assert control["steps"] == [f"{9 * BLOCK / 1e3:.3g} kB, 1 GB/s", f"{3 * BLOCK / 1e3:.3g} kB, 1 MB/s"]
    same(numbers(shown), [zipped.dataset.gen_tok_s.values[::-1]])
    say(shown, do="x", name="link")
    assert shown.explored["x"]["at"] == [1e6, 1e9]
    say(shown, do="y", name="kv_capacity")
    assert shown.explored["kind"] == "lines"
    say(shown, do="set", name="kv_capacity", value=1)
    assert shown.chosen.labels == {"kv_capacity": 3 * BLOCK, "link": 1e6}
    with pytest.raises(ScenarioError, match="its fields go along together; leave y out"):
        Explore(zipped, y="link")
    shown.close()


def test_points_are_found_in_a_file_and_committed_to_it(tmp_path, monkeypatch):
    store = tmp_path / "readings.sqlite"
    over = {"memory.kv_capacity": [3 * BLOCK, 9 * BLOCK]}
    first = Explore(SCENARIO, over=over, schedules=SCHEDULES, store=store)
    assert first.wait(SECONDS)
    expected = numbers(first)
    first.close()
    monkeypatch.setattr("workbench.analysis.sweeps.running.read_chunk", None)
    again = wb.sweep(SCENARIO, over=over | {"schedule": SCHEDULES}, store=store)
    same(again.dataset.gen_tok_s.values.T, expected)
    monkeypatch.setattr(Readings, "read", None)
    monkeypatch.setattr(Readings, "explain", lambda *_: None)
    found = Explore(SCENARIO, over=over, schedules=SCHEDULES, store=store)
    assert found.wait(SECONDS)
    same(numbers(found), expected)
    found.close()


# ------------------------------------------------------------------------------------------------------ pictures


def test_the_picture_of_matplotlib_is_that_of_the_sweep(view, swept):
    (ax,) = view.plot().axes
    own = {"link": [1e9], "kv_block": [SCENARIO.memory.kv_block]}
    (twin,) = wb.plots.plot_sweep(swept.dataset.sel(own), "kv_capacity")
    assert [line.get_label() for line in ax.lines] == [line.get_label() for line in twin.lines]
    for line, other in zip(ax.lines, twin.lines, strict=True):
        same(line.get_xydata(), other.get_xydata())
    assert (ax.get_xlabel(), ax.get_ylabel()) == (twin.get_xlabel(), twin.get_ylabel())


def test_the_chosen_point_of_the_picture_has_its_value_beside_it(view):
    (ax,) = view.plot().axes
    (mark,) = ax.texts
    value = view.chosen.numbers["gen_tok_s"]
    assert mark.get_text() == number("gen_tok_s", value)
    assert mark.xy[1] == value


def test_a_page_without_kernel_has_the_picture(view):
    bundle = view._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data
    with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as picture:
        assert picture.width > 700


def test_an_exported_page_shows_the_picture(view):
    """JupyterLab saves no states of widgets; then `jupyter nbconvert --to html` takes the picture."""
    bundle = view._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    output = nbformat.v4.new_output("display_data", data=data)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("view", outputs=[output])])
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert data["image/png"] in page.replace("\n", "")


def test_a_picture_without_any_point_says_why():
    shown = Explore(SCENARIO, over={"memory.kv_capacity": [2 * BLOCK]}, schedules=SCHEDULES)
    (ax,) = shown.plot().axes
    assert "needs a KV cache of 11" in ax.texts[0].get_text().replace("\n", " ")
    shown.close()


# --------------------------------------------------------------------------------------------------------- reading


class Slow:
    """Readings that go on when they are let to."""

    def __init__(self, monkeypatch):
        self.read, self.go, self.begun = [], threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(readings_, "read_point", self._read)

    def _read(self, base, values):
        if base.read is wb.bound:  # not the reader of points
            return Row({"bound_gen_tok_s": 2.0})
        self.begun.release()
        assert self.go.acquire(timeout=SECONDS)
        self.read.append(values["machine.link"])
        return Row({"gen_tok_s": 1.0}, source="simulated")


@pytest.fixture
def slow(monkeypatch):
    return Slow(monkeypatch)


@pytest.fixture
def explorer(slow, monkeypatch):
    base = Base(SCENARIO, VSLPipe(), wb.simulate)
    grid = make_grid(
        SCENARIO,
        VSLPipe(),
        {"memory.kv_capacity": OVER["memory.kv_capacity"], "machine.link": [1e6, 1e9]},
        zipped=False,
    )
    shown = {}
    made = Explorer(Readings(base, grid, {}), first_look(grid, base), lambda **parts: shown.update(parts))
    made.shown = shown
    yield made
    made.close()
    slow.go.release(100)


def test_a_newer_move_leaves_the_points_of_the_one_before(explorer, slow):
    assert slow.begun.acquire(timeout=SECONDS)
    explorer.answer({"do": "set", "name": "link", "value": 0})
    slow.go.release(100)
    assert explorer.wait(SECONDS)
    assert slow.read == [1e9, 1e6, 1e6, 1e6]
    explorer.answer({"do": "set", "name": "link", "value": 1})
    assert explorer.wait(SECONDS)
    assert slow.read == [1e9, 1e6, 1e6, 1e6, 1e9, 1e9]


def test_what_is_known_is_shown_while_the_rest_is_read(explorer, slow):
    assert slow.begun.acquire(timeout=SECONDS)
    shown = explorer.shown["explored"]
    assert shown["busy"]
    assert shown["bounds"] == [[2.0, 2.0, 2.0]]
    assert all(cell == {"value": None, "why": ""} for cell in shown["cells"][0])
    slow.go.release()
    assert slow.begun.acquire(timeout=SECONDS)
    explorer.answer({"do": "set", "name": "kv_capacity", "value": 0})
    assert explorer.shown["explored"]["read"] == 1
    assert explorer.shown["explored"]["at"] == [0, 0]


def test_a_simulation_ends_when_it_is_overtaken_and_is_not_kept():
    base = Base(SCENARIO, VSLPipe(), wb.simulate)
    grid = make_grid(SCENARIO, VSLPipe(), {"memory.kv_capacity": [9 * BLOCK]}, zipped=False)
    found = Readings(base, grid, {})
    assert found.read((0,), lambda: True) is None
    found.explain((0,), lambda: True)
    assert (found.rows, found.explained((0,))) == ({}, None)
    whole = wb.simulate(*base.at(grid.values((0,))))
    assert found.read((0,)).numbers["gen_tok_s"] == whole.gen_tok_s
    assert found.explained((0,)) == explain([wb.bound(*base.at(grid.values((0,)))), whole])


def test_a_heat_map_waits_for_no_bounds(explorer, slow):
    assert slow.begun.acquire(timeout=SECONDS)
    known = len(explorer.readings.bounds)
    explorer.answer({"do": "y", "name": "link"})
    slow.go.release(100)
    assert explorer.wait(SECONDS)
    assert len(explorer.readings.bounds) == known == 3
    assert explorer.shown["explored"]["read"] == 6


def test_the_chosen_point_is_read_first_and_then_those_around_it():
    grid = make_grid(SCENARIO, VSLPipe(), {"memory.kv_capacity": [4096 * n for n in range(1, 8)]}, zipped=False)
    look = first_look(grid, Base(SCENARIO, VSLPipe(), wb.simulate))
    ordered = [place[0] for place in outward(matrix(grid, look), (2,))]
    assert ordered[0] == 2
    assert [abs(place - 2) for place in ordered] == [0, 1, 1, 2, 2, 3, 4]


MESSAGES = st.one_of(
    st.builds(
        dict, do=st.just("set"), name=st.sampled_from(["kv_capacity", "link", "kv_block"]), value=st.integers(-2, 9)
    ),
    st.builds(
        dict, do=st.sampled_from(["x", "y"]), name=st.sampled_from(["kv_capacity", "link", "kv_block", "schedule", ""])
    ),
    st.builds(dict, do=st.just("choose"), row=st.integers(-1, 3), column=st.integers(-1, 3)),
    st.builds(dict, do=st.just("value"), name=st.sampled_from([*VARIABLES, "none"])),
)


@given(messages=st.lists(MESSAGES, max_size=12))
@examples(60)
def test_whatever_is_asked_the_picture_is_of_two_axes_and_has_the_chosen_point(swept, messages):
    shown = {}
    readings = Readings(swept.base, swept.grid, swept.rows)
    explorer = Explorer(readings, first_look(swept.grid, swept.base), lambda **parts: shown.update(parts))
    explorer.readings.explain = lambda *_: None
    for message in messages:
        with suppress(ScenarioError):
            explorer.answer(message)
        look, picture = explorer.look, shown["explored"]
        assert look.x != look.y
        row, column = picture["at"]
        assert matrix(swept.grid, look)[row][column] == look.at
        up = picture["y"]["words"] if picture["y"] else [""]
        assert [len(cells) for cells in picture["cells"]] == [len(picture["x"]["words"])] * len(up)
    explorer.close()


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"what": lambda ax: ax}, "Explore takes a Scenario or a Sweep, not function; .* Sliders"),
        ({"what": SCENARIO}, "Explore needs fields, as in over="),
        ({"what": SCENARIO, "over": {"memory.kv_capacities": [1]}}, "'memory.kv_capacities' is no field"),
        ({"what": SCENARIO, "over": OVER, "x": "kv"}, "there is no axis 'kv'; the axes are kv_capacity, link"),
        ({"what": SCENARIO, "over": OVER, "x": "link", "y": "link"}, "both are 'link'; leave y out"),
        ({"what": SCENARIO, "over": OVER, "value": "speed"}, "a point has no 'speed'; it has gen_tok_s"),
    ],
)
def test_what_cannot_be_explored_is_refused_in_one_sentence(given, words):
    with pytest.raises(ScenarioError, match=words):
        Explore(given.pop("what"), **given)


def test_a_sweep_takes_no_fields(swept):
    with pytest.raises(ScenarioError, match=r"give Explore\(sweep\) nothing else"):
        Explore(swept, over=OVER)


def test_a_message_that_cannot_be_answered_is_told_until_the_next(view):
    say(view, do="x", name="nothing")
    assert "there is no axis 'nothing'" in view.explored["problem"]
    say(view, do="value", name="ttft")
    assert view.explored["problem"] == ""


# -------------------------------------------------------------------------------------------------- what was run


def ran(scenario, schedule):
    """A run of which simulation says what it measured."""
    result = wb.simulate(scenario, schedule)
    return Measured(scenario, schedule, replace(result, source=Source.MEASURED))


def test_runs_are_a_sweep_over_what_differed():
    scenarios = [SCENARIO.on(memory=replace(SCENARIO.memory, kv_capacity=blocks * BLOCK)) for blocks in (3, 9)]
    runs = [ran(scenarios[0], Sequential()), ran(scenarios[0], VSLPipe()), ran(scenarios[1], VSLPipe())]
    found = sweep_of([*runs, runs[-1]])
    assert found.grid.dims == ("kv_capacity", "schedule")
    rates = {(3, "Sequential"): runs[0], (3, "VSLPipe"): runs[1], (9, "VSLPipe"): runs[2]}
    for (blocks, name), each in rates.items():
        at = found.dataset.sel(kv_capacity=blocks * BLOCK, schedule=name)
        assert float(at.gen_tok_s) == each.result.gen_tok_s
    (aside,) = found.problems
    assert (aside.labels["schedule"], aside.problem) == ("Sequential", "this was not run")
    assert found.best().result.source is Source.RECORDED
    shown = Explore(found)
    assert shown.wait(SECONDS)
    assert shown.explored["cells"][0][1]["why"] == "this was not run"
    shown.close()


def test_runs_that_are_of_other_machines_or_slower_links_are_told_apart():
    slower = SCENARIO.on(machine=SCENARIO.machine.limit(link="1MB/s"))
    assert sweep_of([ran(SCENARIO, VSLPipe()), ran(slower, VSLPipe())]).grid.dims == ("link",)
    one = sweep_of([ran(SCENARIO, VSLPipe())])
    assert one.grid.dims == ("schedule",)
    with pytest.raises(ScenarioError, match="nothing has been run here yet"):
        sweep_of([])
