"""Exploring in JupyterLab: by the mouse and by the keyboard alone, in both themes, and on an exported page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.board import Board
from tests.browser.lab import Server, Session, answering, choose, open_notebook

pytestmark = [pytest.mark.alone, pytest.mark.browser, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
AXE = ROOT / "workbench" / "widgets" / "web" / "node_modules" / "axe-core" / "axe.min.js"
MAKE = """
import workbench as wb
from tests.builders import tiny_scenario
from workbench.schedules import Sequential, VSLPipe
from workbench.widgets import Explore

scenario = tiny_scenario([8] * 6, [4] * 6)
block = scenario.memory.kv_block * scenario.model.kv_bytes_per_token("bf16")
capacities = [2 * block, 3 * block, 4 * block, 9 * block]
over = {"memory.kv_capacity": capacities, "machine.link": ["1MB/s", "30MB/s", "1GB/s"]}
view = Explore(scenario, over=over, schedules=[Sequential(), VSLPipe()])
view
"""
SWEEP = """
swept = wb.sweep(scenario, over=over | {"schedule": [Sequential(), VSLPipe()]}, store="readings.sqlite")
opened = Explore(swept, x="link", y="kv_capacity", value="ttft")
opened
"""
CHOSEN = answering("chosen", "[view.chosen.labels, view.chosen.numbers.get('gen_tok_s'), view.chosen.problem]")
DRAWN = answering(
    "drawn", "[view.explored['x']['name'], (view.explored['y'] or {}).get('name'), view.explored['value']['name']]"
)
READ = """() => [...document.querySelectorAll(".wb-explored header")].every(
    head => !head.innerText.includes("computing")
)"""


class Explored(Board):
    """A view that explores, in a cell's output."""

    def __init__(self, page: Any, cell: Any) -> None:
        super().__init__(page, cell)
        self.grid = self.root.get_by_role("grid")

    def settled(self) -> None:
        """Wait until messages are answered and all points of the picture are read."""
        self.until(lambda: self.root.get_attribute("aria-busy") == "false" and self.page.evaluate(READ))

    def pick(self, label: str, option: str) -> None:
        """Choose from a list by the mouse."""
        self.root.get_by_role("combobox", name=label, exact=True).click()
        self.root.get_by_role("option", name=option, exact=True).locator("visible=true").click()
        self.settled()

    def cell(self, *words: str) -> Any:
        """The cell of the picture whose label begins with these coordinates."""
        return self.grid.locator(f"[role=gridcell][aria-label^='{', '.join(words)}:']")

    def focused_cell(self) -> str:
        return str(self.page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''"))

    def read(self) -> str:
        return str(self.root.locator(".wb-reading-at").inner_text())

    def point(self) -> str:
        return str(self.root.get_by_role("region", name="The chosen point").inner_text())


@pytest.fixture(scope="module")
def view(session: Session, server: Server) -> Iterator[Explored]:
    cells = {"make": MAKE, "sweep": SWEEP, "chosen": CHOSEN, "drawn": DRAWN}
    open_notebook(session.page, server, "explore", cells)
    session.run_cell("view = Explore(")
    found = Explored(session.page, session.cell("view = Explore("))
    found.grid.wait_for()
    found.settled()
    yield found
    assert (session.errors, session.requests) == ([], [])


def test_curves_follow_their_axes_and_sliders(view, session):
    assert view.grid.get_attribute("aria-label") == "output tokens per second over KV capacity"
    assert view.grid.get_by_role("row").count() == 2
    view.root.get_by_role("slider", name="link").focus()
    before = view.cell("KV capacity 18.4 kB", "schedule VSLPipe").get_attribute("aria-label")
    view.press("Home")
    view.until(lambda: view.cell("KV capacity 18.4 kB", "schedule VSLPipe").get_attribute("aria-label") != before)
    view.settled()
    view.pick("over", "link")
    view.pick("Show", "mean time to the first token")
    assert session.ask("drawn") == ["link", "schedule", "ttft"]
    assert view.root.get_by_role("heading", name="Mean time to the first token").is_visible()
    view.pick("over", "KV capacity")
    view.pick("Show", "output tokens per second")


def test_a_point_that_is_clicked_is_the_chosen_one(view, session):
    chosen = view.cell("KV capacity 18.4 kB", "schedule VSLPipe")
    chosen.locator("circle").click()
    view.until(lambda: "VSLPipe" in view.point() and "limits" in view.point())
    labels, rate, problem = session.ask("chosen")
    assert (labels["kv_capacity"], labels["schedule"], problem) == (18432, "VSLPipe", "")
    assert f"output tokens per second {rate:.3g}" in str(chosen.get_attribute("aria-label"))


def test_a_heat_map_is_opened_walked_and_chosen_from_by_the_keyboard_alone(view, session):
    view.root.get_by_role("combobox", name="and", exact=True).focus()
    view.press("ArrowDown", "ArrowDown", "ArrowDown", "Enter")
    view.until(lambda: view.grid.get_attribute("aria-label") == "output tokens per second over KV capacity and link")
    view.settled()
    view.press_until("Tab", "KV capacity .*: ")
    view.press("Home")
    assert view.focused_cell().startswith("KV capacity 4.1 kB")
    assert "set aside, request 0 of 'lengths' needs a KV cache of 11 tokens" in view.focused_cell()
    assert view.read() == view.focused_cell()
    view.press("Enter")
    view.until(lambda: "needs a KV cache of 11 tokens" in view.point())
    assert "needs a KV cache of 11 tokens" in session.ask("chosen")[2]
    view.cell("KV capacity 4.1 kB", "link 1 MB/s").focus()
    view.press("End", "ArrowUp", "ArrowUp", "ArrowUp")
    assert view.focused_cell().startswith("KV capacity 18.4 kB, link 1 GB/s: output tokens per second ")
    assert view.focused_cell().endswith(", the best")
    view.press(" ")
    view.until(lambda: "KV capacity 18.4 kB" in view.point())
    assert session.ask("chosen")[0] == {"kv_capacity": 18432, "link": 1e9, "schedule": "VSLPipe"}


def test_the_reason_of_a_refused_cell_is_told_under_the_pointer(view):
    view.cell("KV capacity 4.1 kB", "link 1 GB/s").hover()
    assert "set aside, request 0" in view.read()
    view.root.get_by_role("heading", name="Output tokens per second").hover()
    assert view.read().startswith("Point at a value")
    view.button("Choose the best").click()
    view.until(lambda: "KV capacity 18.4 kB" in view.point())


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: `npm ci` in workbench/widgets/web")
def test_nothing_serious_is_amiss_in_either_theme(view, session):
    session.page.evaluate(f"{AXE.read_text(encoding='utf-8')}; 0")
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        choose(session.page, "Settings", "Theme", theme)
        session.page.locator(f"body[data-jp-theme-name='{theme}']").wait_for(state="attached")
        for kind in ("link", "nothing (curves)"):
            view.pick("and", kind)
            assert view.amiss() == []


def test_a_sweep_opens_as_it_is_asked_to(view, session):
    session.run_cell("opened = Explore(")
    opened = Explored(session.page, session.cell("opened = Explore("))
    opened.grid.wait_for()
    assert opened.grid.get_attribute("aria-label") == "mean time to the first token over link and KV capacity"
    assert opened.grid.get_by_role("gridcell").count() == 12
    assert re.search(r"^12 points$", opened.root.inner_text(), re.MULTILINE)
