"""Live sweeps: the settings that they go along, and the runs that they consist of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.schedules import Schedule
from workbench.widgets.state.controls import SLIDERS, Slider
from workbench.widgets.state.offered import why_not
from workbench.widgets.state.runs import Planned
from workbench.widgets.state.settings import Settings

Plain = dict[str, Any]
POINTS = 5  # values of the first setting
LINES = 2  # values of the second one
CHOSEN = "chosen"
EVERY = "schedule"


def offered(settings: Settings) -> Plain:
    """What a sweep can go along, and what it can be repeated for, by the names in its message."""
    axes = [{"value": axis.name, "label": axis.label} for axis in SLIDERS if len(axis.steps(settings)) > 1]
    schedules = [{"value": CHOSEN, "label": "the chosen schedule"}, {"value": EVERY, "label": "every schedule"}]
    return {"x": axes, "y": [*schedules, *axes]}


def planned(settings: Settings, schedules: Sequence[Schedule], x: str, y: str) -> list[Planned]:
    """The runs of a sweep: five values of one setting, each under some schedules or at two values of another setting.

    Settings that do not go together are left out; there is no run for a setting that is not known.
    """
    axis = _slider(x)
    if axis is None:
        return []
    found = list[Planned]()
    for label, at in spread(axis, settings, POINTS):
        for other, each in _repeated(at, schedules, y):
            if not why_not(each):
                found.append(Planned(each, f"{axis.label} {label}, {other}"))
    return found


def spread(axis: Slider, settings: Settings, points: int) -> list[tuple[str, Settings]]:
    """Settings at so many positions of a slider, evenly over those that work, with their labels."""
    steps = axis.steps(settings)
    works = [step for step in steps if not why_not(axis.write(settings, step.value))]
    if len(works) <= points:
        chosen = works
    else:
        chosen = [works[round(place * (len(works) - 1) / max(1, points - 1))] for place in range(points)]
    return [(step.label, axis.write(settings, step.value)) for step in chosen]


def _repeated(settings: Settings, schedules: Sequence[Schedule], y: str) -> list[tuple[str, Settings]]:
    """The settings under each schedule or at each value that a sweep is repeated for, with a name for each."""
    axis = _slider(y)
    if axis is not None:
        return [(f"{axis.label} {label}", at) for label, at in spread(axis, settings, LINES)]
    chosen = schedules if y == EVERY else (settings.schedule,)
    return [(each.name, settings.on(schedule=each)) for each in chosen]


def _slider(name: str) -> Slider | None:
    return next((slider for slider in SLIDERS if slider.name == name), None)
