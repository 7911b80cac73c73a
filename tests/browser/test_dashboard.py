"""The tour's dashboard in JupyterLab: sliders, a live run and its buttons, the cell run again, a tab closed.

The tests share one page and are in the order of a session; each leaves an idle dashboard behind.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import Server, Session, open_notebook

pytestmark = [pytest.mark.alone, pytest.mark.browser, pytest.mark.timeout(240)]

MOVED = ("Requests", "Prompt tokens", "Link speed")
MOVES = 5  # of each
CLOSED = ("widget model not found", "Comm not found for comm id")  # parts of messages in the browser's console
WATCH = """() => {
    const picture = document.querySelector("img.wb-curves");
    window.moved = window.drawn = null;
    const painted = () => requestAnimationFrame(() => { window.drawn ??= performance.now(); });
    new MutationObserver((_, watch) => { watch.disconnect(); picture.decode().then(painted, painted); })
        .observe(picture, {attributes: true, attributeFilter: ["src"]});
    window.addEventListener("keydown", () => { window.moved = performance.now(); }, {capture: true, once: true});
}"""
DIGEST = """async () => {
    const bytes = await (await fetch(document.querySelector("img.wb-curves").src)).arrayBuffer();
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
    return Array.from(digest, byte => byte.toString(16).padStart(2, "0")).join("");
}"""


@pytest.fixture
def page(session: Session) -> Iterator[Any]:
    """The page with the dashboard in view and idle."""
    session.page.locator(".wb-start:not([disabled])").scroll_into_view_if_needed()
    yield session.page
    if session.page.locator(".wb-stop:not([disabled])").count():
        session.page.locator(".wb-stop").click()
        idle(session.page)


def idle(page: Any) -> None:
    page.locator(".wb-start:not([disabled])").wait_for()


def handle(page: Any, label: str) -> Any:
    """The knob of a slider."""
    return page.locator(".widget-hslider", has=page.get_by_text(label, exact=True)).locator(".noUi-handle")


def status(page: Any) -> str:
    return str(page.locator(".wb-status").inner_text())


def emitted(page: Any) -> int:
    """Output tokens so far."""
    found = re.search(r"([\d,]+) of [\d,]+ output tokens", status(page))
    return int(found[1].replace(",", "")) if found else 0


def gauge(page: Any, label: str) -> float:
    part = page.locator(".wb-gauge", has=page.get_by_text(label, exact=True)).locator(".wb-gauge-value")
    return float(re.sub(r"[^\d.]", "", part.inner_text()) or 0)


def until(page: Any, true: Any, seconds: float = 60.0) -> float:
    """Seconds that it took to become true."""
    began = time.perf_counter()
    while not true():
        assert time.perf_counter() - began < seconds
        page.wait_for_timeout(20)
    return time.perf_counter() - began


def start_long_run(page: Any) -> None:
    """A run that lasts longer than the test, and serves its first tokens."""
    handle(page, "Output tokens").focus()
    page.keyboard.press("End")
    handle(page, "Requests").focus()
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    idle(page)
    page.locator(".wb-start").click()
    until(page, lambda: status(page).startswith("running") and emitted(page) > 0)


def test_a_moved_slider_draws_the_curves_anew(page, capsys):
    waits = []
    for label in MOVED:
        handle(page, label).focus()
        for _ in range(MOVES):
            page.evaluate(WATCH)
            page.keyboard.press("ArrowLeft" if label == "Link speed" else "ArrowRight")
            page.wait_for_function("window.drawn !== null")
            waits.append(page.evaluate("window.drawn - window.moved"))
            page.wait_for_timeout(600)
    with capsys.disabled():
        print(f"\n{len(waits)} moves, slider to picture: median {statistics.median(waits):.0f} ms, ", end="")
        print(f"longest {max(waits):.0f} ms")


def test_of_many_moves_the_last_is_drawn_as_simulate_says(page, session):
    handle(page, "Requests").focus()
    for _ in range(MOVES):
        page.keyboard.press("ArrowLeft")
    for turn in range(2, 12):  # the page sends the last position after the kernel has answered the first
        session.run_cell("sha256")
        line = session.said(f"shown-{turn}")
        _, requests, same, points, digest = re.sub("[(),']", "", line).split()
        if int(requests) == 8:
            break
    assert int(requests) == 8
    assert (same, int(points) >= 20) == ("True", True)
    until(page, lambda: page.evaluate(DIGEST) == digest)
    for label, key in (("Prompt tokens", "ArrowLeft"), ("Link speed", "ArrowRight")):
        handle(page, label).focus()
        for _ in range(MOVES):
            page.keyboard.press(key)


def test_a_bad_setting_is_told_in_the_dashboard(page):
    handle(page, "KV capacity").focus()
    page.keyboard.press("Home")
    handle(page, "Prompt tokens").focus()
    page.keyboard.press("End")
    page.locator(".wb-said", has_text="or shorten the request").wait_for()
    assert page.locator(".wb-start[disabled]").count() == 1
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
    handle(page, "KV capacity").focus()
    page.keyboard.press("End")
    idle(page)


def test_a_live_run_shows_tokens_holds_in_pause_and_stops(page, capsys):
    start_long_run(page)
    until(page, lambda: gauge(page, "output tok/s") > 0)
    assert gauge(page, "KV blocks in use") > 0
    page.locator(".wb-pause").click()
    page.locator(".wb-status", has_text="paused").wait_for()
    page.wait_for_timeout(300)
    held = status(page)
    page.wait_for_timeout(1000)
    assert status(page) == held
    page.get_by_role("button", name="Resume").click()
    until(page, lambda: status(page) != held)
    page.locator(".wb-stop").click()
    seconds = until(page, lambda: status(page).startswith("stopped"))
    with capsys.disabled():
        print(f"\nclick on Stop to stopped: {1000 * seconds:.0f} ms")
    idle(page)
    page.locator(".wb-words", has_text="Stopped after").wait_for()


def test_lanes_simulated_and_measured_can_be_zoomed_and_named(page):
    chart = page.locator(".wb-gantt-chart")
    chart.scroll_into_view_if_needed()
    assert page.locator(".wb-gantt-key").count() >= 5
    everything = chart.evaluate("canvas => canvas.toDataURL()")
    chart.focus()
    page.keyboard.press("+")
    assert chart.evaluate("canvas => canvas.toDataURL()") != everything
    page.keyboard.press("0")
    assert chart.evaluate("canvas => canvas.toDataURL()") == everything
    box = chart.bounding_box()
    told = set()
    for x in range(60, int(box["width"]), 7):
        chart.hover(position={"x": x, "y": 29})
        if page.locator(".wb-gantt-tip:not([hidden])").count():
            told.add(page.locator(".wb-gantt-tip").inner_text())
    assert any(re.search(r"from .* iteration \d+", words) for words in told)
    assert any(re.search(r"idle for .* until \w+ on \w+", words) for words in told)


def test_gauges_move_while_another_cell_is_busy(page, session, capsys):
    start_long_run(page)
    frames = "+document.querySelector('.wb-strip').dataset.frames"
    session.run_cell("sum(range(1000))")
    page.wait_for_timeout(500)
    first, began = page.evaluate(frames), time.perf_counter()
    page.wait_for_timeout(2500)
    rate = (page.evaluate(frames) - first) / (time.perf_counter() - began)
    assert page.locator(".jp-OutputArea-output pre", has_text=re.compile("^busy-2")).count() == 0
    with capsys.disabled():
        print(f"\npictures of a live run while a cell is busy: {rate:.1f} per second")
    assert rate > 2
    session.said("busy-2")


def test_running_the_cell_again_ends_the_old_run(page, session):
    start_long_run(page)
    session.run_cell("= Dashboard(")
    page.locator(".wb-status", has_text="No run yet").wait_for()
    assert page.locator(".wb-dashboard").count() == 1
    page.wait_for_timeout(1000)
    session.run_cell("live-run")
    assert session.said("live-2").endswith(" 0")


def test_a_closed_tab_harms_neither_run_nor_notebook(page, session: Session, server: Server):
    start_long_run(page)
    page.close()
    session.page = session.fresh_page()
    open_notebook(session.page, server, "00_tour.ipynb")
    session.run_cell("live-run")
    assert session.said("live-3").endswith(" 1")
    session.run_cell("= Dashboard(")
    idle(session.page)
    session.page.wait_for_timeout(1000)
    session.run_cell("live-run")
    assert session.said("live-4").endswith(" 0")


def test_nothing_was_asked_for_outside_and_no_error_logged(session):
    """A cell that runs again closes widgets that JupyterLab may still be drawing: it then logs one of `CLOSED`."""
    assert session.requests == []
    assert [error for error in session.errors if not any(part in error for part in CLOSED)] == []
