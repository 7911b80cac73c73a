"""Live strip chart: gauges with a history, which receive only new samples of a few hundred bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from workbench.widgets.parts.monitor import Channel, Reading
from workbench.widgets.parts.still import png_of, with_still

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTORY = 480  # samples: a minute at 8 Hz


_COLUMNS = 4


class Strip(anywidget.AnyWidget):
    """A small chart per channel, with its current value as text.

    Parameters
    ----------
    channels : sequence of Channel
    """

    _esm = Path(__file__).with_name("strip.js")
    _css = Path(__file__).with_name("strip.css")
    channels: traitlets.List[Any] = traitlets.List().tag(sync=True)

    def __init__(self, channels: Sequence[Channel]) -> None:
        super().__init__(channels=[channel._asdict() for channel in channels])
        self._history: deque[list[Any]] = deque(maxlen=HISTORY)
        self.on_msg(self._resend)

    def clear(self) -> None:
        """Remove all samples."""
        self._history.clear()
        self.send({"fresh": True, "samples": []})

    def add(self, seconds: float, readings: Sequence[Reading]) -> None:
        """Show the channels' readings at a time of the run [s]."""
        values, texts, notes = zip(*readings, strict=True)
        sample = [seconds, values, texts, notes]
        self._history.append(sample)
        self.send({"samples": [sample]})

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and a still of the last minute for pages without a kernel."""
        bundle = super()._repr_mimebundle_(**options)
        return with_still(bundle, png_of(_gauges(self.channels, self._history))) if self._history else bundle

    def _resend(self, *_: object) -> None:
        """Send the history to a page that was opened or loaded again."""
        self.send({"fresh": True, "samples": list(self._history)})


def _gauges(channels: Sequence[dict[str, Any]], history: Sequence[list[Any]]) -> Figure:
    """One small chart per channel over the time of the run, under its label and its last reading."""
    import matplotlib.pyplot as plt

    rows = -(-len(channels) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(11, 1.65 * rows), squeeze=False, layout="constrained")
    seconds = [sample[0] for sample in history]
    _, _, texts, notes = history[-1]
    for ax in axes.flat[len(channels) :]:
        ax.set_visible(False)
    for number, (ax, channel) in enumerate(zip(axes.flat, channels, strict=False)):
        values = [sample[1][number] for sample in history]
        ax.fill_between(seconds, values, alpha=0.2)
        ax.plot(seconds, values, linewidth=1)
        ax.set_ylim(0, channel["top"] or 1.1 * max(values) or 1.0)
        ax.set_title(f"{channel['label']}: {texts[number] or '–'}\n{notes[number]}", loc="left", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("seconds of the run", fontsize=8)
    return figure
