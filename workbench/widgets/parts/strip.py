"""Live strip chart: gauges with a history, which receive only new samples of a few hundred bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.widgets.parts.monitor import Channel, Reading

HISTORY = 480  # samples: a minute at 8 Hz


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

    def _resend(self, *_: object) -> None:
        """Send the history to a page that was opened or loaded again."""
        self.send({"fresh": True, "samples": list(self._history)})
