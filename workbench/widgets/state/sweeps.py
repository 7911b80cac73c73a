"""Live sweeps: the settings of the runs that they consist of."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.schedules import Schedule
from workbench.widgets.state.controls import Slider
from workbench.widgets.state.offered import why_not
from workbench.widgets.state.settings import Settings


def swept(settings: Settings, axis: Slider, points: int, schedules: Sequence[Schedule]) -> list[tuple[str, Settings]]:
    """Settings of the runs of a sweep, with their titles: at so many positions of a slider, under each schedule.

    Settings that do not go together are left out.
    """
    found = list[tuple[str, Settings]]()
    for label, at in spread(axis, settings, points):
        for schedule in schedules:
            each = at.on(schedule=schedule)
            if not why_not(each):
                found.append((f"{axis.label} {label}, {schedule.name}", each))
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
