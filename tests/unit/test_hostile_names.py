"""Text that a stranger chose is text wherever it is shown: no reader, table or widget makes a tag of it."""

import html
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ipywidgets as w
import pytest

import workbench
from tests.builders import make_batch, small_machine, tiny_model, tiny_scenario
from workbench.analysis import report
from workbench.analysis.compare import compare
from workbench.analysis.shadow_prices import shadow_prices
from workbench.core.errors import EngineError
from workbench.core.result import Result, Source
from workbench.engine import RunState
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.schedules import Sequential, VSLPipe
from workbench.schedules.base import Step
from workbench.serving import Progress, fits, prepare
from workbench.simulate import Detail, simulate
from workbench.widgets import Dashboard
from workbench.widgets.dashboard.live import status
from workbench.widgets.parts.words import alert, paragraphs

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


@pytest.mark.parametrize("state", [None, *RunState])
def test_the_status_of_a_live_run(state: RunState | None, name: str) -> None:
    run = None if state is None else Standing(state, EngineError(name))
    for obstacle in ("", f"{name} has no weights here"):
        assert harmless(status(state, run, obstacle))  # type: ignore[arg-type]


class Standing:
    """A run that stands where it is."""

    def __init__(self, state: RunState, error: Exception) -> None:
        self.state, self.error, self.progress = state, error, Progress()


def shows_html(widget: Any) -> Iterator[Any]:
    """Every HTML widget in a box."""
    if isinstance(widget, w.HTML):
        yield widget
    for child in getattr(widget, "children", ()):
        yield from shows_html(child)


def test_every_widget_of_the_dashboard(scenario: Scenario, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.widgets.dashboard.settings.Machine.local", small_machine)
    board = Dashboard(scenario, (Sequential(), VSLPipe()))
    try:
        assert board._painter.wait(20)
        board._explain(board.controls.settings, simulate(scenario, VSLPipe(), detail=Detail.TASK))
        found = list(shows_html(board))
        assert len(found) == 4
        assert name not in "".join(widget.value for widget in found)
        assert all(harmless(widget.value) for widget in found)
        board.live.allow(name)
        board._predictions = None  # type: ignore[assignment]
        board._follow(replace(board.controls.settings, model=replace(scenario.model, name=name)), lambda: False)
        assert all(harmless(widget.value) for widget in found)
    finally:
        board.close()


def test_an_error_of_a_sweep(name: str) -> None:
    assert harmless(alert(name))
    assert harmless(alert(ValueError(name)))
    assert harmless(paragraphs([name, name]))


def test_html_is_escaped_in_one_place() -> None:
    """Whoever writes tags takes `escaped`; what a package of its own writes into HTML is met above."""
    package = Path(workbench.__file__).parent
    own = [file.name for file in package.rglob("*.py") if "import html\n" in file.read_text(encoding="utf-8")]
    assert own == ["display.py"]
