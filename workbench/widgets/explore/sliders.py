"""Sliders over the arguments of any function that draws."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import ipywidgets as w
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench.widgets.parts.still import with_still
from workbench.widgets.parts.words import alert

DPI = 100
_WIDE = {"width": "420px"}
_DARK = """<style>
[data-jp-theme-light="false"] .wb-explored { filter: invert(0.93) hue-rotate(180deg); }
</style>"""
"""White becomes the dark theme's background, black its ink, and colours keep their hue."""


class Sliders(w.VBox):  # type: ignore[misc]
    """A picture that follows its controls, one for every named argument.

    Parameters
    ----------
    plot : callable
        ``plot(ax=..., **values) -> Axes``, such as the package's plot functions. It may be called from any thread.
    figsize : (float, float)
        Size of the picture [inches].
    **choices
        Values of each argument: a sequence makes a slider, a mapping of labels to values a dropdown. A control starts
        at the function's default, or in the middle if that is none of the choices.

    Raises
    ------
    TypeError, ValueError
        If the function has no such argument, or an argument has no choices.
    Exception
        Any exception of the function's first call; later ones are shown below the controls, with the last good picture.

    Examples
    --------
    >>> Sliders(lambda ax, kv="70GB": plot_my_prediction(kv, ax), kv=["35GB", "70GB", "140GB"])  # doctest: +SKIP
    """

    def __init__(
        self,
        plot: Callable[..., Axes],
        *,
        figsize: tuple[float, float] = (7.0, 4.0),
        **choices: Sequence[Any] | Mapping[str, Any],
    ) -> None:
        self._plot = plot
        arguments = inspect.signature(plot).parameters
        any_name = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
        for name in choices:
            if name == "ax" or not (any_name or name in arguments):
                known = list(arguments)
                raise TypeError(f"{plot} has no argument {name!r} for a control to set; give those of {known}.")
        self._figure = Figure(figsize=figsize, dpi=DPI, layout="constrained")
        self._canvas = FigureCanvasAgg(self._figure)
        width = f"{max((len(name) for name in choices), default=0) + 1}ch"
        defaults = {name: argument.default for name, argument in arguments.items()}
        self.controls = {name: _control(name, given, defaults.get(name), width) for name, given in choices.items()}
        self.picture = w.Image(format="png", layout=w.Layout(width=f"{figsize[0] * DPI:.0f}px", max_width="100%"))
        self.picture.add_class("wb-explored")
        self.said = w.HTML()
        self.picture.value = self._png()
        for control in self.controls.values():
            control.observe(self._follow, "value")
        super().__init__([*self.controls.values(), self.said, self.picture, w.HTML(_DARK)])

    @property
    def values(self) -> dict[str, Any]:
        """Values of the controls."""
        return {name: control.value for name, control in self.controls.items()}

    def _follow(self, _: object) -> None:
        try:
            self.picture.value = self._png()
            self.said.value = ""
        except Exception as error:  # an exception of a callback would not be shown
            self.said.value = alert(error)

    def _png(self) -> bytes:
        self._figure.clear()
        self._plot(ax=self._figure.add_subplot(), **self.values)
        drawn = io.BytesIO()
        self._canvas.print_png(drawn)  # type: ignore[no-untyped-call]
        return drawn.getvalue()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and a still picture for pages without a kernel."""
        return with_still(super()._repr_mimebundle_(**kwargs), self.picture.value)


def _control(name: str, given: Sequence[Any] | Mapping[str, Any], default: Any, width: str) -> Any:
    """A dropdown of a mapping or a slider of a sequence, at the default if that is a choice."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} has the choices {given!r}; give a sequence, or a mapping of labels to values.")
    if isinstance(given, Mapping):
        widget = w.Dropdown
        options = list(given.items())
    else:
        widget = w.SelectionSlider
        options = [(_label(value), value) for value in given]
    if not options:
        raise ValueError(f"{name} has no choice; give at least one.")
    values = [value for _, value in options]
    start = values.index(default) if default in values else len(values) // 2
    style = {"description_width": width}
    label = name.replace("_", " ")
    return widget(options=options, index=start, description=label, style=style, layout=w.Layout(**_WIDE))


def _label(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    return f"{value:,}" if isinstance(value, Integral) else f"{value:,g}"
