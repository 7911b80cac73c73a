"""Measurements of one computer: times of operations at a model's shapes, and the lanes' shares of its cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from workbench.core.errors import ScenarioError
from workbench.core.records import LEFT_OUT, saved_as, saved_repr
from workbench.core.units import is_number

if TYPE_CHECKING:
    from workbench.core.result import Result

_MOST_STOLEN = 0.5  # share of a core that the movers take from a lane that wants it too
_POINTS = ("seconds", "decode_seconds")
_PER_UNIT = ("per_prompt", "per_pair", "per_context")


def _check_least(what: str, least: float, *values: float) -> None:
    if not all(is_number(value) and least <= value < math.inf for value in values):
        raise ScenarioError(f"{what} are {values}; give numbers from {least:g} on.")


@dataclass(frozen=True)
class OpTime:
    """Seconds of one operation in one layer, alone and warm, on `threads` threads, or on a card for 0 threads.

        t = t(tokens), linear between the points, + per_prompt n_p + per_pair n_pairs + per_context n_c

    Where decodes have points of their own, t(tokens) is their time for n_d decodes, and prefills beside them add
    t(tokens) - t(n_d): what is fixed in a call is paid once.

    Attributes
    ----------
    op : str
        Name of the operation; "embed" and "head" are before and after the layers.
    threads : int
    tokens, seconds : tuple of float
        The points, rising in both. Tokens are the rows that the operation takes; for the head, the rows that emit.
    per_prompt, per_pair, per_context : float
        Seconds per prompt, per query-key pair of prefill attention and per KV entry that decodes read.
    decodes, decode_seconds : tuple of float
        Points of calls with decodes alone, without the entries that they read, both rising; none if decodes take as
        long as other tokens.
    resident : bool
        True if its weights were resident; False if they had just come over the link, or it has none.
    few : float
        Most rows of the calls that have kernels for few rows; their times say nothing of calls with more.
    """

    op: str
    threads: int
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    per_prompt: float = 0.0
    per_pair: float = 0.0
    per_context: float = 0.0
    decodes: tuple[float, ...] = ()
    decode_seconds: tuple[float, ...] = ()
    resident: bool = False
    few: float = 0.0

    def __post_init__(self) -> None:
        slopes = (self.per_prompt, self.per_pair, self.per_context)
        self._check_points("tokens", self.tokens, self.seconds)
        if self.decodes or self.decode_seconds:
            self._check_points("decodes", self.decodes, self.decode_seconds)
        _check_least(f"times of {self.op!r}", 0.0, *self.seconds, *self.decode_seconds, *slopes, self.few)
        _check_least(f"threads of {self.op!r}", 0, self.threads)

    def _check_points(self, of: str, at: tuple[float, ...], seconds: tuple[float, ...]) -> None:
        rising = all(low < high for low, high in pairwise(at)) and all(low <= high for low, high in pairwise(seconds))
        if not (len(at) == len(seconds) >= 2 and rising and at[0] > 0):
            raise ScenarioError(f"times of {self.op!r} are {seconds} s at {at} {of}; give both rising, one for one.")

    def times(self, factor: float) -> OpTime:
        """The same operation with times multiplied by `factor`."""
        longer: dict[str, Any] = {name: factor * getattr(self, name) for name in _PER_UNIT}
        for name in _POINTS:
            longer[name] = tuple(factor * each for each in getattr(self, name))
        return replace(self, **longer)


@dataclass(frozen=True)
class Contention:
    """Slowdown of each compute lane in plans in which both work at once: they share DRAM and the interpreter's lock.

    Attributes
    ----------
    gpu, cpu : float
        Relative growth of a lane's times while the other compute lane works.
    gpu_wait, cpu_wait : float
        Seconds that a lane waits for each task of another lane, transfers included, that runs while it works.
    """

    gpu: float = 0.0
    cpu: float = 0.0
    gpu_wait: float = 0.0
    cpu_wait: float = 0.0

    def stretch(self, seconds: Sequence[float], lanes: Sequence[str]) -> list[float]:
        """Times of tasks on these lanes, slowed down; those of transfers do not change."""
        factors = {"gpu": 1 + self.gpu, "cpu": 1 + self.cpu}
        return [length * factors.get(lane, 1.0) for length, lane in zip(seconds, lanes, strict=True)]


@dataclass(frozen=True)
class Losses:
    """Time that a plan loses between its tasks, and by lanes that work at once.

    Attributes
    ----------
    dispatch : float
        Seconds from the end of a task to the start of one on another lane that waited for it, and the time of a task
        beyond its operations.
    move : float
        Seconds that a transfer of activations takes beyond its bytes.
    contention : Contention
        Slowdown of the compute lanes in plans in which both work at once.
    experts : Contention or None
        The same for plans whose cpu lane computes experts and no attention, which spends more of its time in Python;
        None if that was not measured.
    """

    dispatch: float = saved_as("hand_over", 0.0)
    move: float = 0.0
    contention: Contention = Contention()
    experts: Contention | None = None

    def __post_init__(self) -> None:
        slower = (*astuple(self.contention), *astuple(self.experts or self.contention))
        _check_least("times that a plan loses", 0.0, self.dispatch, self.move, *slower)

    __repr__ = saved_repr


@dataclass(frozen=True)
class InOneCall:
    """Time that one call for all stages of a layer saves few decodes.

    Attributes
    ----------
    saved : float
        Seconds that a layer takes less than its stages one by one, with the hand-over to the layer that follows.
    rows, entries : float
        Most decodes, and most KV entries that they read together.
    """

    saved: float
    rows: float
    entries: float

    def __post_init__(self) -> None:
        _check_least("layers in one call", 0.0, self.saved, self.rows, self.entries)

    def saves(self, prefill: float, decodes: float, entries: float) -> float:
        """Seconds that a layer takes less for a batch with these rows and KV entries."""
        return self.saved if not prefill and decodes <= self.rows and entries <= self.entries else 0.0


@dataclass(frozen=True)
class Profile:
    """Times of one model's operations in one precision, and the times between them.

    Attributes
    ----------
    shape : str
        `ModelConfig.shape` and the precision of weights and KV that the times hold for.
    ops : tuple of OpTime
    iteration, request, task : float
        Seconds between two plans, in which no lane works: fixed, per request in the batch and per task of the plan.
    dispatch, move, contention : float, float, Contention
        Losses of plans that stream weights; see `Losses`.
    resident : Losses or None
        The same of plans that stream none, whose lanes find Python and rows in their caches; None if that was not
        measured.
    fetch : float
        Seconds that a transfer of weights takes beyond its bytes.
    rest : float
        Seconds by which a task of the gpu lane takes longer that waited for weights.
    spread : tuple of (float, float)
        90 % interval of the measured times of passes through the layers, over the times that follow from `ops`.
    others : float
        Share of the cores that other programs took during the measurement; above a small share, it was made under load.
    in_one_call : InOneCall or None
        None if no layer is computed in one call, or that was not measured, as beside a card.
    corrected : str
        The run by which `corrected_by` corrected it, or "". A corrected profile is no calibration: it has seen
        throughput.
    """

    shape: str
    ops: tuple[OpTime, ...]
    iteration: float = 0.0
    request: float = 0.0
    dispatch: float = saved_as("hand_over", 0.0)
    move: float = 0.0
    fetch: float = 0.0
    spread: tuple[float, float] = (1.0, 1.0)
    task: float = 0.0
    rest: float = 0.0
    contention: Contention = Contention()
    others: float = 0.0
    corrected: str = ""
    resident: Losses | None = None
    in_one_call: InOneCall | None = field(default=None, metadata={LEFT_OUT: True})

    def __post_init__(self) -> None:
        times = (self.iteration, self.request, self.dispatch, self.move, self.fetch, self.task, self.rest)
        losses = (*astuple(self.contention), self.others)
        _check_least(f"times of {self.shape!r}", 0.0, *times, *losses, *self.spread)
        if not self.spread[0] <= self.spread[1]:
            raise ScenarioError(f"{self.shape!r} has spread={self.spread}; give (lower, upper).")

    __repr__ = saved_repr

    def corrected_by(self, measured: Result, simulated: Result) -> Profile:
        """The same profile with the times of its operations scaled by the factor of a run's compute lanes.

        The profile is marked as corrected, and so are its simulations. `calibrate` and `bench sim` neither make nor use
        such a profile.

        Parameters
        ----------
        measured, simulated : Result
            A run, and its simulation with this profile.

        Raises
        ------
        ScenarioError
            If these are no run and simulation of one scenario and schedule.
        """
        kinds = measured.source.value, simulated.source.value
        if kinds != ("measured", "simulated") or not measured.same_question(simulated):
            raise ScenarioError(
                f"{measured.schedule} {kinds[0]} and {simulated.schedule} {kinds[1]} are no run and simulation of one "
                "question; give run(scenario, schedule) and simulate(scenario, schedule)."
            )
        factor = _computing(measured) / _computing(simulated)
        told = f"operations x {factor:.3g} by a run of {measured.schedule} on {measured.date[:10]}"
        return replace(self, ops=tuple(time.times(factor) for time in self.ops), corrected=told)

    def losses(self, *, streams: bool, attends: bool) -> Losses:
        """Time that a plan loses that streams weights, or none, and whose cpu lane `attends` or not."""
        if self.resident is None or streams:
            return Losses(self.dispatch, self.move, self.contention)
        if attends or self.resident.experts is None:
            return self.resident
        return replace(self.resident, contention=self.resident.experts)

    def find(self, op: str, threads: int, *, resident: bool = False) -> OpTime | None:
        """The times of an operation on `threads` threads, or None if it was not measured.

        If it was measured only with streamed weights, or only with resident ones, those times are returned.
        """
        found = None
        for time in self.ops:
            if (time.op, time.threads) == (op, threads):
                if time.resident == resident:
                    return time
                found = time
        return found


def _computing(result: Result) -> float:
    """Busy time of both compute lanes together [s]."""
    return sum(result.busy.get(lane, 0.0) for lane in ("gpu", "cpu"))


@dataclass(frozen=True)
class Cores:
    """Division of a computer's cores among the lanes.

    Attributes
    ----------
    gpu, cpu : int
        Threads of each compute lane while both work; none of the gpu lane where a card computes it.
    alone : int
        Threads of a compute lane on the CPU while the other rests.
    spare : int
        Cores left to the data movers; without one they take time from a compute lane.
    mover : float
        Core-seconds that copying one byte takes.
    gpu_slowdown, cpu_slowdown : float
        Relative growth of each lane's times per byte/s that is streamed on another core meanwhile: they share DRAM.
    gpu_team_slowdown, cpu_team_slowdown : float
        The same for a lane that has all cores and so shares one with the movers.
    """

    gpu: int
    cpu: int
    alone: int
    spare: int = 0
    mover: float = 0.0
    gpu_slowdown: float = saved_as("gpu_drag", 0.0)
    cpu_slowdown: float = saved_as("cpu_drag", 0.0)
    gpu_team_slowdown: float = saved_as("gpu_team_drag", 0.0)
    cpu_team_slowdown: float = saved_as("cpu_team_drag", 0.0)

    def __post_init__(self) -> None:
        _check_least("cores of the gpu lane", 0, self.gpu)
        _check_least("cores of the cpu lane", 1, self.cpu, self.alone)
        slowdowns = (self.gpu_slowdown, self.cpu_slowdown, self.gpu_team_slowdown, self.cpu_team_slowdown)
        _check_least("shares of cores", 0.0, self.spare, self.mover, *slowdowns)

    __repr__ = saved_repr

    def stolen(self, rate: float) -> float:
        """Share of a compute lane's core that the movers take while they stream at a rate [B/s]."""
        return 0.0 if self.spare else min(self.mover * rate, _MOST_STOLEN)

    @classmethod
    def of(cls, total: int) -> Cores:
        """Half of the cores for each lane; of four or more cores, one is left to the movers."""
        spare = 1 if total >= 4 else 0
        gpu = max(1, (total - spare) // 2)
        return cls(gpu, max(1, total - spare - gpu), max(1, total - spare), spare)

    @classmethod
    def beside_card(cls, total: int) -> Cores:
        """All cores for the cpu lane but one, which issues to the card, and of four or more one for the movers."""
        spare = 1 if total >= 4 else 0
        rest = max(1, total - 1 - spare)
        return cls(0, rest, rest, spare)


@dataclass(frozen=True)
class Pace:
    """Threads of the compute lanes during one plan, and the slowdown of each while weights stream.

    `beside` is the compute lane on whose cores the data movers work, "" if they have their own or all share all.
    `contention` has the relative growth of each compute lane's times in this plan; its waits are part of that.
    """

    gpu: int
    cpu: int
    beside: str
    gpu_slowdown: float
    cpu_slowdown: float
    contention: Contention = Contention()
