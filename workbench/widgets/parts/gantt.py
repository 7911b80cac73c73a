"""Lane charts with zoom: several timelines, one above the other, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.core.timeline import Timeline
from workbench.plots import task_colour


class Gantt(anywidget.AnyWidget):
    """A lane chart that follows mouse and keys.

    The wheel or + and - zoom, drag or arrow keys pan, and a double click or 0 shows the whole chart. The pointer shows
    the name of a task, or in idle time the task that the next one waited for. Tasks narrower than a pixel are drawn
    together, as high as the share of it in which they kept the lane busy.
    """

    _esm = Path(__file__).with_name("gantt.js")
    _css = Path(__file__).with_name("gantt.css")
    colours = traitlets.Dict().tag(sync=True)
    labels = traitlets.Dict().tag(sync=True)
    tracks: traitlets.List[Any] = traitlets.List().tag(sync=True)

    def show(self, titled: Sequence[tuple[str, Timeline]]) -> None:
        """Draw these timelines, each from its own begin; an empty sequence clears the chart."""
        with self.hold_sync():
            self.labels = {code: label for _, timeline in titled for code, label in timeline.labels.items()}
            self.colours = {code: task_colour(code) for code in self.labels}
            self.tracks = [track(title, timeline) for title, timeline in titled]


def track(title: str, timeline: Timeline) -> dict[str, Any]:
    """Convert a timeline for the browser: lanes, spans as [lane number, start, end, name, iteration], and idle time.

    Idle time is [lane number, start, end, the task that the next one waited for].
    """
    lanes = timeline.lanes
    begin = timeline.begin
    spans = [[lanes.index(s.lane), s.start - begin, s.end - begin, s.name, s.iteration] for s in timeline]
    idle = [[lanes.index(b.lane), b.start - begin, b.end - begin, b.after] for b in timeline.bubbles()]
    return {"title": title, "lanes": list(lanes), "spans": spans, "idle": idle}
