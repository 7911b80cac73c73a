"""The state behind a view that explores: the look, and the points that are read in the background for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workbench.analysis.sweeps.grid import Place
from workbench.analysis.sweeps.reading import VARIABLES
from workbench.simulate.loading import loader
from workbench.widgets.explore.look import Look, matrix, moved, outward, over
from workbench.widgets.explore.picture import chosen, controls, picture
from workbench.widgets.explore.readings import Overtaken, Readings
from workbench.widgets.parts.newest import Newest

_PERIOD = 1 / 8  # seconds between two pictures
Message = Mapping[str, Any]


class Explorer:
    """Answers messages of a view and publishes what it shows. It knows nothing of widgets.

    Parameters
    ----------
    readings : Readings
    look : Look
        What the view begins with.
    publish : callable (**parts) -> None
        Called from several threads, one at a time, with what some parts show, by their names.
    """

    def __init__(self, readings: Readings, look: Look, publish: Callable[..., None]) -> None:
        self.readings = readings
        self.look = look
        self._out = publish
        self._lock = threading.RLock()
        self._due = 0.0
        self._worker = Newest[Look](self._work, "explore")
        loader().hasten()
        self._go_to(look)

    def close(self) -> None:
        """End the thread; a point that is being read is read to its end."""
        self._worker.close()

    def wait(self, seconds: float) -> bool:
        """Wait until every point of the picture is read; return False if that takes longer."""
        return self._worker.wait(seconds)

    def answer(self, message: Message) -> None:
        """Do what a message says; one that is not known changes nothing."""
        act = getattr(self, f"_on_{message.get('do')}", None)
        if act is not None:
            act(message)

    def tell(self, problem: str) -> None:
        """Show what went wrong."""
        self._out(explored=picture(self.readings, self.look, busy=False, problem=problem))

    def _on_set(self, message: Message) -> None:
        self._go_to(moved(self.readings.grid, self.look, str(message["name"]), int(message["value"])))

    def _on_x(self, message: Message) -> None:
        self._go_to(over(self.readings.grid, self.look, x=str(message["name"])))

    def _on_y(self, message: Message) -> None:
        self._go_to(over(self.readings.grid, self.look, y=str(message["name"])))

    def _on_value(self, message: Message) -> None:
        name = str(message["name"])
        if name in VARIABLES:
            self._go_to(replace(self.look, value=name))

    def _on_choose(self, message: Message) -> None:
        points = matrix(self.readings.grid, self.look)
        row, column = int(message["row"]), int(message["column"])
        if 0 <= row < len(points) and 0 <= column < len(points[row]):
            self._go_to(replace(self.look, at=points[row][column]))

    def _go_to(self, look: Look) -> None:
        """Show what is known there at once, and let the rest be read."""
        with self._lock:
            self.look = look
            self._out(settings=controls(self.readings.grid, look))
            self._show(look, busy=bool(self._unread(look)))
            self._worker.put(look)

    def _unread(self, look: Look) -> list[Place]:
        wanted = outward(matrix(self.readings.grid, look), look.at)
        return self.readings.missing(wanted)

    def _show(self, look: Look, *, busy: bool, problem: str = "") -> None:
        """Publish the picture, unless another look has come meanwhile."""
        with self._lock:
            if look == self.look:
                explored = picture(self.readings, look, busy=busy, problem=problem)
                self._out(explored=explored, point=chosen(self.readings, look))
                self._due = time.monotonic() + _PERIOD

    def _work(self, look: Look, overtaken: Overtaken) -> None:
        try:
            self._read(look, overtaken)
            self._show(look, busy=False)
        except Exception as error:  # an exception of this thread would not be shown
            self._show(look, busy=False, problem=f"{type(error).__name__}: {error}")

    def _read(self, look: Look, overtaken: Overtaken) -> None:
        """Read in the order in which a reader looks: bounds of curves, the chosen point, those around it."""
        readings = self.readings
        readings.find(self._unread(look))
        if not look.y:  # a heat map draws no bounds
            self._each(lambda place, _: readings.bound(place), look, overtaken)
            self._show(look, busy=True)
        if not overtaken():
            readings.explain(look.at, overtaken)
            self._show(look, busy=True)
        self._each(readings.read, look, overtaken)

    def _each(self, read: Callable[[Place, Overtaken], object], look: Look, overtaken: Overtaken) -> None:
        for place in self._unread(look):
            if overtaken():
                return
            read(place, overtaken)
            if time.monotonic() > self._due:
                self._show(look, busy=True)
