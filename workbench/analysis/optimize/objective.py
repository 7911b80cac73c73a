"""Objectives of a search: a number of a result that is better the larger it is, and the most that its bound allows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from workbench.analysis.optimize.estimate import Estimate
from workbench.core.errors import ScenarioError
from workbench.core.latency import Slo
from workbench.core.result import Result
from workbench.core.units import format_seconds, four_digits
from workbench.workload import Workload


class Objective(ABC):
    """A measure of results of one workload."""

    @abstractmethod
    def score(self, result: Result, workload: Workload) -> float:
        """The number that is to be as large as possible."""

    @abstractmethod
    def most(self, bound: Result) -> float:
        """The most that any result with this bound can score."""

    @abstractmethod
    def guess(self, estimate: Estimate) -> float:
        """The score that an estimate tells."""

    @abstractmethod
    def told(self, score: float) -> str:
        """A score in words."""

    @abstractmethod
    def ratio(self, score: float, other: float) -> float:
        """Ratio by which one score is better than another."""


@dataclass(frozen=True)
class Throughput(Objective):
    """Output tokens per second."""

    def score(self, result: Result, workload: Workload) -> float:
        """See `Objective.score`."""
        return result.gen_tok_s

    def most(self, bound: Result) -> float:
        """See `Objective.most`: the bound's."""
        return bound.gen_tok_s

    def guess(self, estimate: Estimate) -> float:
        """See `Objective.guess`."""
        return estimate.gen_tok_s

    def told(self, score: float) -> str:
        """See `Objective.told`."""
        return f"{four_digits(score)} output tok/s"

    def ratio(self, score: float, other: float) -> float:
        """See `Objective.ratio`."""
        return score / other if other else math.inf


@dataclass(frozen=True)
class Goodput(Throughput):
    """Output tokens per second of the requests that met an objective."""

    slo: Slo

    def score(self, result: Result, workload: Workload) -> float:
        """See `Objective.score`."""
        times = result.latencies
        met = (times.ttft <= self.slo.ttft) & (times.array("worst_gap") <= self.slo.tbt)
        requests = times.array("request")[met]
        return float(workload.generated_len[requests].sum()) / result.seconds

    def guess(self, estimate: Estimate) -> float:
        """See `Objective.guess`: the less, the more a mean time is above its limit."""
        late = max(1.0, estimate.ttft / self.slo.ttft) * max(1.0, estimate.tbt / self.slo.tbt)
        return estimate.gen_tok_s / late

    def told(self, score: float) -> str:
        """See `Objective.told`."""
        return f"{four_digits(score)} output tok/s in time"


@dataclass(frozen=True)
class Time(Objective):
    """A time of the result, the less the better.

    Attributes
    ----------
    name : str
        "seconds" of the whole job, "ttft" or "tbt".
    """

    name: str

    def score(self, result: Result, workload: Workload) -> float:
        """See `Objective.score`: the negative time."""
        return -float(getattr(result, self.name))

    def most(self, bound: Result) -> float:
        """See `Objective.most`: no bound is known for the times of tokens."""
        return -bound.seconds if self.name == "seconds" else 0.0

    def guess(self, estimate: Estimate) -> float:
        """See `Objective.guess`."""
        return -float(getattr(estimate, self.name))

    def told(self, score: float) -> str:
        """See `Objective.told`."""
        words = {"seconds": "for the job", "ttft": "to the first token", "tbt": "between tokens"}
        return f"{format_seconds(-score)} {words[self.name]}"

    def ratio(self, score: float, other: float) -> float:
        """See `Objective.ratio`."""
        return other / score if score else math.inf


_KNOWN: dict[str, Objective] = {"gen_tok_s": Throughput(), **{name: Time(name) for name in ("seconds", "ttft", "tbt")}}


def objective_of(asked: str | Slo, workload: Workload) -> Objective:
    """The objective of a name, or throughput under an objective for latency.

    Raises
    ------
    ScenarioError
        If there is none of that name, or the workload has no time between tokens.
    """
    if isinstance(asked, Slo):
        return Goodput(asked)
    found = _KNOWN.get(asked) if isinstance(asked, str) else None
    if found is None:
        raise ScenarioError(
            f"objective={asked!r} is none; give {', '.join(map(repr, _KNOWN))} or wb.Slo(ttft=..., tbt=...)."
        )
    if found == Time("tbt") and int(workload.generated_len.max()) < 2:
        raise ScenarioError("objective='tbt' needs a request with two output tokens or more; give 'ttft'.")
    return found
