"""The auto-scheduler against the named systems, measured: the answers for drawn settings are run beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from workbench.analysis.optimize import Choice, Optimum, optimize
from workbench.bench import record
from workbench.bench.live.sim import Setting, calibrated, draw, repeat_all, requests_in_words, warm_up
from workbench.core.errors import WorkbenchError
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.scenario import Scenario

RIVALS = 3
"""Named systems that are run beside an answer: the best by their simulations."""
CLOSE = 0.85
"""Those are left out that are simulated slower than this share of the best of them."""
GPU_MEMORY = (0.4, 1.3)
"""Least and most GPU memory, as shares of the model's weights."""
MEDIAN = 1.0
LEAST = 0.95
"""Targets for the answer over the best named system: of the median, and of each setting."""


class Contest:
    """The answer for one scenario and the named systems beside it, with the runs of each."""

    def __init__(self, scenario: Scenario, found: Optimum) -> None:
        self.scenario = scenario
        self.found = found
        self.choices = _compared(found)
        self.settings = [
            Setting(each.scenario, each.schedule, each.result, found.bound)
            for each in self.choices
            if each.result is not None  # what has a score was simulated
        ]

    @property
    def measured(self) -> bool:
        """True if all have undisturbed runs, or nothing is compared."""
        return len(self.settings) == 1 or all(each.runs for each in self.settings)

    @property
    def over(self) -> float:
        """Measured rate of the answer over that of the fastest rival [1]: 1 if it is a named system."""
        if len(self.settings) == 1:
            return 1.0
        answer, *rivals = (each.rate for each in self.settings)
        return answer / max(rivals)

    @property
    def name(self) -> str:
        """Description of all that was drawn."""
        machine = self.scenario.machine
        model = self.scenario.model
        memory = f"GPU memory {machine.gpu.memory / model.weight_bytes:.2f} of the weights"
        link = f"{machine.link.h2d / 1e9:.2f} GB/s"
        return f"{model.name}, {requests_in_words(self.scenario.workload)}, {memory}, {link}"

    def row(self) -> dict[str, Any]:
        """Row for the record."""
        choices = list(map(_row, self.choices, self.settings))
        return {"setting": self.name, "over": self.over, "choices": choices}


def _row(choice: Choice, setting: Setting) -> dict[str, Any]:
    """Row of one choice and of its runs."""
    return {
        "system": choice.system,
        "placement": choice.placement,
        "schedule": choice.schedule.name,
        "scheduler": str(choice.scenario.scheduler),
        "simulated": choice.score,
        "measured": [run.gen_tok_s for run in setting.runs],
        "dropped": setting.dropped,
    }


def _compared(found: Optimum) -> list[Choice]:
    """The answer, and its rivals unless it is the best of them itself, or no named system fits."""
    first = max((each.score for each in found.named), default=math.inf)
    if found.best.score <= first:
        return [found.best]
    return [found.best, *(each for each in found.named[:RIVALS] if each.score >= CLOSE * first)]


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
    models = calibrated(names, say)
    warm_up(models)
    contests = list[Contest]()
    for scenario in drawn(models, settings, seed):
        contests.append(Contest(scenario, optimize(scenario, budget=budget)))
        say(f"{contests[-1].name}: simulated {contests[-1].found.gain:.2f} times the best named system")
    try:
        measure(contests, repeats, say)
    except KeyboardInterrupt:
        say("stopped: what follows is what was measured until now")
    seen = [each for each in contests if each.measured]
    if not seen:
        raise WorkbenchError("no setting was measured undisturbed; close other programs and try again.")
    tell(seen, say)
    if json is not None:
        over = record.ratio([each.over for each in seen])
        record.write(json, models[0][1], {"answer / best named system": over}, [each.row() for each in seen])
    return contests


def drawn(models: Sequence[tuple[ModelConfig, Machine]], count: int, seed: int) -> list[Scenario]:
    """Scenarios as `bench sim` draws them, on GPUs whose memory is near the size of the weights."""
    random = np.random.default_rng(seed)
    found = list[Scenario]()
    for setting in draw(models, count, seed):
        machine = setting.scenario.machine
        memory = setting.scenario.model.weight_bytes * random.uniform(*GPU_MEMORY)
        limited = machine.limit(gpu_memory=min(memory, machine.gpu.memory))
        found.append(setting.scenario.on(machine=limited))
    return found


def measure(contests: Sequence[Contest], repeats: int, say: Callable[[str], None]) -> None:
    """Run all that is compared, as `repeat_all` does."""
    compared = [contest for contest in contests if len(contest.settings) > 1]
    repeat_all([setting for contest in compared for setting in contest.settings], repeats, say)


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
