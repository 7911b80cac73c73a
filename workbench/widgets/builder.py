"""Views of a scenario in the browser: the builder, which wires it, and the dashboard, which explores it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import anywidget
import traitlets

from workbench.core.errors import WorkbenchError
from workbench.pipeline import Pipeline, Stack
from workbench.scenario import Scenario
from workbench.schedules import Schedule, contenders
from workbench.stages import ExpertSet, Op
from workbench.widgets.parts.still import with_still
from workbench.widgets.state.studio import Studio
from workbench.widgets.stills import packed, still

_WEB = Path(__file__).parent / "web" / "dist"
_WIRED = ("wiring", "code", "settings", "figures", "curves", "lanes", "explain", "variants", "live")
_EXPLORED = ("settings", "figures", "curves", "lanes", "explain", "variants", "live")
FIRST = 3.0  # most seconds that a cell waits for the first figures, so that its still picture is complete


class Made(NamedTuple):
    """The cell of a notebook that made a view, and the request to run it; empty outside of notebooks."""

    cell: str = ""
    request: str = ""

    def again_in(self, other: Made) -> bool:
        """True if the other is the same cell, run again."""
        return bool(self.cell) and self.cell == other.cell and self.request != other.request


class View(anywidget.AnyWidget):
    """The base of both views: a `Studio` whose parts the browser draws, and whose messages it sends.

    Several may be open at once; each keeps what it was set to. A cell that is run again closes what it had opened, and
    stops its run. Runs of all share one computer, so that a run is refused while another one goes on.

    Parameters
    ----------
    scenario : Scenario
        What the view begins with.
    schedules : sequence of Schedule, optional
        Schedules that stand first, by default the pipeline's `contenders`; the first is chosen.
    names : mapping of str to Op or ExpertSet, optional
        The user's own operations and sets of experts by the names of their variables, by default those of the notebook.
    """

    _esm = (_WEB / "builder.js").read_text(encoding="utf-8")
    _css = (_WEB / "builder.css").read_text(encoding="utf-8")
    _parts: ClassVar[Sequence[str]] = _WIRED
    _opened: ClassVar[WeakSet[View]] = WeakSet()
    parts: traitlets.List[Any] = traitlets.List().tag(sync=True)
    wiring: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    code: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    settings: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    figures: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    curves: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    lanes: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    variants: traitlets.List[Any] = traitlets.List().tag(sync=True)
    live: traitlets.Dict[Any, Any] = traitlets.Dict().tag(sync=True)
    answered = traitlets.Int(0).tag(sync=True)

    def __init__(
        self,
        scenario: Scenario,
        schedules: Sequence[Schedule] = (),
        *,
        names: Mapping[str, Op | ExpertSet] | None = None,
    ) -> None:
        super().__init__(parts=list(self._parts))
        self._made_by = _running_cell()
        for older in list(View._opened):
            if older._made_by.again_in(self._made_by):
                older.close()
        self._sending = threading.RLock()
        chosen = tuple(schedules) or contenders(scenario.stack)
        found = names_of_the_notebook() if names is None else names
        self.studio = Studio(scenario, chosen, found, self._publish, self._sample, self._keep)
        self.studio.drawing.wait(FIRST)
        self.on_msg(self._received)
        View._opened.add(self)

    def close(self) -> None:
        """Stop the run, end the threads and remove the widget from the page."""
        View._opened.discard(self)
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

    def _publish(self, name: str, value: Any) -> None:
        with self._sending:
            setattr(self, name, value)

    def _sample(self, samples: list[Any], fresh: bool) -> None:
        self.send({"samples": samples, "fresh": fresh})

    def _keep(self, told: str) -> None:
        self.send({"kept": packed(told)})

    def _received(self, _: object, message: Any, __: object) -> None:
        number = int(message.get("n", 0))
        try:
            self.studio.answer(message)
        except WorkbenchError as error:
            self._publish("figures", {**self.figures, "problem": str(error)})
        except Exception as error:  # an exception of a callback would not be shown
            self._publish("figures", {**self.figures, "problem": f"{type(error).__name__}: {error}"})
        finally:
            self.answered = number

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


def _running_cell() -> Made:
    """The cell that is running now."""
    parent: dict[str, Any] = getattr(_shell(), "get_parent", dict)()
    cell = parent.get("metadata", {}).get("cellId", "")
    return Made(str(cell), str(parent.get("header", {}).get("msg_id", "")))


def _shell() -> Any:
    """The shell of the notebook, or None."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def names_of_the_notebook() -> dict[str, Op | ExpertSet]:
    """Operations and sets of experts that the notebook's cells have defined, by the names of their variables."""
    shell = _shell()
    if shell is None:
        return {}
    return {
        name: value
        for name, value in shell.user_ns.items()
        if isinstance(value, Op | ExpertSet) and not name.startswith("_")
    }
