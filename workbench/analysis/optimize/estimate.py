"""Estimates of simulations from two iterations: one of the prompts that begin together, and one of what follows."""

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
    """What a simulation may give: for comparisons of candidates that are alike, and no bound.

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


@dataclass(frozen=True)
class _Job:
    """A workload in two kinds of iterations.

    In the first ones prompts are prefilled until the cache is full, in the following ones as many as requests end.
    """

    scenario: Scenario
    schedule: Schedule
    prepared: Prepared

    @property
    def estimate(self) -> Estimate:
        """What the two kinds of iterations give, each as often as the requests need it."""
        prompts, outputs = self._tokens
        firsts, others = self._iterations
        at_once = self._at_once
        beside = self._running / 2 if firsts > 1 else 0.0
        beside = min(beside, outputs / firsts / 2)
        begun = firsts * self._seconds(prompts * at_once / firsts, beside)
        each = self._seconds(prompts * (1 - at_once) / others, (outputs - firsts * beside) / others)
        seconds = begun + others * each
        waiting = at_once * begun / 2 + (1 - at_once) * (begun + seconds) / 2
        return Estimate(seconds, outputs / seconds, waiting, each)

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

    @cached_property
    def _iterations(self) -> tuple[float, float]:
        """Iterations of each kind: no more tokens are in one than the scheduler lets."""
        prompts, outputs = self._tokens
        most = largest_batch(self.scenario, self.schedule, self.prepared.token_budget).tokens
        longest = float(self.scenario.workload.output_len.max())
        firsts = max(1.0, prompts * self._at_once / most)
        return firsts, max(longest, outputs / self._running, (prompts + outputs) / most - firsts)

    def _seconds(self, prefill: float, decode: float) -> float:
        """Time of an iteration with so many tokens of each class; whole requests are divided among the parts."""
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
        laid = plans.lay_out(tasks, rows, self.schedule.packet_seconds, pace, 0.0, skip=True)
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
