"""Text that a stranger chose is text wherever it is shown: no reader, table or widget makes a tag of it."""

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.builders import make_batch, small_machine, tiny_model, tiny_scenario
from workbench.analysis import report
from workbench.analysis.compare import compare
from workbench.analysis.shadow_prices import shadow_prices
from workbench.core.result import Result, Source
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.schedules import Sequential, VSLPipe
from workbench.schedules.base import Step
from workbench.serving import fits, prepare
from workbench.simulate import Detail, simulate
from workbench.widgets import Dashboard
from workbench.widgets.parts.words import alert
from workbench.widgets.stills import save_still, scenario_in

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</style><script>alert(1)</script>",
    "'\"><svg/onload=alert(1)>",
    "&lt;img src=x onerror=alert(1)&gt;<u>",
    "</textarea></pre><iframe src=javascript:alert(1)>",
)
HARMLESS = {"table", "tr", "th", "td", "b", "p", "pre", "span", "div", "details", "summary", "style", "i", "br"}
HARMLESS |= {"ol", "li", "code"}


class Tags(HTMLParser):
    """Names of the elements of a text, and of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}


def harmless(text: str, *more: str) -> bool:
    found = Tags(text)
    return found.elements <= HARMLESS | set(more) and not any(name.startswith("on") for name in found.attributes)


@pytest.fixture(params=HOSTILE)
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def scenario(name: str) -> Scenario:
    """Every name in it is the stranger's."""
    machine = small_machine()
    machine = replace(
        machine,
        name=name,
        measured=name,
        gpu=replace(machine.gpu, name=name),
        cpu=replace(machine.cpu, name=name),
        sources={name: name},
    )
    found = tiny_scenario(8, 4, 6, model=replace(tiny_model(), name=name), machine=machine)
    return found.on(workload=replace(found.workload, name=name, source=name))


@pytest.fixture
def results(scenario: Scenario, name: str) -> list[Result]:
    found = [bound(scenario, VSLPipe()), simulate(scenario, VSLPipe(), detail=Detail.TASK)]
    found.append(replace(found[-1], source=Source.MEASURED, seconds=2 * found[-1].seconds, backend=name))
    return [replace(one, schedule=name, predictor=name, facts={**one.facts, name: name}) for one in found]


def shown(scenario: Scenario, results: list[Result]) -> Iterator[tuple[str, Any]]:
    """Everything with a picture of itself in HTML."""
    yield from ((f"result {number}", result) for number, result in enumerate(results))
    yield "comparison", compare(results)
    yield "scenario", scenario
    yield "pipeline", scenario.pipeline
    yield "machine", scenario.machine
    yield "model", scenario.model
    yield "ledger", fits(scenario, VSLPipe())
    yield "ledger that does not fit", fits(scenario.on(machine=small_machine(gpu_memory=1e5)), VSLPipe())
    yield "plan", prepare(scenario, VSLPipe()).lowering.plan(make_batch([3], [5], layers=4), Step.FIRST)
    yield "shadow prices", shadow_prices(scenario, VSLPipe())


def test_every_picture_of_itself_in_html(scenario: Scenario, results: list[Result], name: str) -> None:
    for what, thing in shown(scenario, results):
        assert harmless(thing._repr_html_()), what
    assert html.escape(name) in scenario._repr_html_()


def test_the_report(scenario: Scenario, results: list[Result], name: str) -> None:
    both = compare([*results, *(replace(result, schedule="other") for result in results)])
    live = [report.Live(VSLPipe(), result, (result,)) for result in results]
    page = report._page(scenario, both, scenario, both, name, live)
    assert harmless(page, *Tags(report._PAGE.template).elements, "img")
    assert page.count("<img") == page.count("<img alt='' src='data:image/png;base64,")


def test_a_view_sends_names_as_text_and_its_page_escapes_them(scenario: Scenario, name: str, tmp_path: Path) -> None:
    """The browser draws what it is sent as text nodes; the page that Python writes must escape it."""
    view = Dashboard(scenario, (Sequential(), VSLPipe()))
    try:
        assert view.studio.drawing.wait(20)
        page = save_still(view.studio, tmp_path / "page.html").read_text(encoding="utf-8")
        shown = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
        assert harmless(shown, "html", "meta", "title", "h1", "img")
        drawn = save_still(view.studio, tmp_path / "picture.svg").read_text(encoding="utf-8")
        assert name not in drawn
        assert scenario_in(tmp_path / "page.html").model.name == name
        assert scenario_in(tmp_path / "picture.svg").model.name == name
    finally:
        view.close()


def test_an_error_of_a_sweep(name: str) -> None:
    assert harmless(alert(name))
    assert harmless(alert(ValueError(name)))


def test_html_is_escaped_in_one_place() -> None:
    """Whoever writes tags takes `escaped`; what a package of its own writes into HTML is met above."""
    package = Path(workbench.__file__).parent
    own = [file.name for file in package.rglob("*.py") if "import html\n" in file.read_text(encoding="utf-8")]
    assert own == ["display.py"]
