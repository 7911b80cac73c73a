"""Views of a scenario in the browser: the builder, which wires it, and the dashboard, which explores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import traitlets

from workbench.analysis.sweeps import Sweep
from workbench.pipeline import Pipeline, Stack
from workbench.scenario import Scenario
from workbench.schedules import Schedule, contenders
from workbench.stages import ExpertSet, Op
from workbench.widgets.explore.measured import Measured, sweep_of
from workbench.widgets.page import Page, shell
from workbench.widgets.parts.still import with_still
from workbench.widgets.state.studio import Studio
from workbench.widgets.stills import packed, still

_WIRED = ("wiring", "live", "code", "settings", "figures", "curves", "explain", "variants", "lanes")
_EXPLORED = ("live", "settings", "figures", "curves", "explain", "variants", "lanes")
FIRST = 0.5  # most seconds that a cell waits for what is drawn; its still picture computes what it lacks


class View(Page):
    """The base of builder and dashboard: a `Studio` whose parts the browser draws, and whose messages it sends.

    Runs of all views share one computer, so that a run is refused while another one goes on.

    Parameters
    ----------
    scenario : Scenario
        What the view begins with.
    schedules : sequence of Schedule, optional
        Schedules that stand first, by default the pipeline's `contenders`; the first is chosen.
    names : mapping of str to Op or ExpertSet, optional
        The user's own operations and sets of experts by the names of their variables, by default those of the notebook.
    """

    _parts: ClassVar[Sequence[str]] = _WIRED
    wiring: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    code: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    settings: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    figures: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    curves: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    lanes: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    variants: traitlets.List[Any] = traitlets.List().tag(sync=True)
    live: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        scenario: Scenario,
        schedules: Sequence[Schedule] = (),
        *,
        names: Mapping[str, Op | ExpertSet] | None = None,
    ) -> None:
        super().__init__()
        chosen = tuple(schedules) or contenders(scenario.stack)
        found = names_of_the_notebook() if names is None else names
        self.studio = Studio(scenario, chosen, found, self._publish, self._sample, self._keep)
        self.studio.drawing.wait(FIRST)
        self._open()

    def close(self) -> None:
        """Stop the run, end the threads and remove the widget from the page."""
        self.studio.close()
        super().close()

    @property
    def pipeline(self) -> Pipeline | Stack:
        """The wiring as it stands; it may be one that cannot be."""
        return self.studio.settings.pipeline

    @property
    def scenario(self) -> Scenario:
        """The scenario as it is wired and set.

        Raises
        ------
        WorkbenchError
            If it cannot be.
        """
        return self.studio.settings.scenario()

    @property
    def schedule(self) -> Schedule:
        """The chosen schedule."""
        return self.studio.settings.schedule

    @property
    def measured(self) -> Sweep:
        """The runs that ended here, as a sweep over the settings in which they differ.

        Raises
        ------
        ScenarioError
            If none has.
        """
        runs = self.studio.measured
        return sweep_of([Measured(settings.scenario(), settings.schedule, result) for settings, result in runs])

    def _sample(self, samples: list[Any], fresh: bool) -> None:
        self.send({"samples": samples, "fresh": fresh})

    def _keep(self, told: str) -> None:
        self.send({"kept": packed(told)})

    def _answer(self, message: dict[str, Any]) -> None:
        self.studio.answer(message)

    def _tell(self, problem: str) -> None:
        self._publish(figures={**self.figures, "problem": problem})

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and a still with its scenario for pages without a kernel."""
        return with_still(super()._repr_mimebundle_(**options), still(self.studio))


class Builder(View):
    """Wire a pipeline by hand: one card per operation, on the GPU or the CPU, beside its code and its figures.

    The same by plain calls: `workbench.pipeline` for the wiring and its edits, `wb.costs` for the figures of its cards,
    and what `Dashboard` names.

    Examples
    --------
    >>> Builder(scenario)  # doctest: +SKIP
    """


class Dashboard(View):
    """Explore settings around those of a scenario, and run them where there are weights.

    The same by plain calls: `wb.bound`, `wb.simulate`, `wb.sweep`, `wb.start`, `wb.compare`, `wb.fits`,
    `wb.shadow_prices` and `workbench.simulate.typical_iteration`.

    Examples
    --------
    >>> Dashboard(scenario)  # doctest: +SKIP
    """

    _parts = _EXPLORED


def names_of_the_notebook() -> dict[str, Op | ExpertSet]:
    """Operations and sets of experts that the notebook's cells have defined, by the names of their variables."""
    found = shell()
    if found is None:
        return {}
    return {
        name: value
        for name, value in found.user_ns.items()
        if isinstance(value, Op | ExpertSet) and not name.startswith("_")
    }
