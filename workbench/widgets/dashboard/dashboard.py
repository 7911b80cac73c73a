"""The dashboard: predicted curves that follow the sliders, a live run, and an explanation of their difference."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import ipywidgets as w

from workbench.analysis.compare import compare
from workbench.analysis.sweep import SweepPoint
from workbench.core.errors import WorkbenchError
from workbench.core.result import Result
from workbench.engine import LiveRun, RunState, start
from workbench.perfmodels import bound
from workbench.plots import middle
from workbench.scenario import Scenario
from workbench.schedules import Schedule, contenders
from workbench.simulate import Detail, simulate
from workbench.widgets.dashboard.controls import Controls
from workbench.widgets.dashboard.curves import CurvePicture, Pairs
from workbench.widgets.dashboard.live import LivePanel
from workbench.widgets.dashboard.predictions import Predictions, outward
from workbench.widgets.dashboard.settings import Settings, WorkloadOf, random_tokens, why_not_live
from workbench.widgets.parts.gantt import Gantt
from workbench.widgets.parts.newest import Newest
from workbench.widgets.parts.words import alert, digits, in_figures, paragraphs

POINTS = 11  # points of a curve
PATIENCE = (0.03, 0.15)  # seconds until an unfinished curve is shown, and between further ones
FIRST = 3.0  # most seconds that a cell waits for the first curve, so that its still picture is complete
_STYLE = Path(__file__).with_name("dashboard.css")


class Dashboard(w.VBox):  # type: ignore[misc]
    """Explore settings around those of a scenario, and run them where there are weights.

    The same by plain calls: `wb.sweep`, `wb.start`, `wb.compare` and `workbench.plots.plot_lanes`.

    Only one dashboard is open at a time: a new one, such as that of a cell that is run again, closes the earlier one
    and stops its run, since two live runs would share the cores and disturb each other's measurement. The class keeps
    open dashboards in a weak set.

    Parameters
    ----------
    scenario : Scenario
        Pipeline, scheduler and block size, and the controls' first values.
    schedules : sequence of Schedule
        Schedules to compare, by default the pipeline's `contenders`; the first is chosen to run live.
    workload : callable
        ``(model, requests, prompt_len, output_len) -> Workload``, by default of seeded random tokens.

    Examples
    --------
    >>> Dashboard(scenario)  # doctest: +SKIP
    """

    _opened: ClassVar[WeakSet[Dashboard]] = WeakSet()

    def __init__(
        self,
        scenario: Scenario,
        schedules: Sequence[Schedule] = (),
        *,
        workload: WorkloadOf = random_tokens,
    ) -> None:
        for older in list(Dashboard._opened):
            older.close()
        schedules = schedules or contenders(scenario.stack)
        self._predictions = Predictions(scenario, schedules, workload)
        self._measured: list[tuple[Settings, Result]] = []
        self._picture = CurvePicture()
        self._whole: Pairs = ()
        self._running: Settings | None = None
        self.controls = Controls(scenario, schedules)
        self.curves = w.Image(format="png")
        self.curves.add_class("wb-curves")
        self.said = w.HTML()
        self.words = w.HTML()
        self.said.add_class("wb-said")
        self.words.add_class("wb-words")
        self.live = LivePanel(self._start, self._ended, self.controls.lock)
        self.gantt = Gantt()
        left = w.VBox([self.controls, self.said], layout=w.Layout(flex="0 1 348px"))
        top = w.HBox([left, self.curves], layout=w.Layout(flex_flow="row wrap"))
        style = w.HTML(f"<style>{_STYLE.read_text(encoding='utf-8')}</style>", layout=w.Layout(display="none"))
        super().__init__([style, top, self.live, self.gantt, self.words])
        self.add_class("wb-dashboard")
        self._painter = Newest(self._follow, "dashboard-curves")
        self._painter.put(self.controls.settings)
        self._painter.wait(FIRST)
        self.controls.on_change(self._painter.put)
        Dashboard._opened.add(self)

    def close(self) -> None:
        """Stop the run, end the threads and remove the widgets from the page."""
        Dashboard._opened.discard(self)
        self._painter.close()
        self.live.shut()
        for widget in _inside(self):
            widget.close()
        super().close()

    def _follow(self, settings: Settings, overtaken: Callable[[], bool]) -> None:
        try:
            self._paint(settings, overtaken)
        except Exception as error:  # an exception of the painting thread would not be shown
            self.said.value = alert(error)

    def _paint(self, settings: Settings, overtaken: Callable[[], bool]) -> None:
        """Draw the curves for these settings, incomplete ones at intervals. Only one thread calls this."""
        due = time.monotonic() + PATIENCE[0]
        points: list[SweepPoint] = []
        self._check(settings)
        for tokens in outward(self.controls.kv_steps, settings.kv_tokens, POINTS):
            if overtaken():
                return
            points.append(self._predictions.point(replace(settings, kv_tokens=tokens)))
            if time.monotonic() > due:
                self._draw(settings, points, before=self._whole)
                due = time.monotonic() + PATIENCE[1]
        self._whole = self._draw(settings, points)

    def _check(self, settings: Settings) -> None:
        point = self._predictions.point(settings)
        if point.problem:
            self.said.value = alert(point.problem)
            self.live.allow("these settings do not work")
        else:
            self.said.value = in_figures(point)
            self.live.allow(why_not_live(self._predictions.scenario(settings)))

    def _draw(self, settings: Settings, points: Sequence[SweepPoint], before: Pairs = ()) -> Pairs:
        """Draw points and the measurements at these settings; return the drawn pairs."""
        pairs = [(point.kv_capacity, result) for point in points for result in point.results]
        steps = self.controls.kv_steps
        capacity = self._predictions.capacity
        ends = (capacity(replace(settings, kv_tokens=steps[0])), capacity(replace(settings, kv_tokens=steps[-1])))
        pairs += [(capacity(run), result) for run, result in self._measured if _beside(run, settings)]
        self.curves.value = self._picture.png(pairs, capacity(settings), ends, before)
        return pairs

    def _start(self) -> LiveRun:
        self._running = self.controls.settings
        self._painter.cancel()  # the cores belong to the run
        return start(self._predictions.scenario(self._running), self._running.schedule)

    def _ended(self, run: LiveRun) -> None:
        if run.state is RunState.FAILED or self._running is None:
            return
        try:
            measured = run.wait()
        except WorkbenchError as error:
            self.words.value = alert(error)
            return
        if not measured.stopped:
            self._measured.append((self._running, measured))
        self._painter.put(self._running)
        self._explain(self._running, measured)

    def _explain(self, settings: Settings, measured: Result) -> None:
        self.words.value = paragraphs(["Comparing with the simulation ..."])
        scenario = self._predictions.scenario(settings)
        simulated = simulate(scenario, settings.schedule, detail=Detail.TASK)
        first, last = middle(measured.timeline)
        shown = f"{settings.schedule.name}, iterations {first} to {last - 1}"
        self.gantt.show([(f"{r.source.value}: {shown}", r.timeline.window(first, last)) for r in (simulated, measured)])
        if measured.stopped:
            said = [f"Stopped after {measured.generated} tokens: {digits(measured.gen_tok_s)} output tok/s until then."]
        else:
            said = compare([bound(scenario, settings.schedule), simulated, measured]).explanations()
        self.words.value = paragraphs(said)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and a still of its curves for pages without a kernel."""
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        data["image/png"] = base64.b64encode(self.curves.value).decode()
        return bundle


def _beside(one: Settings, other: Settings) -> bool:
    """True if two settings differ only in KV capacity and schedule, and so belong in one picture."""
    return replace(one, kv_tokens=other.kv_tokens, schedule=other.schedule) == other


def _inside(widget: Any) -> list[Any]:
    """All widgets in a box, innermost first."""
    found: list[Any] = []
    for child in getattr(widget, "children", ()):
        found += [*_inside(child), child]
    return found
