"""Estimates of simulations from one iteration of each kind: when all begin, with prompts later on, and without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from workbench.models import ModelConfig
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.schedules.base import Step
from workbench.serving.capacity import largest_batch
from workbench.serving.prepared import Prepared, Typical, price
from workbench.stages import PartRows, Rows


class Estimate(NamedTuple):
    """A rough result of a simulation: for comparisons of candidates that are alike, and no bound.

    Attributes
    ----------
    seconds : float
        Time of the job [s].
    gen_tok_s : float
        Output tokens per second.
    ttft, tbt : float
        Mean times to the first token and between tokens [s].
    """

    seconds: float
    gen_tok_s: float
    ttft: float
    tbt: float


def estimated(scenario: Scenario, schedule: Schedule) -> Estimate:
    """The estimate of a simulation.

    Raises
    ------
    WorkbenchError
        If scenario and schedule do not go together, or an operation declares no work.
    """
    return _Job(scenario, schedule, price(scenario, schedule)).estimate


class _Iterations(NamedTuple):
    """Iterations that are alike: how many there are, and their tokens of each class."""

    times: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class _Job:
    """A workload in iterations of three kinds.

    At first prompts are prefilled until the cache is full. Then as many requests begin as end, at random, so that some
    iterations have prompts and others have none.
    """

    scenario: Scenario
    schedule: Schedule
    prepared: Prepared

    @property
    def estimate(self) -> Estimate:
        """The three kinds of iterations together, each as often as the requests need it."""
        first, mixed, decoding = self._kinds
        begun, later, each = (self._seconds(kind) if kind.times else 0.0 for kind in self._kinds)
        begun *= first.times
        rest = mixed.times * later + decoding.times * each
        at_first = begun * (1 + 1 / first.times) / 2
        waiting = self._at_once * at_first + (1 - self._at_once) * (begun + rest / 2)
        outputs = self._tokens[1]
        return Estimate(begun + rest, outputs / (begun + rest), waiting, rest / (mixed.times + decoding.times))

    @cached_property
    def _kinds(self) -> tuple[_Iterations, _Iterations, _Iterations]:
        """The iterations: no more tokens are in one than the scheduler lets."""
        prompts, outputs = self._tokens
        most = largest_batch(self.scenario, self.schedule, self.prepared.token_budget).tokens
        early = prompts * self._at_once
        firsts = max(1.0, early / most)
        beside = min(self._running, outputs / firsts) / 2 if firsts > 1 else 0.0
        longest = float(self.scenario.workload.output_len.max())
        others = max(longest, outputs / self._running, (prompts + outputs) / most - firsts)
        decode = (outputs - firsts * beside) / others
        late = prompts - early
        begin = others * -math.expm1(-late / self._typical.prompt / others)
        mixed = min(others, max(begin, late / most))
        prefill = late / mixed if mixed else 0.0
        return (
            _Iterations(firsts, early / firsts, beside),
            _Iterations(mixed, prefill, decode),
            _Iterations(others - mixed, 0.0, decode),
        )

    @cached_property
    def _tokens(self) -> tuple[float, float]:
        """Tokens of all prompts and of all outputs."""
        served = self.scenario.workload.as_served
        return float(served.prompt_len.sum()), float(served.output_len.sum())

    @cached_property
    def _typical(self) -> Typical:
        return Typical.of(self.scenario, self.schedule)

    @property
    def _running(self) -> float:
        """Requests that run together."""
        return self._typical.each * self.schedule.parts

    @property
    def _at_once(self) -> float:
        """Share of the requests that run from the beginning."""
        return min(1.0, self._running / len(self.scenario.workload))

    def _seconds(self, of: _Iterations) -> float:
        """Time of one of these iterations; whole requests are divided among the parts.

        The one before left as much of a weight transfer running on as this one does.
        """
        _, prefill, decode = of
        parts = self.schedule.parts
        prefilling = _parts_with(parts, prefill / self._typical.prompt)
        decoding = _parts_with(parts, decode)
        rows = [
            self._rows(
                prefill / prefilling if part < prefilling else 0.0,
                decode / decoding if part < decoding else 0.0,
            )
            for part in range(parts)
        ]
        plans = self.prepared.plans
        tasks = self.prepared.lowering.tasks(Step.MIDDLE)
        cores = self.scenario.machine.cores
        pace = None if cores is None else plans.pace(tasks, rows, cores)
        packet = self.schedule.packet_seconds
        laid = plans.lay_out(tasks, rows, packet, pace, 0.0, skip=True)
        if laid.runs_on:
            carried = max(0.0, laid.runs_on - max(laid.dram, laid.seconds))
            laid = plans.lay_out(tasks, rows, packet, pace, carried, skip=True)
        return max(laid.dram, laid.seconds)

    def _rows(self, prefill: float, decode: float) -> PartRows:
        """Rows of a part; its decodes have half of their output behind them."""
        typical = self._typical
        begun = prefill / typical.prompt
        tokens = typical.prompt + typical.output / 2

        def rows(model: ModelConfig) -> Rows:
            return Rows(
                prefill=prefill,
                decode=decode,
                pairs=begun * float(model.attended_below(typical.prompt)),
                context=decode * float(model.attended(tokens)),
                emits=decode + begun,
                scored=model.indexed(begun * typical.prompt * (typical.prompt + 1) / 2),
                scanned=model.indexed(decode * tokens),
            )

        return self.prepared.cost.by_kind(rows)


def _parts_with(parts: int, requests: float) -> int:
    """Parts that get any of so many requests."""
    return max(1, min(parts, math.ceil(requests)))
