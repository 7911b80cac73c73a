"""`Explore`: fields of a scenario as controls and as axes of a picture, or any sweep, in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import traitlets
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.analysis.sweeps.found import Point, Sweep
from workbench.analysis.sweeps.grid import make_grid
from workbench.analysis.sweeps.reading import Base
from workbench.core.errors import ScenarioError
from workbench.scenario import Scenario
from workbench.schedules import Schedule, contenders
from workbench.simulate import simulate
from workbench.widgets.explore.explorer import Explorer
from workbench.widgets.explore.look import SCHEDULE, first_look, matrix
from workbench.widgets.explore.picture import number, picture
from workbench.widgets.explore.readings import Readings
from workbench.widgets.page import Page
from workbench.widgets.parts.still import png_of, with_still

FIRST = 3.0  # most seconds that a cell waits for the first points, so that its still picture is complete


class Explore(Page):
    """Curves over any field of a scenario, or a heat map over any two, with a control for each; or those of a sweep.

    Points are simulated when the picture needs them, the chosen one first; a move leaves those of the picture before.
    The same by plain calls: ``wb.sweep(scenario, over=...)`` and `Sweep.plot`.

    Parameters
    ----------
    what : Scenario or Sweep
        A scenario whose fields are explored, or a sweep, of which nothing is left to compute.
    over : mapping of str to values, optional
        Values by the dotted name of a field, as in `wb.sweep`; needed for a scenario, and only there.
    schedules : sequence of Schedule, optional
        The schedules of a scenario, by default the pipeline's `contenders`, unless `over` has them.
    x, y : str, optional
        Axes to begin with, by the names in `Sweep.dataset`; a `y` makes a heat map. By default curves over the first
        numeric axis.
    value : str
        The number to begin with.
    store : str or Path, optional
        File where points are found and to which they are committed, as that of `wb.sweep`; by default none.

    Raises
    ------
    ScenarioError
        If a name is no field or axis, a value is none of its field, or there is nothing to explore.

    Examples
    --------
    >>> Explore(scenario, over={"memory.kv_capacity": ["40GB", "80GB", "150GB"]})  # doctest: +SKIP
    >>> Explore(wb.sweep(scenario, VSLPipe(), over=...), x="kv_capacity", y="link")  # doctest: +SKIP
    """

    _parts = ("settings", "explored", "point")
    settings: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    explored: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    point: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        what: Scenario | Sweep,
        *,
        over: Mapping[str, Any] | None = None,
        schedules: Sequence[Schedule] = (),
        x: str = "",
        y: str = "",
        value: str = "gen_tok_s",
        store: str | Path | None = None,
    ) -> None:
        readings = _readings(what, over, schedules, store)
        look = first_look(readings.grid, readings.base, x=x, y=y, value=value)
        super().__init__()
        self._explorer = Explorer(readings, look, self._publish)
        self._explorer.wait(FIRST)
        self._open()

    def close(self) -> None:
        """End the thread and remove the widget from the page."""
        if hasattr(self, "_explorer"):  # else it could not be made
            self._explorer.close()
        super().close()

    @property
    def chosen(self) -> Point:
        """The chosen point: its scenario, schedule, numbers and result; it is read if that has not been done."""
        return self._explorer.readings.point(self._explorer.look.at)

    @property
    def shown(self) -> Sweep:
        """The points of the picture as a sweep; those that are not read yet stand aside."""
        return self._explorer.readings.part(matrix(self._explorer.readings.grid, self._explorer.look))

    def wait(self, seconds: float) -> bool:
        """Wait until every point of the picture is read.

        Parameters
        ----------
        seconds : float
            Longest time to wait [s].

        Returns
        -------
        bool
            False if it takes longer.
        """
        return self._explorer.wait(seconds)

    def plot(self) -> Figure:
        """Draw the picture with matplotlib, or the reason why it has no point.

        It is that of `Sweep.plot`; on curves the chosen point is marked, with its value.
        """
        look = self._explorer.look
        figure = Figure(figsize=(8, 4.4), layout="constrained")
        ax = figure.add_subplot()
        try:
            self.shown.plot(look.x, look.y or None, look.value, ax)
            self._mark_chosen(ax)
        except ScenarioError as error:  # no point of it could be read
            ax.set_axis_off()
            ax.text(0, 1, fill(str(error), 90), va="top")
        return figure

    def _mark_chosen(self, ax: Axes) -> None:
        """Mark the chosen point of curves, with its value beside it."""
        look = self._explorer.look
        drawn = picture(self._explorer.readings, look, busy=False)
        row, column = drawn["at"]
        value = drawn["cells"][row][column]["value"]
        if look.y or value is None:
            return
        at = (drawn["x"]["at"][column], value)
        ax.scatter(*at, s=70, facecolors="none", edgecolors="black", zorder=3)
        ax.annotate(number(look.value, value), at, (7, 7), textcoords="offset points", fontsize=8)

    def _answer(self, message: dict[str, Any]) -> None:
        self._explorer.answer(message)

    def _tell(self, problem: str) -> None:
        self._explorer.tell(problem)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and a still for pages without a kernel."""
        return with_still(super()._repr_mimebundle_(**options), png_of(self.plot()))


def _readings(
    what: Scenario | Sweep, over: Mapping[str, Any] | None, schedules: Sequence[Schedule], store: str | Path | None
) -> Readings:
    """The readings behind a view, with those of a sweep in place.

    Raises
    ------
    ScenarioError
        If there is nothing to explore.
    """
    if isinstance(what, Sweep):
        if over is not None or schedules or store is not None:
            raise ScenarioError("a sweep has its fields, schedules and readings; give Explore(sweep) nothing else.")
        return Readings(what.base, what.grid, what.rows)
    if not isinstance(what, Scenario):
        raise ScenarioError(
            f"Explore takes a Scenario or a Sweep, not {type(what).__name__}; for a function that draws there is "
            "Sliders(plot, ...)."
        )
    asked = dict(over or {})
    if not asked:
        raise ScenarioError("Explore needs fields, as in over={'memory.kv_capacity': ['40GB', '80GB']}.")
    offered = tuple(schedules) or contenders(what.stack)
    asked.setdefault(SCHEDULE, offered)
    base = Base(what, offered[0], simulate)
    grid = make_grid(what, base.schedule, asked, zipped=False)
    return Readings(base, grid, {}, None if store is None else Path(store))
