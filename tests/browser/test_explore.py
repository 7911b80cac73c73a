"""Sliders over a picture in JupyterLab: the picture follows, what cannot be drawn is told, nothing is asked outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser.lab import Session, browsing, open_notebook, run_all, serving

pytestmark = [pytest.mark.alone, pytest.mark.browser, pytest.mark.timeout(240)]

CELL = """
from workbench import machines
from workbench.perfmodels.moe_lightning import plots
from workbench.widgets import Explore

t4 = machines["moe-lightning-s1"]
Explore(
    lambda ax, intensity=32, rate="fp16": plots.plot_roofline(t4, intensity, rate, ax),
    intensity=[-8, 16, 32, 64],
    rate=["fp16", "bf16"],
)
""".strip()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cell = {"cell_type": "code", "id": "explore", "metadata": {}, "execution_count": None, "outputs": []}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    content = {"cells": [{**cell, "source": CELL}], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    path = tmp_path_factory.mktemp("notebooks") / "explore.ipynb"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_picture_follows_and_errors_are_told(notebook, tmp_path_factory):
    private, profile = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("profile")
    with serving(notebook.parent, private) as server, browsing(profile) as browser:
        session = Session(browser)
        open_notebook(session.page, server, notebook.name)
        run_all(session.page)
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
        assert (session.errors, session.requests) == ([], [])
