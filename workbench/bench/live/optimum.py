"""The auto-scheduler against the named systems, measured: the answers for drawn settings are run beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from workbench.analysis.optimize import Choice, Optimum, optimize
from workbench.bench import record
from workbench.bench.live.sim import draw, smallest
from workbench.core.errors import WorkbenchError
from workbench.core.quiet import Noise
from workbench.engine import calibrate, make_checkpoint, run
from workbench.hardware import Machine
from workbench.models import ModelConfig, checkpoint
from workbench.scenario import Scenario

RIVALS = 3
"""Named systems that are run beside an answer: the best by their simulations."""
CLOSE = 0.85
"""Those are left out that are simulated slower than this share of the best of them."""
GPU_MEMORY = (0.4, 1.3)
"""Least and most GPU memory, as shares of the model's weights."""
EXTRA = 3
"""Additional rounds, in which disturbed runs are repeated."""
MEDIAN = 1.0
LEAST = 0.95
"""Targets for the answer over the best named system: of the median, and of each setting."""


@dataclass
class Contest:
    """The answer for one scenario and the named systems beside it, with the rates that were measured of each."""

    scenario: Scenario
    found: Optimum
    rates: dict[int, list[float]] = field(default_factory=dict)
    dropped: int = 0

    def __post_init__(self) -> None:
        self.rates = {number: [] for number in range(len(self.choices))}

    @property
    def choices(self) -> list[Choice]:
        """The answer, and its rivals unless it is the best of them itself, or no named system fits."""
        best = self.found.best
        first = max((each.score for each in self.found.named), default=math.inf)
        if best.score <= first:
            return [best]
        return [best, *(each for each in self.found.named[:RIVALS] if each.score >= CLOSE * first)]

    @property
    def over(self) -> float:
        """Measured rate of the answer over that of the fastest rival [1]: 1 if it is a named system."""
        if len(self.rates) == 1:
            return 1.0
        answer, *rivals = (median(rates) for rates in self.rates.values())
        return answer / max(rivals)

    @property
    def name(self) -> str:
        """Description of all that was drawn."""
        workload = self.scenario.workload
        machine = self.scenario.machine
        lengths = f"{workload.prompt_len.mean():.0f}+{workload.output_len.mean():.0f}"
        online = " arriving" if len(workload.arrival) else ""
        model = self.scenario.model
        share = machine.gpu.memory / model.weight_bytes
        link = f"{machine.link.h2d / 1e9:.2f} GB/s"
        return f"{model.name}, {len(workload)} x {lengths}{online}, GPU memory {share:.2f} of the weights, {link}"

    def row(self) -> dict[str, Any]:
        """Row for the record."""
        choices = [
            {
                "system": each.system,
                "placement": each.placement,
                "schedule": each.schedule.name,
                "scheduler": str(each.scenario.scheduler),
                "simulated": each.score,
                "measured": rates,
            }
            for each, rates in zip(self.choices, self.rates.values(), strict=True)
        ]
        return {"setting": self.name, "over": self.over, "dropped": self.dropped, "choices": choices}


def bench_optimum(
    names: Sequence[str],
    *,
    settings: int,
    repeats: int,
    seed: int,
    budget: str,
    json: Path | None,
    say: Callable[[str], None] = record.say,
) -> list[Contest]:
    """Calibrate, draw settings, search for the best of each, and run it beside the best named systems, interleaved.

    Raises
    ------
    WorkbenchError
        If no setting could be measured undisturbed.
    """
    models = [checkpoint(make_checkpoint(name)) for name in names]
    calibrated = list[tuple[ModelConfig, Machine]]()
    for model in models:
        calibrated.append((model, calibrate(model, refresh=not calibrated)))
        say(f"{model.name}: {calibrated[-1][1].name}, calibrated {calibrated[-1][1].measured}")
    for model in models:
        run(*smallest(model))
    contests = list[Contest]()
    for scenario in drawn(calibrated, settings, seed):
        contests.append(Contest(scenario, optimize(scenario, budget=budget)))
        say(f"{contests[-1].name}: simulated {contests[-1].found.gain:.2f} times the best named system")
    try:
        measure(contests, repeats, say)
    except KeyboardInterrupt:
        say("stopped: what follows is what was measured until now")
    seen = [each for each in contests if all(each.rates.values()) or len(each.choices) == 1]
    if not seen:
        raise WorkbenchError("no setting was measured undisturbed; close other programs and try again.")
    tell(seen, say)
    if json is not None:
        over = record.ratio([each.over for each in seen])
        record.write(json, calibrated[0][1], {"answer / best named system": over}, [each.row() for each in seen])
    return contests


def drawn(calibrated: Sequence[tuple[ModelConfig, Machine]], count: int, seed: int) -> list[Scenario]:
    """Scenarios as `bench sim` draws them, on GPUs whose memory is near the size of the weights."""
    random = np.random.default_rng(seed)
    found = list[Scenario]()
    for setting in draw(calibrated, count, seed):
        machine = setting.scenario.machine
        memory = setting.scenario.model.weight_bytes * random.uniform(*GPU_MEMORY)
        limited = machine.limit(gpu_memory=min(memory, machine.gpu.memory))
        found.append(setting.scenario.on(machine=limited))
    return found


def measure(contests: Sequence[Contest], repeats: int, say: Callable[[str], None]) -> None:
    """Run all choices in turn until each has `repeats` undisturbed runs or the rounds are over."""
    for turn in range(repeats + EXTRA):
        missing = [
            (contest, number)
            for contest in contests
            for number, rates in contest.rates.items()
            if len(contest.choices) > 1 and len(rates) < repeats
        ]
        if not missing:
            return
        for place in np.random.default_rng(turn).permutation(len(missing)).tolist():
            contest, number = missing[place]
            choice = contest.choices[number]
            result = run(choice.scenario, choice.schedule)
            if Noise(result.others).quiet:
                contest.rates[number].append(contest.found.objective.score(result, contest.scenario.workload))
            else:
                contest.dropped += 1
        say(f"round {turn + 1} of at most {repeats + EXTRA}: {len(missing)} runs")


def tell(contests: Sequence[Contest], say: Callable[[str], None]) -> None:
    """Print a line for each setting, and the median and the least of them."""
    for each in contests:
        best = each.found.best
        rivals = ", ".join(f"{rival.system} ({rival.schedule.name})" for rival in each.choices[1:]) or "itself"
        what = f"{best.placement} under {best.schedule.name} with {best.scenario.scheduler}"
        say(f"{each.over:5.2f} (simulated {each.found.gain:5.2f})  {each.name}: {what}; beside {rivals}")
    over = [each.over for each in contests]
    say(
        f"answer over best named system, measured, of {len(over)} settings: median {median(over):.2f} "
        f"({MEDIAN:g} asked for), least {min(over):.2f} ({LEAST:g} asked for)"
    )
