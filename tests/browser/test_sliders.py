"""Sliders over a picture in JupyterLab: the picture follows, what cannot be drawn is told, nothing is asked outside."""

from __future__ import annotations

import pytest

from tests.browser.lab import Server, Session, choose, open_notebook

pytestmark = [pytest.mark.alone, pytest.mark.browser, pytest.mark.timeout(240)]

CELL = """
from workbench import machines
from workbench.perfmodels.moe_lightning import plots
from workbench.widgets import Sliders

t4 = machines["moe-lightning-s1"]
Sliders(
    lambda ax, intensity=32, rate="fp16": plots.plot_roofline(t4, intensity, rate, ax),
    intensity=[-8, 16, 32, 64],
    rate=["fp16", "bf16"],
)
""".strip()


def test_the_picture_follows_and_errors_are_told(session: Session, server: Server):
    open_notebook(session.page, server, "sliders", {"sliders": CELL})
    session.run_cell("Sliders(")
    picture, alert = session.page.locator("img.wb-explored"), session.page.locator("[role=alert]")
    picture.wait_for()
    first = picture.get_attribute("src")
    handles = session.page.locator(".widget-hslider .noUi-handle")
    handles.first.focus()
    session.page.keyboard.press("ArrowRight")
    session.page.wait_for_function("old => document.querySelector('img.wb-explored').src !== old", arg=first)
    session.page.keyboard.press("Home")
    alert.filter(has_text="intensity must be at least 0").wait_for()
    session.page.keyboard.press("End")
    alert.wait_for(state="detached")
    handles.last.focus()
    session.page.keyboard.press("ArrowRight")
    alert.filter(has_text="no known FLOP rate for bf16").wait_for()
    choose(session.page, "Settings", "Theme", "JupyterLab Dark")
    session.page.wait_for_function(
        "getComputedStyle(document.querySelector('img.wb-explored')).filter.includes('invert')"
    )
    choose(session.page, "Settings", "Theme", "JupyterLab Light")
    session.page.wait_for_function("getComputedStyle(document.querySelector('img.wb-explored')).filter === 'none'")
    assert (session.errors, session.requests) == ([], [])
