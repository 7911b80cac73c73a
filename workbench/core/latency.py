"""Latencies of requests: first tokens, gaps between tokens, and the share of requests that meets an objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
import numpy.typing as npt

from workbench.core.columns import Columns, Given, check_columns

Seconds = npt.NDArray[np.float64]
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Slo:
    """Objective for the latency of a request (service level objective).

    Attributes
    ----------
    ttft : float
        Longest time to the first token, inf for no limit [s].
    tbt : float
        Longest gap between two tokens, inf for no limit [s].

    Raises
    ------
    ValueError
        If one is no positive number.
    """

    ttft: float
    tbt: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not (number and value > 0):
                raise ValueError(f"{name} of an Slo must be positive, not {value!r}; give seconds, or inf for any.")


def check_slo(slo: object) -> None:
    """Refuse a value that is no objective, such as a pair of numbers.

    Raises
    ------
    ValueError
        If it is no Slo.
    """
    if not isinstance(slo, Slo):
        raise ValueError(f"slo must be an objective, not {slo!r}; give wb.Slo(ttft=..., tbt=...) in seconds.")


@dataclass(frozen=True)
class Latencies(Columns):
    """Latencies of the requests that were served to their end: one entry per request, and the gaps of all together.

    Attributes
    ----------
    request : tuple of int
        Number of the request in the workload.
    arrival, first, last : tuple of float
        Times of arrival, of the first token and of the last token [s].
    worst_gap : tuple of float
        Longest time between two tokens of the request, 0 if it has only one token [s].
    gap, gap_count : tuple of float, tuple of int
        Distinct times between two tokens of one request [s], and the number of times that each occurred.
    """

    request: tuple[int, ...] = field(default_factory=tuple)
    arrival: tuple[float, ...] = field(default_factory=tuple)
    first: tuple[float, ...] = field(default_factory=tuple)
    last: tuple[float, ...] = field(default_factory=tuple)
    worst_gap: tuple[float, ...] = field(default_factory=tuple)
    gap: tuple[float, ...] = field(default_factory=tuple)
    gap_count: tuple[int, ...] = field(default_factory=tuple)

    @classmethod
    def _check(cls, columns: Given) -> None:
        gaps = ("gap", "gap_count")
        check_columns("latencies", {name: column for name, column in columns.items() if name not in gaps})
        check_columns("gaps", {name: columns[name] for name in gaps})

    @property
    def ttft(self) -> Seconds:
        """Time from arrival to the first token of each request, queueing included [s]."""
        times: Seconds = self.array("first") - self.array("arrival")
        return times

    @property
    def end_to_end(self) -> Seconds:
        """Time from arrival to the last token of each request [s]."""
        times: Seconds = self.array("last") - self.array("arrival")
        return times

    @property
    def tbt(self) -> Seconds:
        """Every gap between two tokens of one request, in ascending order [s]."""
        gaps = self.array("gap")
        order = np.argsort(gaps)
        return np.repeat(gaps[order], self.array("gap_count").astype(np.int64)[order])

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean, p50, p90 and p99 of ttft, tbt and end_to_end [s]; empty columns are left out."""
        found = {"ttft": self.ttft, "tbt": self.tbt, "end_to_end": self.end_to_end}
        return {name: _summary(times) for name, times in found.items() if len(times)}

    def attainment(self, slo: Slo) -> float:
        """Share of the requests that met the objective; see `attainment`."""
        return attainment(self.ttft, self.array("worst_gap"), slo)


def percentiles(times: npt.ArrayLike) -> tuple[float, float]:
    """Median and 90th percentile of some times; NaN for none [s]."""
    known = np.asarray(times, dtype=np.float64)
    if not known.size:
        return math.nan, math.nan
    half, most = np.percentile(known, (50, 90))
    return float(half), float(most)


def _summary(times: Seconds) -> dict[str, float]:
    """Mean and percentiles of one column, which is not empty."""
    percentiles = {f"p{share}": float(np.percentile(times, share)) for share in _PERCENTILES}
    return {"mean": float(times.mean()), **percentiles}


def attainment(ttft: npt.ArrayLike, worst_gap: npt.ArrayLike, slo: Slo) -> float:
    """Share of requests whose first token and EVERY gap came in time [1].

    Parameters
    ----------
    ttft, worst_gap : array_like, shape (requests,)
        Time from arrival to the first token, queueing included, and longest gap of each request [s].
    slo : Slo

    Raises
    ------
    ValueError
        If the objective is no Slo, a time is negative or there is no request.

    Notes
    -----
    Layered Prefill section 5.1.
    """
    check_slo(slo)
    first = np.asarray(ttft, dtype=np.float64)
    gap = np.asarray(worst_gap, dtype=np.float64)
    if not first.size:
        raise ValueError("ttft must hold at least one request, not none; serve some first.")
    for name, times in (("ttft", first), ("worst_gap", gap)):
        if not (times >= 0).all():
            raise ValueError(f"{name} must be at least 0, not {times.min()}; give seconds.")
    return float(np.mean((first <= slo.ttft) & (gap <= slo.tbt)))


def capacity(attained: Callable[[float], float], *, target: float, low: float, high: float) -> float:
    """Highest request rate whose attainment reaches a target, by bisection to 1 % of the range [requests/s].

    Parameters
    ----------
    attained : callable
        Attainment at a rate, which must fall as the rate rises. Give a mean over several seeds: near saturation a
        single run says little.
    target : float
        Share of the requests, 0.9 in the paper.
    low, high : float
        Rates between which to search.

    Raises
    ------
    ValueError
        If the target is no share, or `low` is not below `high`, misses the target, or `high` reaches it.

    Notes
    -----
    Layered Prefill section 5.2.
    """
    if not 0 <= target <= 1:
        raise ValueError(f"target must be between 0 and 1, not {target}; give a share of the requests.")
    if not low < high:
        raise ValueError(f"low must be below high, not {low} and {high}; give rates to search between.")
    if not attained(low) >= target > attained(high):
        raise ValueError(f"rates {low} to {high} do not bracket the attainment of {target}; widen the range.")
    tolerance = (high - low) / 100
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if attained(middle) >= target else (low, middle)
    return low
