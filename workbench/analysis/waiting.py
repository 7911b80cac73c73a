"""Causes of a lane's idle time: the tasks of other lanes that it waited for, found in a timeline."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from workbench.core.timeline import Span, Timeline, code_of


class Cause(NamedTuple):
    """A lane that was waited for, and the code of its tasks' node; both are empty for time in which no task ran."""

    lane: str
    code: str


def waits(timeline: Timeline, lane: str) -> dict[Cause, float]:
    """Seconds that a lane was idle, by what it waited for; they add up to its idle time within the timeline.

    An idle time ends with a task that waited for another one (`Span.after`), which may have waited in turn. This chain
    is followed back to the beginning of the idle time, and each part of that time goes to the task of the chain that
    ran then. Where the chain leads to the iteration before, it goes on with the task that ended last. Idle time behind
    the lane's last task goes to the chain of the timeline's last task.

    Parameters
    ----------
    timeline : Timeline
        Every task of a run or of ``simulate(..., detail=Detail.TASK)``.
    lane : str
    """
    chains = _Chains(timeline)
    found = defaultdict[Cause, float](float)
    for bubble in timeline.bubbles():
        if bubble.lane == lane:
            for cause, seconds in chains.causes(bubble.start, bubble.end, bubble.after):
                found[cause] += seconds
    last = max((span.end for span in timeline if span.lane == lane), default=timeline.begin)
    for cause, seconds in chains.causes(last, timeline.end, ""):
        found[cause] += seconds
    return dict(found)


class _Chains:
    """Tasks of a timeline by their names, as `Span.after` gives them, and by their ends."""

    def __init__(self, timeline: Timeline) -> None:
        spans = sorted((span for span in timeline if span.end > span.start), key=lambda span: span.end)
        self._named = defaultdict[str, list[Span]](list)
        for span in spans:
            self._named[f"{span.lane} {span.name}"].append(span)
            self._named[""].append(span)

    def causes(self, begin: float, end: float, after: str) -> Iterator[tuple[Cause, float]]:
        """Parts of an idle time, the last first, with the task of the chain that ran in each."""
        time = end
        while time > begin:
            span = self._last(after, time)
            if span is None or span.end <= begin:
                yield Cause("", ""), time - begin
                return
            if span.end < time:
                yield Cause("", ""), time - span.end
            start = max(begin, span.start)
            yield Cause(span.lane, code_of(span.name)), span.end - start
            time = start
            after = span.after

    def _last(self, name: str, time: float) -> Span | None:
        """The task of a name that ended last by a time, or of all tasks if there is none of that name."""
        spans = self._named.get(name) or self._named[""]
        place = bisect_right(spans, time, key=lambda span: span.end)
        return spans[place - 1] if place else None
