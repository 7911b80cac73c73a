"""Lane charts with zoom: several timelines, one above the other, on one time axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from workbench.core.timeline import Timeline
from workbench.plots import plot_timeline, task_colour
from workbench.widgets.parts.still import png_of, with_still
from workbench.widgets.parts.words import naming

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    naming = traitlets.Unicode().tag(sync=True)
    tracks: traitlets.List[Any] = traitlets.List().tag(sync=True)

    _titled: Sequence[tuple[str, Timeline]] = ()

    def show(self, titled: Sequence[tuple[str, Timeline]]) -> None:
        """Draw these timelines, each from its own begin; an empty sequence clears the chart."""
        self._titled = tuple(titled)
        with self.hold_sync():
            self.labels = {code: label for _, timeline in titled for code, label in timeline.labels.items()}
            self.colours = {code: task_colour(code) for code in self.labels}
            self.naming = naming(names_in(timeline for _, timeline in titled))
            self.tracks = [track(title, timeline) for title, timeline in titled]

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and a still of the whole chart for pages without a kernel."""
        bundle = super()._repr_mimebundle_(**options)
        return with_still(bundle, png_of(_whole(self._titled))) if self._titled else bundle


def _whole(titled: Sequence[tuple[str, Timeline]]) -> Figure:
    """Timelines one above the other on one time axis, each from its own begin."""
    import matplotlib.pyplot as plt

    height = 0.8 + sum(0.6 + 0.3 * len(timeline.lanes) for _, timeline in titled)
    figure, axes = plt.subplots(len(titled), figsize=(11, height), squeeze=False, layout="constrained")
    longest = max(timeline.seconds for _, timeline in titled)
    for ax, (title, timeline) in zip(axes.flat, titled, strict=True):
        plot_timeline(timeline, ax, title=title, seconds=longest)
    figure.supxlabel(naming(names_in(timeline for _, timeline in titled)), fontsize=8)
    return figure


def names_in(timelines: Iterable[Timeline]) -> list[str]:
    """The names of all tasks."""
    return [span.name for timeline in timelines for span in timeline]


def track(title: str, timeline: Timeline) -> dict[str, Any]:
    """Convert a timeline for the browser: lanes, labels, spans as [lane, start, end, name, iteration], and idle time.

    Idle time is [lane number, start, end, the task that the next one waited for].
    """
    lanes = timeline.lanes
    begin = timeline.begin
    spans = [[lanes.index(s.lane), s.start - begin, s.end - begin, s.name, s.iteration] for s in timeline]
    idle = [[lanes.index(b.lane), b.start - begin, b.end - begin, b.after] for b in timeline.bubbles()]
    return {"title": title, "lanes": list(lanes), "labels": dict(timeline.labels), "spans": spans, "idle": idle}
