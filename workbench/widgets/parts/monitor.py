"""Readings of the gauges from snapshots of a live run."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from workbench.core.units import format_seconds
from workbench.serving import Progress
from workbench.widgets.parts.words import digits

LANES = ("gpu", "cpu", "d2h", "h2d")
WINDOW = 3.0  # seconds of a rate: several iterations of a small model
_SHARE = 1.0  # the top of a scale of shares
_TOKENS = "tok/s"


class Channel(NamedTuple):
    """One gauge: its label, the top of its scale if that is fixed, and the unit of its values if they have one."""

    label: str
    top: float | None = None
    unit: str = ""


class Reading(NamedTuple):
    """One gauge at one time: the drawn value, its text, and a note that says what it is of."""

    value: float
    text: str
    note: str = ""


CHANNELS = (
    Channel("output tokens", unit=_TOKENS),
    Channel("prompt tokens", unit=_TOKENS),
    Channel("time to first token", unit="s"),
    Channel("time between tokens", unit="s"),
    Channel("KV blocks in use", _SHARE),
    Channel("preemptions"),
    *(Channel(f"{lane} lane busy", _SHARE) for lane in LANES),
)


class Monitor:
    """Readings of CHANNELS from a series of snapshots.

    Tokens are counted when an iteration ends, so their rates are those between ends of iterations; lanes are read at
    each snapshot.
    """

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._ends: deque[Progress] = deque([Progress()])
        self._seen: deque[Progress] = deque([Progress()])
        self._most = 0  # KV blocks in use

    @property
    def rate(self) -> float:
        """Output tokens/s of the whole run, until its last iteration ended."""
        last = self._ends[-1]
        return _rate(last.emitted, last.seconds)

    def read(self, now: Progress, *, ended: bool = False) -> list[Reading]:
        """Compute the readings at this snapshot; those of a run that has ended tell of the whole run first."""
        self._most = max(self._most, now.used_blocks)
        if now.iterations > self._ends[-1].iterations:
            self._ends.append(now)
        elif now.seconds < self._ends[-1].seconds:  # of a run that has ended, when its last iteration did
            self._ends[-1] = now
        while self._seen and self._seen[-1].seconds > now.seconds:  # of a run that has ended
            self._seen.pop()
        if not self._seen:
            self._seen.append(Progress())
        self._seen.append(now)
        for kept in (self._ends, self._seen):
            while len(kept) > 2 and now.seconds - kept[1].seconds > self._window:
                kept.popleft()
        first = self._ends[0]
        last = self._ends[-1]
        since = self._seen[0]
        window = last.seconds - first.seconds
        output = _rate(last.emitted - first.emitted, window)
        prompt = _rate(last.prefill - first.prefill, window)
        used = now.used_blocks / now.blocks if now.blocks else 0.0
        blocks = Reading(used, f"{now.used_blocks}", f"of {now.blocks}")
        if ended:
            blocks = Reading(used, f"{self._most}", f"of {now.blocks}, at most; {now.used_blocks} at the end")
        found = [
            _of_both(output, _tokens(output), window, _tokens(self.rate), ended=ended),
            _of_both(prompt, _tokens(prompt), window, _tokens(_rate(now.prefill, last.seconds)), ended=ended),
            _times(now.ttft),
            _times(now.tbt),
            blocks,
            Reading(now.preemptions, f"{now.preemptions}"),
        ]
        return found + [_lane(now, since, lane, ended=ended) for lane in LANES]


def _times(of: tuple[float, float]) -> Reading:
    """The median of some times, with the 90th percentile beside it."""
    half, most = of
    if math.isnan(half):
        return Reading(0.0, "", "")
    return Reading(half, format_seconds(half), f"median; 90% within {format_seconds(most)}")


def _lane(now: Progress, since: Progress, lane: str, *, ended: bool) -> Reading:
    window = now.seconds - since.seconds
    share = min(_rate(now.busy.get(lane, 0.0) - since.busy.get(lane, 0.0), window), _SHARE)
    whole = min(_rate(now.busy.get(lane, 0.0), now.seconds), _SHARE)
    return _of_both(share, f"{share:.0%}", window, f"{whole:.0%}", ended=ended)


def _tokens(rate: float) -> str:
    return f"{digits(rate)} {_TOKENS}"


def _of_both(value: float, last: str, window: float, whole: str, *, ended: bool) -> Reading:
    """A reading of the last seconds and, in its note, of the whole run; the other way round once it has ended."""
    seconds = f"last {max(1, round(window))} s"
    if ended:
        return Reading(value, whole, f"whole run; {seconds} {last}")
    return Reading(value, last, f"{seconds}; whole run {whole}")


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
