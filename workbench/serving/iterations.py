"""Records that the serving loop keeps of every iteration and of every request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workbench.core.columns import Arrays
from workbench.core.latency import Latencies, Seconds
from workbench.core.result import Iterations
from workbench.scheduler.batch import NONE, Batch, Flags, Ids
from workbench.schedules.plan import LANES
from workbench.workload import Request, Workload

NEVER = -2
"""Iteration of the latest token of a request that has none yet; -1 would be the iteration before the first."""


class Joined(NamedTuple):
    """A request that the workload does not have, and the seconds after the start at which it came."""

    request: Request
    seconds: float


class Stretch(NamedTuple):
    """Iterations that ran one after the other; each array has an entry for every one of them.

    Attributes
    ----------
    begin, end, taken : ndarray float64
        Times, and seconds in between before they were rounded [s].
    prefill, decode, used, emits, on_time : ndarray int64
        Tokens that leave the model and that are decoded, blocks, output tokens, and those of them that continue.
    expert_bytes : ndarray float64
    begun : tuple of ndarray int64
        Of every run of tokens that began: request, iteration, and iteration of the request's token before.
    busy : ndarray (lanes,) float64
    context : float
        Busy time of each lane, and KV entries read, since the start.
    """

    begin: Seconds
    end: Seconds
    taken: Seconds
    prefill: Ids
    decode: Ids
    used: Ids
    emits: Ids
    on_time: Ids
    expert_bytes: Seconds
    begun: tuple[Ids, Ids, Ids]
    busy: Seconds
    context: float


@dataclass
class Record:
    """Record of one served workload, which grows with every iteration.

    Attributes
    ----------
    generated_len : ndarray (requests,) int64
        Tokens that each request generates: its output length, until it has ended before.
    cancelled : ndarray (requests,) bool
    all_there : bool
        True once every request has arrived, or was cancelled.
    counted : bool
        Count the tokens of each request: one may end before its output length, or be cancelled.
    """

    workload: Workload
    counted: bool = False
    seconds: array[float] = field(default_factory=lambda: array("d"))
    prefill: array[int] = field(default_factory=lambda: array("q"))
    decode: array[int] = field(default_factory=lambda: array("q"))
    used: array[int] = field(default_factory=lambda: array("q"))
    expert_bytes: array[float] = field(default_factory=lambda: array("d"))
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    prefilled: int = 0
    decoded: int = 0
    emitted: int = 0
    context: float = 0.0

    def __post_init__(self) -> None:
        self.last: Seconds = np.full(len(self.workload), np.nan)
        self.tokens = _Tokens(len(self.workload))
        self.generated_len = self.workload.output_len.copy()
        self._known = self.workload.generated_len
        self._arrival: Seconds = np.zeros(len(self.workload))
        if len(self.workload.arrival):
            self._arrival = self.workload.arrival
        self.cancelled: Flags = np.zeros(len(self.workload), dtype=np.bool_)
        self._made: Ids = np.zeros(len(self.workload), dtype=np.int64)
        self._come = 0  # the first request that has not arrived
        self.all_there = False

    @property
    def next_arrival(self) -> float:
        """Time at which the next request arrives that was not cancelled [s]."""
        return float(self.workload.arrival[self._come + int(self.cancelled[self._come :].argmin())])

    def arrived(self, now: float) -> Ids:
        """Requests that have arrived by now, told once, without cancelled ones."""
        times = self.workload.arrival
        begin = self._come
        self._come = int(times.searchsorted(now, "right")) if len(times) else len(self.workload)
        self._look()
        come = np.arange(begin, self._come)
        return come[~self.cancelled[begin : self._come]]

    def _look(self) -> None:
        self.all_there = bool(self.cancelled[self._come : len(self.workload)].all())

    def cancel(self, requests: Ids) -> Ids:
        """Record that these requests, unless they are finished, get no further token; return those that are there."""
        gone: Ids = np.unique(requests[np.isnan(self.last[requests]) & ~self.cancelled[requests]])
        self.cancelled[gone] = True
        self.generated_len[gone] = self._made[gone]
        self._look()
        return gone[(gone < self._come) | (gone >= len(self.workload))]

    def join(self, joined: Sequence[Joined]) -> Ids:
        """Record further requests, which the workload does not have; their numbers."""
        numbers = np.arange(len(self.last), len(self.last) + len(joined))
        outputs = np.array([each.request.output_len for each in joined])
        self.last = np.concatenate((self.last, np.full(len(joined), np.nan)))
        self.generated_len = np.concatenate((self.generated_len, outputs))
        self._known = np.concatenate((self._known, outputs))
        self._arrival = np.concatenate((self._arrival, [each.seconds for each in joined]))
        self.cancelled = np.concatenate((self.cancelled, np.zeros(len(joined), dtype=np.bool_)))
        self._made = np.concatenate((self._made, np.zeros_like(outputs)))
        self.tokens.grow(len(joined))
        return numbers

    def add(
        self, batch: Batch, begin: float, end: float, used: int, busy: dict[str, float], expert_bytes: float
    ) -> None:
        """Record an iteration that ran from `begin` to `end`."""
        self.seconds.append(end - begin)
        self.prefill.append(batch.leaving)
        self.decode.append(len(batch.decodes))
        self.used.append(used)
        self.expert_bytes.append(expert_bytes)
        self.prefilled += int(batch.leaving)
        self.decoded += len(batch.decodes)
        self.emitted += int(batch.rows.emits)
        self.context += batch.rows.context
        for lane in busy:
            self.busy[lane] += busy[lane]
        self.tokens.add(batch.prefills[batch.emits] if batch.cut else batch.prefills, batch.decodes, end)

    def extend(self, stretch: Stretch) -> None:
        """Record the iterations of a stretch, as `add` does one by one; `tokens` has been told by then."""
        self.seconds.frombytes((stretch.end - stretch.begin).tobytes())
        self.prefill.frombytes(stretch.prefill.tobytes())
        self.decode.frombytes(stretch.decode.tobytes())
        self.used.frombytes(stretch.used.tobytes())
        self.expert_bytes.frombytes(stretch.expert_bytes.tobytes())
        self.prefilled += int(stretch.prefill.sum())
        self.decoded += int(stretch.decode.sum())
        self.emitted += int(stretch.emits.sum())
        self.context = stretch.context
        self.busy = dict(zip(LANES, stretch.busy.tolist(), strict=True))
        self.tokens.extend(stretch.end, stretch.on_time, stretch.begun)

    def end(self, batch: Batch, stopped: Ids) -> Ids:
        """Requests that end with the token that a batch has just given them.

        They are those that `stopped`, and those whose end the workload knows.
        """
        if not self.counted:
            return NONE
        emitting = batch.emitting
        self._made[emitting] += 1
        known = emitting[self._made[emitting] == self._known[emitting]]
        ended: Ids = np.union1d(known, stopped)
        self.generated_len[ended] = self._made[ended]
        return ended

    def finish(self, requests: Ids, now: float) -> None:
        """Record that these requests have all their tokens."""
        self.last[requests] = now

    @property
    def steps(self) -> Iterations:
        """Columns of the result, with one entry per iteration."""
        return Iterations.of_arrays(
            seconds=np.array(self.seconds),
            prefill=np.array(self.prefill),
            decode=np.array(self.decode),
            used_blocks=np.array(self.used),
            expert_bytes=np.array(self.expert_bytes),
        )

    @property
    def latencies(self) -> Latencies:
        """Latencies of the requests that were served to their end, computed when they are asked for."""
        return Latencies.later(self._latencies)

    def _latencies(self) -> Arrays:
        served = np.flatnonzero(~np.isnan(self.last))
        worst, gaps, counts = self.tokens.gaps()
        return {
            "request": served,
            "arrival": self._arrival[served],
            "first": self.tokens.first[served],
            "last": self.last[served],
            "worst_gap": worst[served],
            "gap": gaps,
            "gap_count": counts,
        }

    @property
    def waited(self) -> Seconds:
        """Time from arrival to first token of every request that has one [s]."""
        waited = self.tokens.first - self._arrival
        return waited[~np.isnan(waited)]

    @property
    def mean_ttft(self) -> float:
        """Mean time from arrival to first token, over the requests that have one [s]; NaN if none has."""
        waited = self.waited
        return float(waited.mean()) if len(waited) else float("nan")

    @property
    def mean_gap(self) -> float:
        """Mean time between the tokens of a request, over the requests that have several [s]."""
        outputs = self.generated_len
        several = (outputs > 1) & ~np.isnan(self.last)
        gaps = (self.last[several] - self.tokens.first[several]) / (outputs[several] - 1)
        return float(gaps.mean()) if several.any() else float("nan")


class _Tokens:
    """Times of every request's tokens, kept as stretches: consecutive iterations that each gave the request a token.

    A stretch begins with a prefill that samples a token, or with a decode of a request that had none in the iteration
    before. Only the beginnings are recorded, so that an iteration costs little; `gaps` computes the rest at the end.

    Attributes
    ----------
    first : ndarray
        Time of the first token of each request, nan if it has none [s].
    latest : ndarray
        Iteration of each request's latest token, or `NEVER`.
    """

    def __init__(self, requests: int) -> None:
        self.first: Seconds = np.full(requests, np.nan)
        self._ends = array("d")  # end of each iteration
        self._on_time = array("q")  # tokens of each iteration that continue a stretch
        self.latest: Ids = np.full(requests, NEVER)
        self._begun = [(NONE, NONE, NONE)]  # of stretches: request, first iteration, iteration of the token before

    def grow(self, requests: int) -> None:
        """Let so many further requests have tokens."""
        self.first = np.concatenate((self.first, np.full(requests, np.nan)))
        self.latest = np.concatenate((self.latest, np.full(requests, NEVER)))

    def add(self, prefilled: Ids, decodes: Ids, end: float) -> None:
        """Record the requests that got a token from an iteration that ended at `end`."""
        number = len(self._ends)
        self._ends.append(end)
        if len(prefilled):
            self._begin(prefilled)
        late = self.latest.take(decodes) != number - 1
        count = int(np.count_nonzero(late))
        if count:
            self._begin(decodes[late])
        self._on_time.append(len(decodes) - count)
        self.latest[decodes] = number

    def extend(self, ends: Seconds, on_time: Ids, begun: tuple[Ids, Ids, Ids]) -> None:
        """Record iterations of which `first` and `latest` tell already."""
        self._ends.frombytes(ends.tobytes())
        self._on_time.frombytes(on_time.tobytes())
        self._begun.append(begun)

    def _begin(self, requests: Ids) -> None:
        """Begin stretches of these requests with the present iteration."""
        number = len(self._ends) - 1
        before = self.latest.take(requests)
        self._begun.append((requests, np.full(len(requests), number), before))
        self.latest[requests] = number
        self.first[requests[before == NEVER]] = self._ends[-1]

    def gaps(self) -> tuple[Seconds, Seconds, Ids]:
        """Times between two tokens of a request [s]: the longest of each request, or 0; all values; their counts."""
        request, first, before = map(np.concatenate, zip(*self._begun, strict=True))
        again = before != NEVER
        ends = np.array(self._ends)
        between = np.diff(ends, prepend=0.0)
        pauses = ends[first[again]] - ends[before[again]]
        worst = self._longest(request, first, before, between)
        np.maximum.at(worst, request[again], pauses)
        counts = np.concatenate((np.array(self._on_time), np.ones(len(pauses), dtype=np.int64)))
        found, place = np.unique(np.concatenate((between, pauses))[counts > 0], return_inverse=True)
        often = np.bincount(place, counts[counts > 0]).astype(np.int64)
        return worst, found, often

    def _longest(self, request: Ids, first: Ids, before: Ids, between: Seconds) -> Seconds:
        """Longest time between two tokens within the stretches of each request; `between` are the iterations' times."""
        order = np.argsort(request, kind="stable")  # the stretches of one request stay in their order
        request = request[order]
        first = first[order]
        before = before[order]
        last = self.latest[request]
        goes_on = request[1:] == request[:-1]
        last[:-1][goes_on] = before[1:][goes_on]
        several = last > first
        edges = np.stack((first[several] + 1, last[several] + 1), axis=1).ravel()
        longest: Seconds = np.zeros(len(self.latest))
        if len(edges):
            np.maximum.at(longest, request[several], np.maximum.reduceat(np.append(between, 0.0), edges)[::2])
        return longest
