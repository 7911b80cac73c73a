"""Sliders over any function that draws; the same without widgets is a call of that function."""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import ipywidgets as w
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench.widgets.parts.words import alert

DPI = 100
_WIDE = {"width": "420px"}


class Explore(w.VBox):  # type: ignore[misc]
    """A picture that follows its controls, one for every named argument.

    Parameters
    ----------
    plot : callable
        ``plot(ax=..., **values) -> Axes``, such as the package's plot functions. It may be called from any thread.
    figsize : (float, float)
        Of the picture [inches].
    **choices
        What each argument may be: a sequence makes a slider, a mapping of labels to values a dropdown. A control
        starts at the function's own default, or in the middle if that is none of the choices.

    Raises
    ------
    TypeError, ValueError
        If the function has no such argument, or choices are none.
    Exception
        Whatever the function raises at the start; later it is told below the controls, beside the last good picture.

    Examples
    --------
    >>> Explore(lambda ax, kv="70GB": plot_my_prediction(kv, ax), kv=["35GB", "70GB", "140GB"])  # doctest: +SKIP
    """

    def __init__(
        self,
        plot: Callable[..., Axes],
        *,
        figsize: tuple[float, float] = (7.0, 4.0),
        **choices: Sequence[Any] | Mapping[str, Any],
    ) -> None:
        self._plot = plot
        own = inspect.signature(plot).parameters
        any_name = any(argument.kind is argument.VAR_KEYWORD for argument in own.values())
        unknown = [name for name in choices if name == "ax" or not (any_name or name in own)]
        if unknown:
            raise TypeError(f"{plot} has no argument {unknown[0]!r} for a control to set; give those of {list(own)}.")
        self._figure = Figure(figsize=figsize, dpi=DPI, layout="constrained")
        self._canvas = FigureCanvasAgg(self._figure)
        width = f"{max((len(name) for name in choices), default=0) + 1}ch"
        defaults = {name: argument.default for name, argument in own.items()}
        self.controls = {name: _control(name, given, defaults.get(name), width) for name, given in choices.items()}
        self.picture = w.Image(format="png", layout=w.Layout(width=f"{figsize[0] * DPI:.0f}px", max_width="100%"))
        self.picture.add_class("wb-explored")
        self.said = w.HTML()
        self.picture.value = self._png()
        for control in self.controls.values():
            control.observe(self._follow, "value")
        super().__init__([*self.controls.values(), self.said, self.picture])

    @property
    def values(self) -> dict[str, Any]:
        """Where the controls stand."""
        return {name: control.value for name, control in self.controls.items()}

    def _follow(self, _: object) -> None:
        try:
            self.picture.value, self.said.value = self._png(), ""
        except Exception as error:  # raised in a callback, nobody would see it
            self.said.value = alert(error)

    def _png(self) -> bytes:
        self._figure.clear()
        self._plot(ax=self._figure.add_subplot(), **self.values)
        drawn = io.BytesIO()
        self._canvas.print_png(drawn)  # type: ignore[no-untyped-call]
        return drawn.getvalue()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """With a still for pages that have no kernel."""
        bundle: dict[str, Any] = super()._repr_mimebundle_(**kwargs)
        return {**bundle, "image/png": base64.b64encode(self.picture.value).decode()}


def _control(name: str, given: Sequence[Any] | Mapping[str, Any], own: Any, width: str) -> Any:
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} has the choices {given!r}; give a sequence, or a mapping of labels to values.")
    if isinstance(given, Mapping):
        kind, options = w.Dropdown, list(given.items())
    else:
        kind, options = w.SelectionSlider, [(_label(value), value) for value in given]
    if not options:
        raise ValueError(f"{name} has no choice; give at least one.")
    values = [value for _, value in options]
    start = values.index(own) if own in values else len(values) // 2
    style, layout = {"description_width": width}, w.Layout(**_WIDE)
    return kind(options=options, index=start, description=name.replace("_", " "), style=style, layout=layout)


def _label(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    return f"{value:,}" if isinstance(value, Integral) else f"{value:,g}"
