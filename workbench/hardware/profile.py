"""What was measured on one computer: times of operations at a model's shapes, and how lanes share its cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from workbench.core.errors import ScenarioError
from workbench.core.units import is_number

if TYPE_CHECKING:
    from workbench.core.result import Result

_PIECES = ("per_prompt", "per_pair", "per_decode", "per_context", "decoding")


def _check_least(what: str, least: float, *values: float) -> None:
    if not all(is_number(value) and least <= value < math.inf for value in values):
        raise ScenarioError(f"{what} are {values}; give numbers from {least:g} on.")


@dataclass(frozen=True)
class OpTime:
    """Seconds of one operation in one layer, alone and warm, on `threads` threads.

        t = t(tokens), linear between the points, + per_prompt n_p + per_pair n_pairs
            + decoding + per_decode n_d + per_context n_c

    Attributes
    ----------
    op : str
        Its name; "embed" and "head" for what comes before and after the layers.
    threads : int
    tokens, seconds : tuple of float
        The points, rising in both. Tokens are the rows of the operation's class; for the head, those that emit.
    per_prompt, per_pair, per_decode, per_context : float
        Seconds per prompt, per query-key pair of prefill attention, per decode and per KV entry that decodes read.
    decoding : float
        Seconds per call with decodes.
    resident : bool
        True if its weights were where they stay; False if they had just come over the link, or it has none.
    """

    op: str
    threads: int
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    per_prompt: float = 0.0
    per_pair: float = 0.0
    per_decode: float = 0.0
    per_context: float = 0.0
    decoding: float = 0.0
    resident: bool = False

    def __post_init__(self) -> None:
        slopes = (self.per_prompt, self.per_pair, self.per_decode, self.per_context, self.decoding)
        points = (self.tokens, self.seconds)
        rising = all(low <= high for column in points for low, high in pairwise(column))
        if not (len(self.tokens) == len(self.seconds) >= 2 and rising and self.tokens[0] > 0):
            raise ScenarioError(
                f"times of {self.op!r} are {self.seconds} s at {self.tokens} tokens; give both rising, one for one."
            )
        _check_least(f"times of {self.op!r}", 0.0, *self.seconds, *slopes)
        _check_least(f"threads of {self.op!r}", 1, self.threads)

    def times(self, factor: float) -> OpTime:
        """So many times as long."""
        pieces = {name: factor * getattr(self, name) for name in _PIECES}
        return replace(self, seconds=tuple(factor * seconds for seconds in self.seconds), **pieces)


@dataclass(frozen=True)
class Contention:
    """What one compute lane does to the tasks of the other while both work: they share the interpreter and DRAM.

    Attributes
    ----------
    gpu, cpu : float
        Relative growth of each lane's times.
    """

    gpu: float = 0.0
    cpu: float = 0.0

    def stretch(self, seconds: Sequence[float], lanes: Sequence[str]) -> list[float]:
        """Seconds of tasks on these lanes, grown; those of transfers stay."""
        factors = {"gpu": 1 + self.gpu, "cpu": 1 + self.cpu}
        return [length * factors.get(lane, 1.0) for length, lane in zip(seconds, lanes, strict=True)]


@dataclass(frozen=True)
class Profile:
    """The operations of one model in one precision.

    Attributes
    ----------
    shape : str
        `ModelConfig.shape` and the precision of weights and KV that the times hold for.
    ops : tuple of OpTime
    iteration, request, task : float
        Seconds between two plans, in which no lane works: fixed, per request in the batch and per task of the plan.
    hand_over : float
        Seconds from the end of a task to the start of one on another lane that waited for it, and what a task takes
        beyond its operations.
    move, fetch : float
        Seconds that a transfer of activations, and one of weights, takes beyond its bytes.
    rest : float
        Seconds that a task takes longer with which the gpu lane begins after a rest.
    contention : Contention
        What the compute lanes do to one another.
    spread : tuple of (float, float)
        90 % interval of the seconds that passes through the layers took, over those that `ops` say.
    others : float
        Share of the cores that others took while it was measured: more than a little, and it was measured under load.
    corrected : str
        By which run, if `corrected_by` made it: it then is no calibration, for it has seen throughput.
    """

    shape: str
    ops: tuple[OpTime, ...]
    iteration: float = 0.0
    request: float = 0.0
    hand_over: float = 0.0
    move: float = 0.0
    fetch: float = 0.0
    spread: tuple[float, float] = (1.0, 1.0)
    task: float = 0.0
    rest: float = 0.0
    contention: Contention = Contention()
    others: float = 0.0
    corrected: str = ""

    def __post_init__(self) -> None:
        times = (self.iteration, self.request, self.hand_over, self.move, self.fetch, self.task, self.rest)
        losses = (self.contention.gpu, self.contention.cpu, self.others)
        _check_least(f"times of {self.shape!r}", 0.0, *times, *losses, *self.spread)
        if not self.spread[0] <= self.spread[1]:
            raise ScenarioError(f"{self.shape!r} has spread={self.spread}; give (lower, upper).")

    def corrected_by(self, measured: Result, simulated: Result) -> Profile:
        """The same profile with its operations as much slower or faster as the compute lanes of a run were.

        It is marked, and so is what is simulated with it. `calibrate` and `bench sim` never make or take one.

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
        taken, said = (sum(result.busy.get(lane, 0.0) for lane in ("gpu", "cpu")) for result in (measured, simulated))
        factor = taken / said
        told = f"operations x {factor:.3g} by a run of {measured.schedule} on {measured.date[:10]}"
        return replace(self, ops=tuple(time.times(factor) for time in self.ops), corrected=told)

    def find(self, op: str, threads: int, *, resident: bool = False) -> OpTime | None:
        """The times of an operation on so many threads, or None if it was not measured.

        Where it was measured only with its weights in the other place, those times.
        """
        found = None
        for time in self.ops:
            if (time.op, time.threads) == (op, threads):
                if time.resident == resident:
                    return time
                found = time
        return found


@dataclass(frozen=True)
class Cores:
    """How the lanes share a computer's cores where torch on the CPU stands for the GPU.

    Attributes
    ----------
    gpu, cpu : int
        Threads of each compute lane while both work.
    alone : int
        Threads of a compute lane while the other rests.
    spare : int
        Cores left to the data movers; without one they take time from a compute lane.
    mover : float
        Core-seconds that copying one byte takes.
    gpu_drag, cpu_drag : float
        Relative growth of each lane's times per byte/s that streams beside it on another core: they share DRAM.
    gpu_team_drag, cpu_team_drag : float
        The same of a lane that has all cores, and so shares one with the movers.
    """

    gpu: int
    cpu: int
    alone: int
    spare: int = 0
    mover: float = 0.0
    gpu_drag: float = 0.0
    cpu_drag: float = 0.0
    gpu_team_drag: float = 0.0
    cpu_team_drag: float = 0.0

    def __post_init__(self) -> None:
        _check_least("cores of the lanes", 1, self.gpu, self.cpu, self.alone)
        drags = (self.gpu_drag, self.cpu_drag, self.gpu_team_drag, self.cpu_team_drag)
        _check_least("shares of cores", 0.0, self.spare, self.mover, *drags)

    @classmethod
    def of(cls, total: int) -> Cores:
        """Half of the cores for each lane; from four on, one for the movers."""
        spare = 1 if total >= 4 else 0
        gpu = max(1, (total - spare) // 2)
        return cls(gpu, max(1, total - spare - gpu), max(1, total - spare), spare)


@dataclass(frozen=True)
class Pace:
    """How the lanes run during one plan: threads of the compute lanes, and the slow-down of each while weights stream.

    `beside` is the compute lane on whose cores the data movers work, "" if they have their own or all share all.
    `contention` is what the other lane does to a lane's tasks, for the share of the time in which both work.
    """

    gpu: int
    cpu: int
    beside: str
    gpu_drag: float
    cpu_drag: float
    contention: Contention = Contention()
