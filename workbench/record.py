"""What the serving loop writes down of every iteration and of every request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from workbench.latency import Latencies, Seconds
from workbench.plan import LANES
from workbench.result import Iterations
from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.workload import Workload


@dataclass
class Record:
    """Grows with the iterations of one served workload."""

    workload: Workload
    seconds: list[float] = field(default_factory=list)
    prefill: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    expert_bytes: list[float] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    emitted: int = 0
    context: float = 0.0

    def __post_init__(self) -> None:
        self.first, self.latest, self.last = (np.full(len(self.workload), np.nan) for _ in range(3))
        self._worst: Seconds = np.zeros(len(self.workload))
        self._gaps, self._before = Counter[float](), 0.0

    def add(
        self, batch: Batch, begin: float, end: float, used: int, busy: dict[str, float], expert_bytes: float
    ) -> None:
        """An iteration that ran from `begin` to `end`."""
        self.seconds.append(end - begin)
        self.prefill.append(batch.leaving)
        self.decode.append(len(batch.decodes))
        self.used.append(used)
        self.expert_bytes.append(expert_bytes)
        self.emitted += int(batch.rows.emits)
        self.context += batch.rows.context
        for lane in busy:
            self.busy[lane] += busy[lane]
        self._emit(batch.prefills[batch.emits] if batch.cut else batch.prefills, batch.decodes, end)

    def _emit(self, prefilled: Ids, decodes: Ids, now: float) -> None:
        """These got a token; nearly all who decode had their latest one when the iteration before ended."""
        late = NONE
        if len(prefilled):  # who was preempted has had a first token
            started = ~np.isnan(self.first[prefilled])
            late = prefilled[started]
            self.first[prefilled[~started]] = now
        usual = self.latest.take(decodes) == self._before
        count = int(np.count_nonzero(usual))
        if count:
            self._gaps[now - self._before] += count
            self._worst[decodes] = np.maximum(self._worst.take(decodes), now - self._before)
        if count < len(decodes):
            late = np.concatenate((late, decodes[~usual]))
        if len(late):
            lengths = now - self.latest[late]
            found, counts = np.unique(lengths, return_counts=True)
            self._gaps.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
            self._worst[late] = np.maximum(self._worst[late], lengths)
        self.latest[prefilled] = self.latest[decodes] = self._before = now

    def finish(self, requests: Ids, now: float) -> None:
        """These have all their tokens."""
        self.last[requests] = now

    @property
    def steps(self) -> Iterations:
        """Its columns."""
        columns = (self.seconds, self.prefill, self.decode, self.used, self.expert_bytes)
        return Iterations(*map(tuple, columns))  # type: ignore[arg-type]

    @property
    def latencies(self) -> Latencies:
        """Of the requests that were served to their end."""
        served = np.flatnonzero(~np.isnan(self.last))
        arrival = self.workload.arrival if len(self.workload.arrival) else np.zeros(len(self.workload))
        arrived, first, last, worst = (
            tuple(column[served].tolist()) for column in (arrival, self.first, self.last, self._worst)
        )
        gaps, counts = tuple(self._gaps), tuple(self._gaps.values())
        return Latencies(tuple(served.tolist()), arrived, first, last, worst, gaps, counts)

    @property
    def mean_ttft(self) -> float:
        """From arrival to first token, of those that have one [s]."""
        return float(np.nanmean(self.first - self.workload.arrival if len(self.workload.arrival) else self.first))

    @property
    def mean_gap(self) -> float:
        """Between the tokens of a request, mean over the requests that have several [s]."""
        outputs = self.workload.output_len
        several = (outputs > 1) & ~np.isnan(self.last)
        gaps = (self.last[several] - self.first[several]) / (outputs[several] - 1)
        return float(gaps.mean()) if several.any() else float("nan")
