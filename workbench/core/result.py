"""Results of all readers: throughput with its source, machine, versions and date."""

from __future__ import annotations

import enum
import functools
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from reprlib import repr as short
from typing import Any, get_type_hints

from workbench.core.columns import Columns, Given, check_columns
from workbench.core.display import escaped
from workbench.core.energy import Energy
from workbench.core.errors import ResultError
from workbench.core.latency import Latencies, Slo
from workbench.core.records import from_plain, read_json, reason
from workbench.core.timeline import Span, Timeline
from workbench.core.units import four_digits, is_number, is_whole

FORMAT = 1


class Source(enum.Enum):
    """Origin of a result's numbers."""

    BOUND = "bound"
    PREDICTED = "predicted"
    SIMULATED = "simulated"
    MEASURED = "measured"
    RECORDED = "recorded"
    PUBLISHED = "published"


@dataclass(frozen=True)
class Iterations(Columns):
    """Columns with one entry per iteration.

    Attributes
    ----------
    seconds : tuple of float
        Duration of the iteration; time without a batch, until the next request arrives, belongs to no iteration [s].
    prefill, decode : tuple of int
        Tokens of each class that passed the last layer.
    used_blocks : tuple of int
        KV blocks in use during the iteration.
    expert_bytes : tuple of float
        Bytes of routed experts that were read, each chosen one once per layer and part [B]: counted in a measurement,
        else expected for the model's routing.
    """

    seconds: tuple[float, ...] = field(default_factory=tuple)
    prefill: tuple[int, ...] = field(default_factory=tuple)
    decode: tuple[int, ...] = field(default_factory=tuple)
    used_blocks: tuple[int, ...] = field(default_factory=tuple)
    expert_bytes: tuple[float, ...] = field(default_factory=tuple)

    @classmethod
    def _check(cls, columns: Given) -> None:
        check_columns("iterations", columns)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of a generated token, and of the tokens that were the most likely in its place.

    They are of the model's own logits, before penalties and temperature.

    Attributes
    ----------
    logprob : float
        Natural logarithm of the token's probability.
    best : tuple of (int, float)
        Token ids and their log probabilities, the most likely first.
    """

    logprob: float
    best: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """Throughput of one scenario under one schedule, with the measurements or the model behind it.

    Attributes
    ----------
    source : Source
    seconds : float
        Time to serve the whole workload [s].
    generated, processed : int
        Output tokens, and prompt plus output tokens that passed the model, recomputed ones included.
    preemptions, recomputed : int
        Number of times that a request lost its KV cache, and tokens that passed the model once more because of it.
    busy : mapping of lane to float
        Busy time per lane [s].
    limits : mapping of str to float
        For a bound: time that each limit alone would take; the largest is the bound [s].
    ttft, tbt : float
        Mean time from a request's arrival to its first token, and mean time between its tokens [s].
    latencies : Latencies
        Latencies of every request, from which quantiles and objectives are computed.
    energy : Energy or None
        Energy of the whole run, with its source.
    tokens : tuple of tuples of int
        For a measurement: tokens that each request generated.
    logprobs : tuple of tuples of TokenLogprobs
        For a measurement: those of each token of the requests that ask for them, empty for the others.
    interval : tuple of (float, float), optional
        For a simulation of a calibrated computer: range of output tokens per second in 90 of 100 runs, estimated from
        the computer's drift between the passes of the calibration.
    predictor : str
        For a prediction: the model that made it, such as "MoE-Lens".
    expert_counts : tuple of tuples of int
        For a measurement: number of times that each routed expert was computed, layer by layer.
    stopped : bool
        True if the run was stopped before the whole workload was served: all fields cover only what was served.
    others : float
        For a measurement: share of the cores that other programs, or other guests of the same host, took meanwhile.
    backend : str
        For a measurement: the library that computed each lane's work.

    Raises
    ------
    ResultError
        If a count or a time is negative, it took no time, or the interval's ends are the wrong way round.
    """

    source: Source
    schedule: str
    model: str
    machine: str
    seconds: float
    generated: int
    processed: int
    iterations: int = 0
    preemptions: int = 0
    recomputed: int = 0
    busy: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    ttft: float = math.nan
    tbt: float = math.nan
    steps: Iterations = field(default_factory=Iterations, repr=False)
    latencies: Latencies = field(default_factory=Latencies, repr=False)
    energy: Energy | None = None
    timeline: Timeline = field(default_factory=Timeline, repr=False)
    tokens: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = field(default=(), repr=False)
    expert_counts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    facts: Mapping[str, str] = field(default_factory=dict)
    stopped: bool = False
    others: float = 0.0
    backend: str = ""
    interval: tuple[float, float] | None = None
    predictor: str = ""
    versions: Mapping[str, str] = field(default_factory=lambda: versions())
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        for name in ("generated", "processed", "iterations", "preemptions", "recomputed"):
            count = getattr(self, name)
            if not is_whole(count) or not 0 <= count < 2**63:
                raise ResultError(f"a result has {name}={short(count)}; give a whole number from 0 on, below 2**63.")
            object.__setattr__(self, name, int(count))
        if not (is_number(self.seconds) and 0 < self.seconds < math.inf):
            raise ResultError(f"a result took seconds={self.seconds!r}; give a positive number.")
        lanes = {f"{kind}[{name!r}]": v for kind in ("busy", "limits") for name, v in getattr(self, kind).items()}
        unless_nan = {name: getattr(self, name) for name in ("ttft", "tbt") if not _is_nan(getattr(self, name))}
        for name, value in {**lanes, **unless_nan, "others": self.others}.items():
            if not (is_number(value) and 0 <= value < math.inf):
                raise ResultError(f"a result has {name}={value!r}; give a number from 0 on.")
        pair = (0.0, 0.0) if self.interval is None else tuple(self.interval)
        low, high = pair if len(pair) == 2 else (math.nan, math.nan)
        if not (is_number(low) and is_number(high) and 0 <= low <= high < math.inf):
            raise ResultError(f"a result has the interval {self.interval!r}; give (lower, upper) rates from 0 on.")

    @property
    def origin(self) -> str:
        """The source, with the model for a prediction: ``predicted by MoE-Lens``."""
        return f"{self.source.value} by {self.predictor}" if self.predictor else self.source.value

    @property
    def gen_tok_s(self) -> float:
        """Output tokens per second."""
        return self.generated / self.seconds

    @property
    def proc_tok_s(self) -> float:
        """Prompt and output tokens that passed the model, per second."""
        return self.processed / self.seconds

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the time that each lane was busy."""
        return {lane: busy / self.seconds for lane, busy in self.busy.items()}

    @property
    def expert_bytes(self) -> float:
        """Bytes of routed experts that all iterations read."""
        return sum(self.steps.expert_bytes)

    def attainment(self, slo: Slo) -> float:
        """Share of the served requests that met an objective: the first token and EVERY gap in time."""
        return self.latencies.attainment(slo)

    @property
    def binding(self) -> str:
        """Name of the limit that gives the bound, or of the busiest lane."""
        shares = self.limits or self.busy
        return max(shares, key=lambda name: shares[name]) if shares else ""

    def same_question(self, other: Result) -> bool:
        """True if both results are of the same scenario and schedule, whatever their sources."""
        mine = (self.schedule, self.model, self.machine)
        theirs = (other.schedule, other.model, other.machine)
        return mine == theirs and self.facts == other.facts and self.stopped == other.stopped

    def save(self, path: str | Path) -> Path:
        """Write as versioned JSON, timeline included."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
        return path

    def to_dict(self, *, timeline: bool = True) -> dict[str, Any]:
        """The result as plain values; NaN becomes None. Without the timeline, request latencies are left out too."""
        kept = replace(self, timeline=Timeline(), latencies=Latencies())
        values = {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in asdict(kept).items()}
        values["latencies"] = self.latencies.columns() if timeline else asdict(Latencies())
        spans = [[*span[:5], span.after] for span in self.timeline] if timeline else []
        labels = self.timeline.labels
        derived = {"gen_tok_s": self.gen_tok_s, "proc_tok_s": self.proc_tok_s, "utilisation": self.utilisation}
        return {"format": FORMAT, **values, "source": self.source.value, "timeline": spans, "labels": labels, **derived}

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read a result written by `save`; the source of a measured one becomes RECORDED.

        Raises
        ------
        ResultError
            If the file is missing, has another format version, or is no result.
        """
        try:
            values = read_json(path)
        except ValueError as error:
            raise ResultError(f"{path} is no result ({reason(error)}); save it again.") from error
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: Any, where: str) -> Result:
        """Read what `to_dict` gave; errors name the place `where` it was found. A measured one becomes RECORDED.

        Raises
        ------
        ResultError
            As `load` does.
        """
        try:
            known = isinstance(values, dict) and values.get("format") == FORMAT
            result = cls._from_values({**values}) if known else None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ResultError(f"{where} is no result ({reason(error)}); save it again.") from error
        if result is None:
            raise ResultError(f"{where} was written in another format; this version reads format {FORMAT}.")
        return result

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Result:
        """The result of plain values, as `to_dict` gives them."""
        for derived in ("format", "gen_tok_s", "proc_tok_s", "utilisation"):
            values.pop(derived)
        tokens = from_plain(tuple[tuple[int, ...], ...], values.pop("tokens"))
        if any(not 0 <= token < 2**63 for row in tokens for token in row):
            raise ValueError("a token id is no number of 63 bits")
        labels = from_plain(Mapping[str, str], values.pop("labels"))
        absent = {"steps", "facts", "versions", "date"}.difference(values)  # their defaults would be false here
        if absent:
            raise KeyError(min(absent))
        source = Source(values.pop("source"))
        timeline = Timeline([_span(*row) for row in values.pop("timeline")], dict(labels))
        kinds = get_type_hints(cls)
        unread = {name: math.nan if values[name] is None else values[name] for name in ("ttft", "tbt")}
        found = {name: from_plain(kinds[name], value) for name, value in (values | unread).items()}
        recorded = Source.RECORDED if source is Source.MEASURED else source
        return cls(source=recorded, timeline=timeline, tokens=tokens, **found)

    def diff(self, other: Result) -> dict[str, tuple[Any, Any]]:
        """Fields in which two results differ, the long columns left out."""
        skipped = ("steps", "latencies", "timeline", "tokens", "logprobs", "expert_counts", "date")
        mine = self.to_dict(timeline=False)
        theirs = other.to_dict(timeline=False)
        return {key: (mine[key], theirs[key]) for key in mine if key not in skipped and mine[key] != theirs[key]}

    def __str__(self) -> str:
        within = "" if self.interval is None else " (90 % within {} to {})".format(*map(four_digits, self.interval))
        return (
            f"{self.origin}: {four_digits(self.gen_tok_s)} output tok/s{within}, "
            f"{four_digits(self.proc_tok_s)} processed tok/s, {self.model} on {self.machine} under {self.schedule}"
        )

    def _repr_html_(self) -> str:
        rate = f"<b>{escaped(self.origin)}</b> {four_digits(self.gen_tok_s)} output tok/s"
        return f"{rate} &middot; {escaped(self.schedule)} &middot; {escaped(self.machine)}"


def _is_nan(value: object) -> bool:
    return is_number(value) and math.isnan(value)


def _span(lane: str, name: str, start: float, end: float, iteration: int, after: str = "") -> Span:
    """The span of a row of a saved timeline; earlier versions saved no `after`."""
    words = all(isinstance(word, str) for word in (lane, name, after))
    if not (words and is_number(start) and is_number(end) and start <= end and is_whole(iteration)):
        raise ValueError("the timeline has a row that is no lane, task, start, end, iteration and predecessor")
    return Span(lane, name, start, end, iteration, after=after)


def versions() -> dict[str, str]:
    """Versions of everything that changes a number."""
    return dict(_versions())


@functools.cache
def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for package in ("moe-workbench", "numpy", "torch", "numba", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source tree" if package == "moe-workbench" else "absent"
    return found
