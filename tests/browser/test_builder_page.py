"""The pipeline builder on a plain page: mouse, keyboard, faults, themes and readers of screens, without Python.

A stand-in answers as the contract of traits and messages says; what Python answers is tested with the widget.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Session
from tests.builders import tiny_scenario
from tests.systems import VSL
from workbench.core.errors import ScenarioError
from workbench.scenario import Scenario
from workbench.widgets import scenario_in
from workbench.widgets.stills import packed

pytestmark = [pytest.mark.alone, pytest.mark.browser, pytest.mark.timeout(240)]

WEB = Path(__file__).parents[2] / "workbench" / "widgets" / "web"
AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
VSLPIPE = ["qkv", "prefill_attention", "decode_attention", "out_proj", "route", "experts", "combine"]


class Files(SimpleHTTPRequestHandler):
    """The folder of the browser side, without a line of log per file."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(WEB)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/dev/index.html"
    server.shutdown()


class Builder:
    """A page with the builder in one of the stand-in's scenes."""

    def __init__(self, session: Session, address: str, scene: str, theme: str = "light", delay: int = 20) -> None:
        self.page = session.page
        self.page.goto(f"{address}?scene={scene}&theme={theme}&delay={delay}")
        self.page.locator(".wb-canvas").wait_for()
        self.settled()

    def settled(self) -> None:
        """Wait until every message is answered and two frames are drawn."""
        self.page.wait_for_function("fake.state.answered === (fake.sent.at(-1)?.n ?? 0)")
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def sent(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = self.page.evaluate("fake.sent")
        return [message for message in said if message["do"] != "ready"]

    def middle(self, selector: str) -> tuple[float, float]:
        box = self.page.locator(selector).bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def drag(self, selector: str, to: tuple[float, float]) -> None:
        self.page.mouse.move(*self.middle(selector))
        self.page.mouse.down()
        self.page.mouse.move(*to, steps=6)
        self.page.mouse.up()
        self.settled()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
            self.settled()

    def cards(self) -> dict[str, str]:
        """Device of every card, from left to right."""
        script = """[...document.querySelectorAll('[data-card]')]
            .sort((a, b) => a.getBoundingClientRect().x - b.getBoundingClientRect().x)
            .map(card => [card.dataset.card, card.matches('.wb-card-gpu') ? 'gpu' : 'cpu'])"""
        return dict(self.page.evaluate(script))

    def focused(self) -> str | None:
        name: str | None = self.page.evaluate("document.activeElement.dataset.card ?? null")
        return name


@pytest.fixture
def opened(session: Session, address: str) -> Iterator[Any]:
    """Open a scene; at the end nothing has gone wrong on its page."""
    yield functools.partial(Builder, session, address)
    assert (session.errors, session.requests) == ([], [])


def test_a_card_dropped_on_the_other_lane_moves_there_and_brings_its_transfers(opened):
    builder = opened("vslpipe")
    x, y = builder.middle("[data-card=experts]")
    builder.drag("[data-card=experts]", (x, builder.middle("[data-card=decode_attention]")[1]))
    assert builder.sent() == [{"do": "place", "range": 0, "path": [7], "device": "cpu", "n": 2}]
    assert builder.cards()["experts"] == "cpu"
    assert builder.page.locator(".wb-transfer").count() == 4
    builder.drag("[data-card=experts]", (x, y))
    assert builder.cards()["experts"] == "gpu"
    assert builder.page.locator(".wb-transfer").count() == 2


def test_a_card_dropped_elsewhere_in_its_lane_changes_the_order(opened):
    builder = opened("vslpipe")
    x, y = builder.middle("[data-card=qkv]")
    builder.drag("[data-card=route]", (x - 60, y))
    assert builder.sent()[-1] == {"do": "shift", "range": 0, "path": [6], "to": [0], "n": 2}
    assert list(builder.cards())[:2] == ["route", "qkv"]


def test_one_drop_on_another_lane_and_place_is_one_message(opened):
    builder = opened("vslpipe")
    left, right = builder.middle("[data-card=route]"), builder.middle("[data-card=experts]")
    low = builder.middle("[data-card=decode_attention]")[1]
    builder.drag("[data-card=out_proj]", ((left[0] + right[0]) / 2 + 4, low))
    assert builder.sent() == [{"do": "place", "range": 0, "path": [5], "device": "cpu", "to": [7], "n": 2}]
    assert list(builder.cards())[3:5] == ["route", "out_proj"]


def test_a_pipeline_is_wired_by_mouse_from_an_empty_canvas(opened):
    builder = opened("empty")
    for name in VSLPIPE:
        box = builder.page.locator(".wb-canvas").bounding_box()
        height = 0.8 if name == "decode_attention" else 0.2
        builder.drag(f"[data-op={name}]", (box["x"] + box["width"] - 30, box["y"] + box["height"] * height))
    assert builder.cards() == {name: "cpu" if name == "decode_attention" else "gpu" for name in VSLPIPE}
    assert builder.page.locator(".wb-transfer").count() == 2


def test_a_pipeline_is_wired_by_keyboard_from_an_empty_canvas(opened):
    builder = opened("empty")
    builder.page.locator("[data-op=qkv]").focus()
    for _ in VSLPIPE:
        builder.press("Enter")
        builder.press("ArrowRight")
        if builder.page.evaluate("document.activeElement.dataset.op") == "shared_experts":
            builder.press("ArrowRight")
    builder.press("Escape", "Home", "ArrowRight", "ArrowRight")
    assert builder.focused() == "decode_attention"
    builder.press("ArrowDown")
    assert builder.cards() == {name: "cpu" if name == "decode_attention" else "gpu" for name in VSLPIPE}
    assert builder.focused() == "decode_attention"


def test_keys_move_order_fork_join_remove_and_undo(opened):
    builder = opened("vslpipe")
    builder.page.locator("[data-card=route]").focus()
    builder.press("Alt+ArrowLeft")
    assert list(builder.cards())[3:5] == ["route", "out_proj"]
    builder.press("f")
    assert builder.page.locator(".wb-fork-head").count() == 1
    builder.press("j")
    assert builder.page.locator(".wb-fork-head").count() == 0
    builder.press("Delete")
    assert "route" not in builder.cards()
    assert builder.focused() == "out_proj"
    builder.press("Control+z", "Control+z", "Control+z", "Control+z")
    assert list(builder.cards()) == VSLPIPE
    builder.press("Control+Shift+z")
    assert list(builder.cards())[3:5] == ["route", "out_proj"]
    said = builder.page.locator(".wb-builder > [role=status]").last.inner_text()
    assert said.strip() == "route removed."


def test_the_keys_of_undo_count_on_a_slider_and_not_where_text_is_typed(opened):
    builder = opened("vslpipe")
    builder.page.locator("[data-card=route]").focus()
    builder.press("Delete")
    builder.page.locator(".wb-editor textarea").focus()
    builder.press("Control+z")
    assert "route" not in builder.cards()
    builder.page.get_by_label("KV capacity").first.focus()
    builder.press("Control+z")
    builder.page.locator("[data-card=route]").wait_for()
    builder.press("Control+y")
    builder.page.locator("[data-card=route]").wait_for(state="detached")


@pytest.mark.parametrize("focus", ["[data-card=out_proj]", ".wb-slider input"])
def test_after_a_step_in_the_history_what_is_added_follows_no_card_that_was_chosen_before(opened, focus):
    builder = opened("vslpipe")
    builder.page.locator("[data-card=out_proj]").focus()
    builder.press("ArrowDown")
    builder.page.locator(focus).first.focus()
    builder.press("Control+z")
    assert [message["do"] for message in builder.sent()] == ["place", "undo"]
    builder.page.locator("[data-op=gate_norm]").focus()
    builder.press("Enter")
    assert list(builder.cards())[-1] == "gate_norm"


def test_options_open_by_enter_and_give_the_focus_back(opened):
    builder = opened("vslpipe")
    builder.page.locator("[data-card=experts]").focus()
    builder.press("Enter")
    builder.page.get_by_label("defer experts").fill("3")
    builder.settled()
    assert builder.sent()[-1] == {"do": "option", "range": 0, "path": [7], "name": "defer", "value": 3, "n": 2}
    builder.press("Escape")
    assert builder.focused() == "experts"
    assert "defer 3" in builder.page.locator("[data-card=experts]").inner_text()


def test_an_option_that_cannot_be_set_is_described_by_its_reason(opened):
    builder = opened("vslpipe")
    builder.page.evaluate(
        """reasons => {
        const wiring = structuredClone(fake.state.wiring);
        const card = wiring.ranges[0].chain.find(each => each.name === "experts");
        for (const option of card.options) option.why = reasons[option.name] ?? "";
        fake.put({wiring});
    }""",
        {"defer": "no decodes", "skip": "no decodes", "experts": "of some rows"},
    )
    builder.page.locator("[data-card=experts]").focus()
    builder.press("Enter")
    for label, reason in (("defer experts", "no decodes"), ("skip experts", "no decodes"), ("which", "of some rows")):
        field = builder.page.get_by_label(label, exact=True)
        assert field.is_disabled()
        described = "it => it.getRootNode().getElementById(it.getAttribute('aria-describedby')).textContent"
        assert field.evaluate(described) == reason
    assert builder.page.locator(".wb-option-why").all_inner_texts() == ["no decodes", "of some rows"]
    assert builder.page.locator(".wb-options select").get_attribute("aria-describedby") is None


def test_experts_are_split_over_both_devices_by_a_button_or_a_key(opened):
    builder = opened("vslpipe")
    builder.page.locator("[data-card=experts]").hover()
    builder.page.get_by_role("button", name="Options of experts").click()
    builder.page.get_by_role("button", name="Split over both devices").click()
    builder.settled()
    assert builder.sent() == [{"do": "split", "range": 0, "path": [7], "n": 2}]
    cards = builder.cards()
    assert (cards["experts[:4]"], cards["experts[~:4]"]) == ("gpu", "cpu")
    assert builder.focused() == "experts[:4]"
    assert builder.page.locator(".wb-pop").count() == 0
    assert "wb-op-placed" in builder.page.locator("[data-op=experts]").get_attribute("class")
    builder.press("Control+z")
    assert builder.page.locator(".wb-pop").count() == 0
    builder.page.locator("[data-card=experts]").focus()
    builder.press("s")
    assert "experts[~:4]" in builder.cards()
    builder.page.locator("[data-card=route]").focus()
    builder.press("s", "Enter")
    assert len(builder.sent()) == 3
    assert builder.page.get_by_role("button", name="Split over both devices").count() == 0


def test_experts_that_are_none_are_refused_at_their_field(opened):
    builder = opened("vslpipe")
    builder.page.locator("[data-card=experts]").focus()
    builder.press("Enter")
    field = builder.page.get_by_label("which", exact=True)
    field.fill("4")
    builder.press("Enter")
    told = builder.page.locator(".wb-pop [role=alert]")
    assert told.inner_text().startswith("'4' names no experts; write a range such as :4, ~:4 for all others")
    assert field.input_value() == "all"
    assert field.get_attribute("aria-invalid") == "true"
    assert builder.focused() is None
    assert "experts" in builder.cards()
    field.fill("")
    assert told.inner_text() == ""
    builder.page.get_by_role("button", name="~:4", exact=True).click()
    builder.settled()
    assert [message["value"] for message in builder.sent()] == ["4", "", "~:4"]
    assert builder.focused() == "experts[~:4]"
    builder.press("Enter")
    assert told.inner_text() == ""
    assert builder.page.get_by_role("button", name="~:4", exact=True).get_attribute("aria-pressed") == "true"


def test_the_batch_that_times_are_of_is_told_below_the_lanes(opened):
    builder = opened("vslpipe")
    told = builder.page.locator(".wb-times")
    assert told.inner_text().endswith("in a typical iteration, with 45.2 prompt tokens and 2,870 decodes.")
    builder.page.evaluate("fake.put({wiring: {...fake.state.wiring, times: 'of 7 decodes'}})")
    told.filter(has_text="of 7 decodes").wait_for()


def test_a_card_says_that_it_has_the_shared_experts_too(opened):
    builder = opened("shared")
    card = builder.page.locator("[data-card=experts]")
    assert card.locator(".wb-mark").all_inner_texts() == ["+ shared"]
    assert "with the shared experts, which have no card of their own" in card.get_attribute("aria-label")
    builder.page.locator("[data-card=route]").focus()
    builder.page.locator("[data-op=shared_experts]").click()
    builder.settled()
    assert card.locator(".wb-mark").count() == 0


def test_bars_of_lanes_have_their_tasks_names_where_there_is_room(opened):
    builder = opened("vslpipe")
    builder.page.evaluate(
        """(() => {
            window.said = [];
            const write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (words, ...at) {
                said.push([words, this.fillStyle]);
                return write.call(this, words, ...at);
            };
            fake.put({lanes: {...fake.state.lanes, colours: {A: '#1d4ed8', D: '#fcd34d', W: '#1d4ed8'}}});
        })()"""
    )
    builder.settled()
    said = dict(builder.page.evaluate("said"))
    assert (said["A0a"], said["D0a"]) == ("#ffffff", "#000000")
    assert "l0a" not in said  # its bar is too narrow


def test_a_fault_stands_at_its_card_with_a_button_that_mends_it(opened):
    builder = opened("fault")
    assert builder.page.locator(".wb-card-faulty").get_attribute("data-card") == "decode_attention"
    callout = builder.page.locator(".wb-callout")
    assert "no stage before it writes them" in callout.inner_text()
    callout.get_by_role("button", name="Put qkv before it").click()
    builder.settled()
    assert builder.sent()[-1] == {"do": "mend", "id": 0, "n": 2}
    assert builder.page.locator(".wb-card-faulty").count() == 0


def test_a_fault_is_told_once(opened):
    builder = opened("fault")
    told = builder.page.evaluate("fake.state.wiring.fault.text")
    builder.page.evaluate("told => fake.put({figures: {...fake.state.figures, problem: told}})", told)
    builder.page.evaluate("told => fake.put({live: {...fake.state.live, can: false, why: told}})", told)
    builder.settled()
    assert builder.page.locator(".wb-panel", has_text=told).count() == 1
    assert "no weights" not in builder.page.locator("[data-card=experts]").inner_text()


def test_ranges_are_split_shown_and_merged(opened):
    builder = opened("vslpipe")
    builder.page.get_by_role("button", name="Split layers").click()
    builder.page.get_by_label("The second range begins at layer").fill("26")
    builder.press("Enter")
    tabs = builder.page.get_by_role("tab")
    assert tabs.all_inner_texts() == ["layers 0 to 25", "layers 26 to 31"]
    tabs.nth(1).click()
    x, _ = builder.middle("[data-card=experts]")
    builder.drag("[data-card=experts]", (x, builder.middle("[data-card=decode_attention]")[1]))
    assert builder.sent()[-1] == {"do": "place", "range": 1, "path": [7], "device": "cpu", "n": 3}
    tabs.nth(0).click()
    assert builder.cards()["experts"] == "gpu"
    builder.page.get_by_role("button", name="Merge with next").click()
    builder.settled()
    assert tabs.count() == 0


def test_what_is_typed_is_sent_and_an_error_names_its_line(opened):
    builder = opened("vslpipe")
    builder.page.get_by_label("Code of the pipeline").fill("import os\nlayer = 1")
    builder.page.locator(".wb-code [role=alert]").wait_for()
    assert builder.sent()[-1]["text"] == "import os\nlayer = 1"
    assert builder.page.locator(".wb-code [role=alert]").inner_text().startswith("Line 1. only workbench's own words")


def test_a_slider_sends_its_newest_step_and_says_when_it_rests(opened):
    builder = opened("vslpipe", delay=150)
    builder.page.get_by_label("KV capacity").first.focus()
    for _ in range(6):
        builder.page.keyboard.press("ArrowLeft")
    builder.page.wait_for_function("fake.sent.at(-1).rest === true && fake.state.answered === fake.sent.at(-1).n")
    steps = [(message["value"], message["rest"]) for message in builder.sent()]
    assert steps[-1] == (1, True)
    assert len(steps) < 6
    assert builder.page.get_by_label("KV capacity").first.get_attribute("aria-valuetext") == "8 GB"


def test_what_cannot_be_chosen_says_its_reason(opened):
    builder = opened("vslpipe")
    builder.page.get_by_role("combobox", name="Schedule", exact=True).click()
    refused = builder.page.get_by_role("option", name="CGOPipe")
    assert refused.get_attribute("aria-disabled") == "true"
    assert "prefill_attention is on the GPU" in refused.inner_text()
    refused.click(force=True)  # it is announced as disabled
    assert builder.sent() == []
    builder.press("Home", "ArrowDown", "Enter")
    assert builder.sent() == [{"do": "set", "name": "schedule", "value": "sequential", "rest": True, "n": 2}]


@pytest.mark.parametrize("room, up", [("below", False), ("above", True)])
def test_a_list_opens_where_there_is_room(opened, room, up):
    builder = opened("vslpipe")
    button = builder.page.get_by_role("combobox", name="Schedule", exact=True)
    button.evaluate("(button, up) => button.scrollIntoView({block: up ? 'end' : 'start'})", up)
    before = builder.page.evaluate("scrollY")
    button.click()
    shown = builder.page.get_by_role("listbox", name="Schedule", exact=True)
    builder.settled()
    box, at = shown.bounding_box(), button.bounding_box()
    assert (box["y"] < at["y"]) == up
    assert 0 <= box["y"] < box["y"] + box["height"] <= builder.page.viewport_size["height"]
    assert builder.page.evaluate("scrollY") == before


@pytest.fixture
def low_page(opened):
    """A page that shows little at once; the next test finds it as it was."""
    builder = opened("vslpipe")
    whole = builder.page.viewport_size
    builder.page.set_viewport_size({**whole, "height": 300})
    yield builder
    builder.page.set_viewport_size(whole)


def test_a_list_is_no_higher_than_what_is_seen_and_moves_nothing_but_itself(low_page):
    builder = low_page
    button = builder.page.get_by_role("combobox", name="Model", exact=True)
    button.evaluate("button => button.scrollIntoView({block: 'center'})")
    before = builder.page.evaluate("scrollY")
    button.click()
    builder.press("End", "Home")
    shown = builder.page.get_by_role("listbox", name="Model", exact=True)
    builder.settled()
    box = shown.bounding_box()
    assert 0 <= box["y"] < box["y"] + box["height"] <= 300
    assert builder.page.evaluate("scrollY") == before


def test_a_run_is_started_paused_and_stopped(opened):
    builder = opened("vslpipe")
    for name in ("Start", "Pause", "Resume", "Stop"):
        builder.page.get_by_role("button", name=name, exact=True).click()
    builder.page.get_by_text("Stopped").wait_for()
    assert [message["do"] for message in builder.sent()] == ["start", "pause", "resume", "stop"]


def test_a_run_that_is_stopped_says_so_at_once_and_starts_again(opened):
    builder = opened("vslpipe", delay=600)
    builder.page.get_by_role("button", name="Start", exact=True).click()
    builder.page.get_by_text("press Stop first").wait_for()
    assert builder.page.get_by_role("button", name="Start", exact=True).is_disabled()
    stop = builder.page.get_by_role("button", name="Stop", exact=True)
    stop.click()
    builder.page.locator(".wb-live-stopping").filter(has_text="Stopping…").wait_for()
    assert stop.is_disabled()
    assert builder.page.get_by_role("button", name="Pause", exact=True).is_disabled()
    builder.page.get_by_role("button", name="Start again").wait_for()


def test_a_calibration_is_offered_watched_and_stopped(opened):
    builder = opened("vslpipe")
    live = builder.page.locator(".wb-live")
    button = live.get_by_role("button", name="Calibrate (1 to 2 min)")
    assert button.count() == 0
    builder.page.evaluate("fake.put({live: {...fake.state.live, calibrate: 'Calibrate (1 to 2 min)'}})")
    button.click()
    live.get_by_text("timing operations of mixtral-8x7b, about 40 s left").wait_for()
    assert live.locator(".wb-live-status b").inner_text() == "Calibrating"
    assert live.get_by_role("progressbar", name="Calibration").get_attribute("aria-valuenow") == "25"
    assert live.locator(".wb-gauge-value").count() == 0
    assert builder.page.get_by_text("held until the calibration ends").is_visible()
    assert live.get_by_role("button", name="Start", exact=True).is_disabled()
    builder.page.get_by_role("button", name="Stop the calibration").wait_for()
    live.get_by_role("button", name="Stop", exact=True).click()
    live.get_by_text("The calibration was stopped.").wait_for()
    assert button.is_visible()
    assert [message["do"] for message in builder.sent()] == ["calibrate", "stop"]


def test_a_sweep_is_stopped_by_its_own_button_and_says_what_it_kept(opened):
    builder = opened("vslpipe")
    sweep = builder.page.locator(".wb-sweep")
    sweep.get_by_role("button", name="Measure").click()
    sweep.get_by_role("button", name="Stop the sweep").click()
    sweep.get_by_text("The last sweep stopped in run 1 of 10; 0 points kept.").wait_for()
    told = sweep.locator(".wb-sweep-time")
    assert told.inner_text() == "about 20\u202fs for 5 runs, as simulated"
    sweep.get_by_label("Sequential, prefetch").check()
    assert told.inner_text() == "about 50\u202fs for 10 runs, as simulated"
    builder.page.evaluate("fake.put({curves: {...fake.state.curves, paced: 'at the pace of the last one'}})")
    told.filter(has_text="about 50\u202fs for 10 runs, at the pace of the last one").wait_for()


def test_what_is_held_during_a_run_is_told_and_moves_nothing(opened):
    builder = opened("vslpipe")
    start = builder.page.get_by_role("button", name="Start", exact=True)
    builder.settled()
    before = start.bounding_box()
    start.click()
    builder.page.get_by_text("press Stop first").wait_for()
    assert builder.page.get_by_text("held until the run ends").is_visible()
    assert start.bounding_box()["y"] == before["y"]
    builder.page.get_by_role("button", name="Stop", exact=True).click()
    builder.page.get_by_text("press Stop first").wait_for(state="detached")


def test_a_wiring_that_is_held_can_be_read_and_not_changed(opened):
    builder = opened("ranges")
    builder.page.get_by_role("button", name="Start", exact=True).click()
    builder.page.get_by_text("press Stop first").wait_for()
    before = builder.cards()
    builder.page.get_by_role("tab").nth(1).click()
    assert builder.page.get_by_role("tab").nth(1).get_attribute("aria-selected") == "true"
    builder.page.get_by_role("tab").nth(0).click()
    builder.page.locator("[data-card=qkv]").focus()
    builder.press("ArrowDown", "Delete", "f")
    assert builder.focused() == "qkv"
    assert builder.cards() == before
    for name in ("Clear", "Undo", "Split layers", "Open"):
        assert builder.page.get_by_role("button", name=name, exact=True).is_disabled()
    assert builder.page.get_by_role("checkbox", name="all weights").is_disabled()
    assert [message["do"] for message in builder.sent()] == ["start"]


def test_the_whole_row_of_a_schedule_chooses_it(opened):
    builder = opened("vslpipe")
    row = builder.page.locator("tbody.wb-offered")
    assert row.count() == 1
    row.locator("td").last.click()
    builder.settled()
    assert builder.sent()[-1]["name"] == "schedule"
    assert builder.sent()[-1]["value"] == "Sequential, prefetch"


def test_a_busy_and_a_dead_kernel_are_told(opened):
    builder = opened("vslpipe", delay=2500)
    builder.page.locator("[data-card=qkv]").focus()
    builder.page.keyboard.press("ArrowDown")
    assert builder.cards()["qkv"] == "cpu"  # shown ahead of the answer
    notice = builder.page.locator(".wb-notice")
    notice.filter(has_text="The kernel is busy").wait_for()
    notice.wait_for(state="detached")
    builder.page.evaluate("fake.dead = true; fake.fire('comm_live_update')")
    notice.filter(has_text="run the cell again").wait_for()
    builder.page.keyboard.press("ArrowUp")
    assert builder.cards()["qkv"] == "cpu"


def saved(builder: Builder, kind: str, folder: Path) -> Path:
    """The file that Save gives."""
    builder.page.get_by_role("button", name="Save").click()
    with builder.page.expect_download() as download:
        builder.page.get_by_role("menuitem", name=kind).click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


@pytest.mark.parametrize("kind", ["SVG", "PNG", "HTML"])
def test_the_saved_picture_carries_the_code_and_the_scenario(opened, tmp_path, kind):
    builder = opened("fork")
    scenario = tiny_scenario(pipeline=VSL)
    builder.page.evaluate("told => (fake.kept = told)", packed(json.dumps(scenario.to_dict())))
    path = saved(builder, kind, tmp_path)
    assert path.name == f"pipeline.{kind.lower()}"
    assert b"layer = fetch(weights) | (" in path.read_bytes()
    assert b"A40, 16 GB of it" in path.read_bytes()
    assert scenario_in(path).diff(scenario) == {}


def test_a_scenario_is_saved_alone_or_the_reason_is_told(opened, tmp_path):
    builder = opened("fork")
    builder.page.get_by_role("button", name="Save").click()
    builder.page.get_by_role("menuitem", name="Scenario, JSON").click()
    builder.page.get_by_role("alert").get_by_text("no scenario that a file can hold").wait_for()
    scenario = tiny_scenario(pipeline=VSL)
    builder.page.evaluate("told => (fake.kept = told)", packed(json.dumps(scenario.to_dict())))
    path = saved(builder, "Scenario, JSON", tmp_path)
    assert Scenario.load(path).diff(scenario) == {}
    note = builder.page.locator("p", has_text="Saved as pipeline.json").inner_text()
    assert 'wb.Scenario.load("pipeline.json") reads its scenario' in note
    assert "the schedule, vslpipe, is not in it" in note
    assert builder.page.get_by_role("alert").count() == 0


def test_a_picture_is_saved_without_a_scenario_that_cannot_be(opened, tmp_path):
    builder = opened("fork")
    path = saved(builder, "SVG", tmp_path)
    assert b"layer = fetch(weights) | (" in path.read_bytes()
    with pytest.raises(ScenarioError, match="holds no scenario"):
        scenario_in(path)
    builder.page.locator("p", has_text="Saved as pipeline.svg, without its scenario.").wait_for()


def test_an_empty_canvas_says_how_to_begin(opened):
    builder = opened("empty")
    begun = builder.page.locator(".wb-empty")
    assert "Nothing is wired yet" in begun.inner_text()
    assert builder.page.locator(".wb-problem").count() == 0
    begun.get_by_role("button", name="VSLPipe").click()
    builder.settled()
    assert builder.sent() == [{"do": "open", "name": "vslpipe", "n": 2}]
    assert list(builder.cards()) == VSLPIPE
    assert begun.count() == 0


def test_cards_beside_the_canvas_are_counted_and_shown(opened):
    builder = opened("vslpipe")
    builder.page.set_viewport_size({"width": 600, "height": 900})
    more = builder.page.locator(".wb-more-after")
    assert more.inner_text() == "3 more ›"
    for _ in range(5):
        if more.count():
            more.click()
            builder.settled()
    box = builder.page.locator("[data-card=combine]").bounding_box()
    assert box["x"] + box["width"] <= 600
    assert builder.page.locator(".wb-more-before").inner_text().startswith("‹ ")
    builder.page.set_viewport_size({"width": 1400, "height": 1000})
    more.wait_for(state="detached")


def test_a_figure_of_a_sample_says_so_beside_its_number(opened):
    builder = opened("vslpipe")
    reading = builder.page.locator(".wb-reading-main")
    assert "requests" not in reading.inner_text()
    builder.page.evaluate("fake.put({figures: {...fake.state.figures, sample: 'first 2,000 of 20,000 requests'}})")
    reading.filter(has_text="first 2,000 of 20,000 requests").wait_for()
    bar = builder.page.get_by_role("toolbar", name="Wiring")
    assert "631 output tokens/s simulated with first 2,000 of 20,000 requests" in bar.inner_text()


def test_a_legend_says_a_sample_only_where_the_point_is_one(opened):
    builder = opened("vslpipe")
    legend = builder.page.locator(".wb-legend li", has_text="Sequential")
    assert "a sample" in legend.inner_text()
    assert "some of the requests" in legend.get_attribute("title")
    builder.page.evaluate(
        "fake.put({curves: {...fake.state.curves,"
        " lines: fake.state.curves.lines.map(each => ({...each, sampled: [8e9]}))}})"
    )
    legend.filter(has_not_text="a sample").wait_for()
    assert legend.get_attribute("title") is None


def test_what_is_not_computed_during_a_run_is_not_called_computing(opened):
    builder = opened("vslpipe")
    builder.page.evaluate(
        "fake.put({figures: {...fake.state.figures, pending: true}, curves: {...fake.state.curves, busy: true}})"
    )
    computing = builder.page.get_by_text("computing…")
    assert computing.count() == 2
    builder.page.get_by_role("button", name="Start", exact=True).click()
    builder.page.get_by_text("the rest is computed after the run").nth(1).wait_for()
    assert computing.count() == 0


def test_lanes_tell_the_memories_of_the_machine_that_is_set_where_there_are_no_figures(opened):
    builder = opened("vslpipe")
    sizes = builder.page.locator(".wb-lane .wb-lane-size")
    assert sizes.all_text_contents() == ["16 GB", "265 GB"]
    builder.page.evaluate(
        "fake.put({settings: {...fake.state.settings, memory: {gpu: '80 GB', cpu: '1 TB'}},"
        " figures: {...fake.state.figures, rows: [], ledger: []}})"
    )
    sizes.filter(has_text="1 TB").wait_for()
    assert sizes.all_text_contents() == ["80 GB", "1 TB"]


def test_the_gpu_lane_of_a_machine_without_a_gpu_says_what_computes_it(opened):
    builder = opened("vslpipe")
    told = builder.page.locator(".wb-lane .wb-lane-computed")
    assert told.count() == 0
    builder.page.evaluate("fake.put({settings: {...fake.state.settings, shared: true}})")
    told.nth(1).wait_for()
    assert " ".join(told.all_text_contents()) == "computed by the CPU"
    inside, lane = (builder.page.locator(f".wb-lane-gpu {each}") for each in ("text", "rect"))
    around = lane.bounding_box()
    for each in inside.all():
        box = each.bounding_box()
        assert around["y"] <= box["y"] < box["y"] + box["height"] <= around["y"] + around["height"]


def test_the_view_is_busy_until_python_has_answered(opened):
    builder = opened("vslpipe", delay=300)
    view = builder.page.locator(".wb-builder")
    assert view.get_attribute("aria-busy") == "false"
    builder.page.locator("[data-card=qkv]").focus()
    builder.page.keyboard.press("ArrowDown")
    assert view.get_attribute("aria-busy") == "true"
    builder.settled()
    assert view.get_attribute("aria-busy") == "false"
    assert builder.page.locator("[role=application]").count() == 1


@pytest.mark.parametrize("width", [600, 700])
def test_nothing_is_wider_than_a_narrow_or_enlarged_page(opened, width):
    """600 pixels of style are also what 200 % zoom leaves of a window of 1,200."""
    builder = opened("ranges")
    builder.page.set_viewport_size({"width": width, "height": 900})
    builder.page.wait_for_timeout(100)
    assert builder.page.evaluate("document.documentElement.scrollWidth") == width
    builder.page.set_viewport_size({"width": 1400, "height": 1000})


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: `npm ci` in workbench/widgets/web")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("scene", ["vslpipe", "fork", "ranges", "fault", "over", "empty"])
def test_readers_of_screens_find_nothing_amiss(opened, theme, scene):
    builder = opened(scene, theme)
    builder.page.get_by_role("button", name="Start", exact=True).click()
    builder.page.locator(".wb-gauge-value").first.wait_for()
    if scene in ("vslpipe", "fork"):  # the others are looked at while the run goes on
        builder.page.get_by_role("button", name="Stop", exact=True).click()
        builder.settled()
    if scene == "vslpipe":
        builder.page.locator("[data-card=experts]").focus()
        builder.page.keyboard.press("Enter")
        builder.page.locator(".wb-pop").wait_for()
    if scene == "fork":
        builder.page.evaluate("fake.put({live: {...fake.state.live, stale: 'at other settings'}})")
        builder.page.get_by_role("combobox", name="Schedule", exact=True).click()
    builder.page.evaluate(f"{AXE.read_text(encoding='utf-8')}; 0")
    found = builder.page.evaluate("axe.run(document.getElementById('here')).then(said => said.violations)")
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert serious == [], json.dumps(serious, indent=1)


def test_two_views_of_one_builder_follow_each_other_and_part(opened):
    builder = opened("vslpipe")
    builder.page.evaluate("close_view(); window.close_view = show(); 0")
    builder.page.evaluate("window.close_second = show(); 0")
    cards = builder.page.locator("[data-card=experts]")
    cards.nth(1).wait_for()
    assert cards.count() == 2
    cards.first.focus()
    builder.press("ArrowDown")
    assert cards.evaluate_all("all => all.map(card => card.matches('.wb-card-cpu'))") == [True, True]
    builder.page.evaluate("close_second()")
    cards.nth(1).wait_for(state="detached")
    builder.press("ArrowUp")
    assert builder.cards()["experts"] == "gpu"
    ids = builder.page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))


def test_what_a_layer_lacks_is_added_by_a_button_before_what_follows_it(opened):
    builder = opened("wired")
    builder.page.locator("[data-card=out_proj]").focus()
    builder.press("Delete")
    lead = builder.page.locator(".wb-lead")
    assert "Not in this layer: out_proj" in lead.inner_text()
    assert (
        "output tokens/s simulated without out_proj" in builder.page.get_by_role("toolbar", name="Wiring").inner_text()
    )
    assert lead.get_by_role("button").all_inner_texts() == ["Add out_proj on the GPU", "Add out_proj on the CPU"]
    lead.get_by_role("button", name="Add out_proj on the CPU").click()
    builder.settled()
    names = list(builder.cards())
    assert names.index("out_proj") == names.index("route") - 1
    assert builder.cards()["out_proj"] == "cpu"
    assert builder.focused() == "out_proj"
    assert lead.get_by_role("button").count() == 0


def test_the_legend_of_lanes_says_how_names_of_tasks_are_read(opened):
    builder = opened("vslpipe")
    legend = builder.page.locator(".wb-gantt-legend")
    assert "A0a is task A in layer 0, for part a of the batch" in legend.inner_text()


def test_gauges_of_an_older_run_are_titled_so_and_the_page_does_not_move(opened):
    builder = opened("vslpipe")
    title = builder.page.locator(".wb-live-title")

    def below() -> float:
        builder.settled()
        code = builder.page.locator(".wb-code").bounding_box()["y"]
        return code - builder.page.locator(".react-flow").bounding_box()["y"]

    builder.page.get_by_role("button", name="Start", exact=True).click()
    title.filter(has_text="This run").wait_for()
    before = below()
    builder.page.get_by_role("button", name="Stop", exact=True).click()
    title.filter(has_text=re.compile(r"^Last run, ended at \d\d:\d\d$")).wait_for()
    assert below() == before
    builder.page.get_by_label("KV capacity").first.focus()
    builder.press("ArrowLeft")
    title.filter(has_text=re.compile(r", at other settings$")).wait_for()
    assert below() == before


def test_a_pinned_variant_tells_the_load_beside_its_measured_value(opened):
    builder = opened("vslpipe")
    row = builder.page.get_by_role("row", name="output tokens/s, measured")
    told = "measured while other programs took 12 % of the cores"
    assert row.locator("td").all_inner_texts() == [f"203\n{told}", "–"]


def test_values_of_curves_stand_at_the_present_setting_and_at_the_pointer(opened):
    builder = opened("vslpipe")
    values = builder.page.locator(".wb-curves .wb-value")
    assert sorted(values.all_text_contents()) == ["330", "391", "618", "720"]
    first = builder.page.locator(".wb-curves .wb-line-measured circle title").first
    assert first.text_content() == "measured: 70 output tokens/s at KV capacity 8\u202fGB"
    builder.page.locator(".wb-curves").scroll_into_view_if_needed()
    x, y = builder.middle(".wb-chart .wb-line-measured circle >> nth=2")
    builder.page.mouse.move(x, y)
    builder.settled()
    assert "170" in values.all_text_contents()
