"""Timelines: spans of tasks on lanes, the idle times between them, and traces for Perfetto."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

ITERATION = "iteration"
"""`Span.after` of a task that waited for the iteration before its own."""


class Span(NamedTuple):
    """One task on one lane. Times are seconds from the start of the run.

    ``cpu`` is the CPU time of its thread; nan on a card, of several threads, and where it is unknown.
    ``after`` is the task whose end let it begin, with its lane (``cpu C0a``), or `ITERATION`; "" if unknown.
    """

    lane: str
    name: str
    start: float
    end: float
    iteration: int = 0
    cpu: float = float("nan")
    after: str = ""


SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"


class Bubble(NamedTuple):
    """An idle time of a lane up to its next task, and the task whose end the next one waited for (`Span.after`)."""

    lane: str
    start: float
    end: float
    after: str


def code_of(name: str) -> str:
    """The code of the node that a task's name begins with: a letter, and subscripts behind it (``A₂`` of ``A₂26a``)."""
    end = 1
    while end < len(name) and name[end] in SUBSCRIPTS:
        end += 1
    return name[:end]


class Timeline:
    """Spans in the order in which they were recorded, and the meaning of the codes with which their names begin."""

    def __init__(self, spans: list[Span] | None = None, labels: dict[str, str] | None = None) -> None:
        self._spans = [] if spans is None else spans
        self._later = list[Callable[[], Iterable[Span]]]()
        self._lock = Lock()
        self.labels = {} if labels is None else labels

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and self.spans == other.spans and self.labels == other.labels

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Timeline(spans={self.spans!r}, labels={self.labels!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.spans, self.labels)

    @property
    def spans(self) -> list[Span]:
        """All spans; the first reader makes those that `extend_later` added."""
        with self._lock:
            made = [span for make in self._later for span in make()]  # all or, if it is interrupted, none
            self._spans.extend(made)
            self._later.clear()
        return self._spans

    def extend_later(self, make: Callable[[], Iterable[Span]]) -> None:
        """Add spans that are made when `spans` is first read, by a function that may be called again."""
        with self._lock:
            self._later.append(make)

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lane names in the order of the field's drawings, then any others."""
        seen = {span.lane for span in self.spans}
        known = [lane for lane in ("gpu", "cpu", "d2h", "h2d", "step") if lane in seen]
        return (*known, *sorted(seen.difference(known)))

    @property
    def end(self) -> float:
        """End of the last span [s]."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def begin(self) -> float:
        """Start of the first span [s]."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def seconds(self) -> float:
        """Time from the first start to the last end [s]."""
        return self.end - self.begin

    def window(self, first: int, last: int) -> Timeline:
        """The spans of iterations ``first`` up to but not including ``last``."""
        return Timeline([span for span in self.spans if first <= span.iteration < last], self.labels)

    def bubbles(self) -> list[Bubble]:
        """Idle times of the lanes, each before a task, in the order in which these tasks began."""
        free = dict.fromkeys(self.lanes, self.begin)
        found = list[Bubble]()
        for span in sorted(self.spans, key=lambda span: span.start):
            if span.start > free[span.lane]:
                found.append(Bubble(span.lane, free[span.lane], span.start, span.after))
            free[span.lane] = max(free[span.lane], span.end)
        return found

    def to_perfetto(self, path: str | Path) -> Path:
        """Write this timeline as a trace that ui.perfetto.dev and chrome://tracing open (gzip if the name ends so)."""
        return write_perfetto(path, [("run", self)])


def overlap(ones: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Time for which two lanes were busy at once; the spans of each lane must follow one another [s]."""
    both = 0.0
    left = 0
    for start, end in ones:
        while left < len(others) and others[left][1] <= start:
            left += 1
        place = left
        while place < len(others) and others[place][0] < end:
            both += min(end, others[place][1]) - max(start, others[place][0])
            place += 1
    return both


def tasks_during(tasks: Iterable[Sequence[tuple[float, float]]], busy: Sequence[tuple[float, float]]) -> float:
    """Number of tasks that run while a lane works, each counted by the share of its time that lies there.

    Parameters
    ----------
    tasks : iterable of sequence of (start, end)
        Spans of each task: several if it made pauses.
    busy : sequence of (start, end)
        Spans of the lane, which follow one another.
    """
    starts = [start for start, _ in busy]
    worked = [0.0]
    for start, end in busy:
        worked.append(worked[-1] + end - start)

    def until(time: float) -> float:
        """Seconds that the lane has worked by then."""
        begun = bisect_right(starts, time)
        return worked[begun] - max(0.0, busy[begun - 1][1] - time) if begun else 0.0

    count = 0.0
    for spans in tasks:
        inside = sum(until(end) - until(start) for start, end in spans)
        length = sum(end - start for start, end in spans)
        count += inside / length if length else 0.0
    return count


def write_perfetto(path: str | Path, tracks: Sequence[tuple[str, Timeline]]) -> Path:
    """Write several timelines into one trace, one process per timeline and one thread per lane.

    Parameters
    ----------
    path : str or Path
        Compressed if its name ends in ``.gz``.
    tracks : sequence of (str, Timeline)
        Titles and timelines, such as a simulated and a measured one. A task that waited names the task that it waited
        for.
    """
    events: list[dict[str, object]] = []
    for process, (title, timeline) in enumerate(tracks, 1):
        threads = {lane: number for number, lane in enumerate(timeline.lanes, 1)}
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}}
            for lane, thread in threads.items()
        ]
        events += [_event(process, threads[span.lane], span) for span in timeline]
    path = Path(path)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return path


def _event(process: int, thread: int, span: Span) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": process,
        "tid": thread,
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {"iteration": span.iteration} | ({"after": span.after} if span.after else {}),
    }
