"""The sentence on one result: what limits it, by how much, and what would help."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.analysis.waiting import Cause, waits
from workbench.analysis.wording import GAIN, LANES, LINKS, capital, in_words, lane_of, listed, percent, rate, times
from workbench.core.result import Result, Source
from workbench.core.units import SECONDS, alike, format_seconds, four_digits, percents
from workbench.perfmodels.bound import ARRIVAL
from workbench.perfmodels.loads import CORES, DRAM

MEASURED = (Source.MEASURED, Source.RECORDED)
PLAYED = (Source.SIMULATED, *MEASURED)
"""Sources of results that have batches and busy lanes."""
_CAUSES = 2
"""Causes of waiting that are told one by one."""
_DEVICES = {"gpu": "GPU", "cpu": "CPU", "h2d": "link", "d2h": "link"}
_NOTABLE = 0.05
"""Share of the time or of the cores from which on waiting, work beyond the least or other programs are worth advice."""
_TIGHT = 0.9
"""Share of a bound from which on a lane's least work is told: that of other lanes may be far below what it must be."""
MOSTLY = 0.75
"""Share of the time that a lane must be busy to be called what limits a result."""


def bound_of(result: Result, results: Sequence[Result]) -> Result | None:
    """The bound of a result's scenario and schedule among others; None if it is not there."""
    return next((other for other in results if other.source is Source.BOUND and other.same_question(result)), None)


def rivals(result: Result, results: Sequence[Result]) -> list[Result]:
    """The results that differ from this one in the schedule alone, itself included; stopped runs are left out."""
    return [other for other in results if _setting(other) == _setting(result) and not other.stopped]


def _setting(result: Result) -> tuple[object, ...]:
    return result.origin, result.model, result.machine, dict(result.facts)


def limits_in_words(result: Result, results: Sequence[Result], *, hardware: bool = True) -> str:
    """The sentence on what limits a result, by how much, and what would help; other `hardware` too.

    A result with batches is told by the shares of its time for its busiest lane. "Up to" holds for the same batches
    under any order of tasks.

    Parameters
    ----------
    result : Result
    results : sequence of Result
        Results among which its bound and faster schedules are looked for.
    """
    if result.source is Source.BOUND and result.limits:
        return _bounded(result)
    if result.source not in PLAYED or not any(result.busy.values()):
        limit = f"is limited by {in_words(result.binding)}" if result.binding else "does not tell its limits"
        return f"{result.schedule} ({rate(result, None)}) {limit}; bound and simulate tell what this hardware allows."
    bound = bound_of(result, results)
    if bound is not None and bound.binding == ARRIVAL:
        return _arriving(result, bound)
    return _Division.of(result, bound).told(_known(result, results), hardware=hardware)


def _known(result: Result, results: Sequence[Result]) -> str:
    """Advice that comes before what could be gained: a quiet computer, or a faster schedule; empty if there is none."""
    if result.others >= _NOTABLE:
        return f"other programs took {percent(result.others)} of the cores meanwhile, so run it again without them"
    fastest = max(rivals(result, results), key=lambda other: other.gen_tok_s, default=result)
    ratio = fastest.gen_tok_s / result.gen_tok_s if result.generated else 1.0
    return f"{fastest.schedule} gives {times(ratio)} this throughput" if ratio >= GAIN else ""


def _bounded(bound: Result) -> str:
    """The sentence on a bound: what sets it, and the most that is possible without this limit."""
    first, *others = sorted(bound.limits, key=lambda name: -bound.limits[name])
    most = four_digits(bound.gen_tok_s)
    told = f"At most {most} output tok/s are possible in any order of tasks: {in_words(first)} limits them"
    second = bound.limits[others[0]] if others else 0.0
    if first == ARRIVAL or second <= 0:
        return f"{told}."
    if bound.limits[first] < GAIN * second:
        return f"{told}, and {in_words(others[0])} would allow hardly more."
    return (
        f"{told}; without this limit, {in_words(others[0])} would allow {times(bound.limits[first] / second)} as many."
    )


def _arriving(result: Result, bound: Result) -> str:
    total, (until, then) = alike([bound.seconds, result.seconds - bound.seconds], SECONDS)
    return (
        f"The arrival of the requests limits {result.schedule} ({rate(result, bound)}): the last one comes after "
        f"{until} and all are served {then} later, after {total}; nothing that is faster gives more than "
        f"{times(result.seconds / bound.seconds)} this throughput."
    )


class _Wait(NamedTuple):
    """Seconds in which a lane waited for another one: that lane, and its tasks in words; empty if no task explains."""

    lane: str
    words: str
    seconds: float

    def cause(self, explained: bool) -> str:
        """The cause in words; `explained` tells that there are others, so that no task ran if this one is empty."""
        if self.lane:
            return f" for {self.words}"
        return " between tasks" if explained else ""


@dataclass(frozen=True)
class _Division:
    """The time of a result, divided up for its busiest lane.

    Attributes
    ----------
    result : Result
    bound : Result or None
    lane : str
        The lane that is busy longest.
    least, extra : float
        Seconds of its work that no order of tasks avoids, if the bound is (nearly) its, and seconds of all other work.
    waiting : tuple of _Wait
        Its idle time by cause, the longest first and what no task explains last.
    """

    result: Result
    bound: Result | None
    lane: str
    least: float
    extra: float
    waiting: tuple[_Wait, ...]

    @classmethod
    def of(cls, result: Result, bound: Result | None) -> _Division:
        lane = max(result.busy, key=lambda name: result.busy[name])
        busy = min(result.busy[lane], result.seconds)
        limit = _of_lanes(bound).get(lane, 0.0)
        least = busy if bound is None or limit < _TIGHT * bound.seconds else min(busy, limit)
        waiting = tuple(_waiting(result, lane, result.seconds - busy))
        return cls(result, bound, lane, least, busy - least, waiting)

    @property
    def busy(self) -> float:
        """Seconds in which the lane worked."""
        return self.least + self.extra

    def told(self, advice: str, *, hardware: bool) -> str:
        """The sentence, with this advice or else with what could be gained by less waiting, less work or hardware."""
        result = self.result
        told = f"limits {result.schedule} ({rate(result, self.bound)}):"
        lane = in_words(self.lane)
        mostly = self.busy >= MOSTLY * result.seconds
        short = f"the {_DEVICES[self.lane]}"
        begin = f"{capital(lane)} {told} {short}" if mostly else f"Waiting {told} even the busiest part, {lane},"
        more = advice or self._could(hardware)
        return f"{begin} {self._shares()}{f'; {more}' if more else ''}."

    def _shares(self) -> str:
        """The shares of the time in words, which add up to 100 %."""
        result = self.result
        least, extra, *waiting = percents([self.least, self.extra, *(wait.seconds for wait in self.waiting)])
        why = self._why()
        shares = [
            (least, "on unavoidable work" if extra else "on work"),
            (extra, f"on possibly avoidable work{f' ({why.words})' if why else ''}"),
        ]
        causes = [(share, wait) for share, wait in zip(waiting, self.waiting, strict=True) if share]
        causes.sort(key=lambda cause: -cause[0])
        if (waited := sum(share for share, _ in causes)) < 100 * _NOTABLE:
            shares.append((waited, "waiting"))
        else:
            shares += [(share, f"waiting{wait.cause(len(causes) > 1)}") for share, wait in causes[:_CAUSES]]
            shares.append((sum(share for share, _ in causes[_CAUSES:]), "waiting otherwise"))
        (most, what), *others = (each for each in shares if each[0])
        told = [f"spends {most} % of {format_seconds(result.seconds)} {what}"]
        return listed([*told, *(f"{share} % {what}" for share, what in others)])

    def _why(self) -> _Excess | None:
        """The cause of more than half of the work beyond the least, if that is notable and the cause is known."""
        result = self.result
        bound = self.bound
        if bound is None or self.extra < _NOTABLE * result.seconds:
            return None
        once = max(1, result.processed - result.recomputed)
        known = (
            _Excess(
                result.iterations / max(1, bound.iterations),
                f"{result.iterations:,} iterations, where {bound.iterations:,} would do",
                "fuller batches",
            ),
            _Excess(
                result.processed / once,
                f"{result.recomputed:,} tokens are computed again after a preemption",
                "a KV cache that needs no preemption",
            ),
        )
        return next((each for each in known if (each.factor - 1) * self.least > self.extra / 2), None)

    def _could(self, hardware: bool) -> str:
        """The changes that would help, with the gain of each."""
        gains = [gain for gain in self._gains(hardware) if gain.factor >= GAIN]
        if not gains:
            waits = self.result.seconds - self.busy >= _NOTABLE * self.result.seconds
            if waits and self._most() < GAIN:
                return "the bound allows hardly more"
            return "only less work or faster hardware would give more"
        first, *others = gains
        told = [f"{first.change} would give {first} this throughput{first.reason}"]
        return listed([*told, *(f"{gain.change} {gain}{gain.reason}" for gain in others)])

    def _gains(self, hardware: bool) -> Iterator[_Gain]:
        """Gains by less waiting and less work, if there is notably much of these, and by faster hardware.

        With this hardware none is more than the bound allows.
        """
        seconds = self.result.seconds
        most = self._most()
        if seconds - self.busy >= _NOTABLE * seconds:
            yield from self._less_waiting(most, hardware)
        why = self._why()
        if why is not None:
            yield _Gain(min(most, why.factor, self.busy / self.least), "about", why.mend)
        elif self.bound is not None and self.extra >= _NOTABLE * seconds:
            yield _Gain(min(most, self.busy / self.least), "up to", "avoiding that work")
        if hardware and self.bound is not None and CORES not in self.bound.limits and self.busy >= MOSTLY * seconds:
            yield self._faster(self.bound)

    def _most(self) -> float:
        """The most that this hardware can gain by the bound; infinite without one, or with one that is refuted."""
        if self.bound is None or self.bound.seconds > self.result.seconds:
            return math.inf
        return self.result.seconds / self.bound.seconds

    def _less_waiting(self, most: float, hardware: bool) -> Iterator[_Gain]:
        """Gains by less waiting: with this hardware at most `most`, and by faster devices, if they are asked for."""
        factor = self.result.seconds / self.busy
        if not has_tasks(self.result):
            yield _Gain(min(most, factor), "up to", "more overlap (a timeline of every task tells what it waits for)")
            return
        notable = [wait.lane for wait in self.waiting if wait.seconds >= _NOTABLE * self.result.seconds]
        lanes = dict.fromkeys(f"a faster {_DEVICES[lane]}" for lane in notable if lane)
        more = ["more overlap"] if lanes else []
        less = ["less time between tasks"] if "" in notable or not lanes else []
        faster = list(lanes) if hardware and not (self.bound and CORES in self.bound.limits) else []
        if faster and most >= factor:
            yield _Gain(factor, "up to", listed([*faster, *more, *less], "or"))
            return
        if faster:
            yield _Gain(factor, "up to", listed(faster, "or"))
        yield _Gain(min(most, factor), "up to", listed([*more, *less], "or"))

    def _faster(self, bound: Result) -> _Gain:
        """The most that twice the lane's device gives; with the CPU its memory becomes twice as fast."""
        twice = LINKS if self.lane in LINKS else (self.lane,)
        halved = {lane: busy / 2 if lane in twice else busy for lane, busy in self.result.busy.items()}
        if self.lane != "cpu":
            halved[DRAM] = bound.limits.get(DRAM, 0.0)
        then = max(halved, key=lambda name: halved[name])
        device = f"a {_DEVICES[self.lane]}{' and host memory' if self.lane == 'cpu' else ''} twice as fast"
        reason = " with the same batches"
        if lane_of(then) != self.lane:
            reason += f" (then {in_words(then)} limits)"
        return _Gain(min(2.0, self.result.seconds / halved[then]), "up to", device, reason)


class _Excess(NamedTuple):
    """The factor by which something is more than the least, in words, and its mend."""

    factor: float
    words: str
    mend: str


class _Gain(NamedTuple):
    """The factor that a change gains, "up to" or "about", the change, and the conditions of the gain."""

    factor: float
    about: str
    change: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.about} {times(self.factor)}"


def _of_lanes(bound: Result | None) -> dict[str, float]:
    """Seconds of the least work of each lane, as far as a bound tells them."""
    limits = {} if bound is None else bound.limits
    names = {f"{lane} {kind}": lane for lane in LANES for kind in ("compute", "link")}
    return {names[name]: seconds for name, seconds in limits.items() if name in names}


def _waiting(result: Result, lane: str, idle: float) -> Iterator[_Wait]:
    """The idle time of a lane by cause, scaled down if tasks explain more than there is."""
    found = defaultdict[str, dict[Cause, float]](dict)
    if has_tasks(result) and idle > 0:
        for cause, seconds in waits(result.timeline, lane).items():
            if cause.lane in LANES and cause.lane != lane:
                found[cause.lane][cause] = seconds
    explained = sum(sum(causes.values()) for causes in found.values())
    scale = min(1.0, idle / explained) if explained else 0.0
    for other in sorted(found, key=lambda name: -sum(found[name].values())):
        causes = found[other]
        most = max(causes, key=lambda cause: causes[cause])
        yield _Wait(other, _whose(result, most), scale * sum(causes.values()))
    yield _Wait("", "", idle - scale * explained)


def _whose(result: Result, cause: Cause) -> str:
    """A lane with the operations of its tasks, as the legend of the lane chart names them."""
    operations = result.timeline.labels.get(cause.code, "").split()
    if not operations or cause.lane in LINKS:
        return in_words(cause.lane)
    if len(operations) > 2:
        operations = [operations[0], "...", operations[-1]]
    return f"{LANES[cause.lane]} ({', '.join(operations)})"


def has_tasks(result: Result) -> bool:
    """True if the timeline has every task, not one span per iteration."""
    return bool(result.timeline) and not any(span.lane == "step" for span in result.timeline)
