"""The answer of a search: a scenario and a schedule that run, the named systems beside them, and how it was found."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.analysis.explain import headline
from workbench.analysis.optimize.objective import Objective
from workbench.core.display import aligned, escaped, html_table
from workbench.core.errors import ScenarioError
from workbench.core.result import Result
from workbench.core.units import format_bytes, parse_bytes
from workbench.scenario import Scenario
from workbench.schedules import Schedule

if TYPE_CHECKING:
    import pandas

_HEADINGS = ("", "placement", "schedule", "scheduler", "KV cache", "simulated", "at most")


@dataclass(frozen=True)
class Choice:
    """A placement with its memory, a schedule and a scheduler.

    Attributes
    ----------
    system : str
        Name of the system; empty for what no system has.
    placement : str
    scenario : Scenario
    schedule : Schedule
    most : float
        The score that its bound allows.
    result : Result or None
        The simulation of the whole workload; None if the bound says that it is no better than a choice that was there.
    score : float
        The score of the simulation, minus infinity without one.
    """

    system: str
    placement: str
    scenario: Scenario
    schedule: Schedule
    most: float
    result: Result | None = None
    score: float = -math.inf


@dataclass(frozen=True)
class Counts:
    """Candidates of a space, by what became of them.

    Attributes
    ----------
    space : int
        All of them.
    refused : int
        Those that were tried and do not fit a memory, or do not go together.
    excluded : int
        Those whose bound is no better than the best found.
    simulated : int
    simulations : int
        Simulations that were made, also of samples and of the named systems.
    """

    space: int
    refused: int
    excluded: int
    simulated: int
    simulations: int

    @property
    def left(self) -> int:
        """Candidates about which nothing is known."""
        return self.space - self.refused - self.excluded - self.simulated


@dataclass(frozen=True, repr=False)
class Optimum:
    """The best that was found for a scenario.

    Attributes
    ----------
    objective : Objective
    best : Choice
        The answer.
    bound : Result
        The most that the hardware allows with the answer's placement and memory.
    others : tuple of Choice
        The next best, in order, no two with the same placement and schedule. Where the answer is a named system, the
        first may be up to 1 % better by simulation.
    named : tuple of Choice
        Each named system under the best scheduler for it, the best first.
    counts : Counts
    seconds : float
        Time that the search took [s].
    ended : str
        The reason if the search did not end by itself.
    """

    objective: Objective
    best: Choice
    bound: Result
    others: tuple[Choice, ...]
    named: tuple[Choice, ...]
    counts: Counts
    seconds: float
    ended: str = ""

    @property
    def scenario(self) -> Scenario:
        """The answer's scenario, for every reader."""
        return self.best.scenario

    @property
    def schedule(self) -> Schedule:
        """The answer's schedule."""
        return self.best.schedule

    @property
    def result(self) -> Result:
        """The simulation of the answer."""
        return _simulated(self.best)

    @property
    def gain(self) -> float:
        """Ratio of the answer to the best named system; NaN if none fits."""
        return self.objective.ratio(self.best.score, self.named[0].score) if self.named else math.nan

    def sentences(self) -> list[str]:
        """Sentences on the answer, on the candidates, and on what keeps the answer from its bound."""
        best = self.best
        told = f"{best.placement} under {best.schedule.name} with {best.scenario.scheduler}"
        counts = self.counts
        told_of_space = [
            f"{counts.simulated:,} simulated",
            f"{counts.excluded:,} excluded because their bound is no better",
            f"{counts.refused:,} refused by the ledger",
            f"{counts.left:,} not tried",
        ]
        found = [f"Best of {counts.space:,} candidates: {told}, {self.objective.told(best.score)}{self._beside()}."]
        found.append(f"Of all candidates {', '.join(told_of_space)}; {counts.simulations:,} simulations in all.")
        if self.ended:
            found.append(f"The search ended early: {self.ended}.")
        return [*found, headline([self.bound, self.result])]

    def _beside(self) -> str:
        if not self.named:
            return "; no named system fits"
        first = self.named[0]
        return f", {self.gain:.2f} times as good as the best named system, {first.system} ({first.schedule.name})"

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table: the answer, and every named system."""
        return [self._row("*", self.best), *(self._row(each.system, each) for each in self.named)]

    def _row(self, mark: str, choice: Choice) -> tuple[str, ...]:
        memory = choice.scenario.memory
        simulated = self.objective.told(choice.score) if choice.result is not None else ""
        cache = f"{format_bytes(parse_bytes(memory.kv_capacity))} in blocks of {memory.kv_block}"
        names = (mark, choice.placement, choice.schedule.name, str(choice.scenario.scheduler), cache)
        return (*names, simulated, self.objective.told(choice.most) if choice.most else "")

    def to_pandas(self) -> pandas.DataFrame:
        """One row per choice: the answer, the next best and the named systems, in plain units."""
        import pandas

        rows = []
        for role, choices in (("best", (self.best,)), ("other", self.others), ("named", self.named)):
            rows += [_plain(role, choice) for choice in choices]
        return pandas.DataFrame(rows)

    def run_best(self, count: int = 3, *, device: str | None = None) -> tuple[Choice, ...]:
        """Run the answer and the next best on this computer; the first of what is returned is measured to be the best.

        Parameters
        ----------
        count : int
            Choices to run, each of which takes as long as the whole workload does.
        device : str, optional
            As of `run`.

        Raises
        ------
        ScenarioError
            If the scenario's machine is not this computer.
        EngineError
            As `run` does.
        """
        if not self.scenario.machine.is_local:
            raise ScenarioError(
                f"{self.scenario.machine.name!r} is not this computer, so nothing can be run; give the scenario "
                "machine=wb.Machine.local()."
            )
        from workbench.engine import run

        found = []
        for choice in (self.best, *self.others)[:count]:
            result = run(choice.scenario, choice.schedule, device=device)
            score = self.objective.score(result, choice.scenario.workload)
            found.append(replace(choice, result=result, score=score))
        return tuple(sorted(found, key=lambda choice: -choice.score))

    def __str__(self) -> str:
        return "\n".join([*aligned([_HEADINGS, *self.rows()]), "", *self.sentences()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.rows(), _HEADINGS) + "".join(f"<p>{escaped(told)}</p>" for told in self.sentences())


def _simulated(choice: Choice) -> Result:
    if choice.result is None:
        raise ScenarioError(f"{choice.placement} was not simulated; use simulate(choice.scenario, choice.schedule).")
    return choice.result


def _plain(role: str, choice: Choice) -> dict[str, object]:
    memory = choice.scenario.memory
    row: dict[str, object] = {
        "role": role,
        "system": choice.system,
        "placement": choice.placement,
        "pipeline": str(choice.scenario.pipeline),
        "schedule": choice.schedule.name,
        "scheduler": str(choice.scenario.scheduler),
        "kv_capacity": parse_bytes(memory.kv_capacity),
        "kv_block": memory.kv_block,
        "weights_on_gpu": memory.weights_on_gpu,
        "kv_on_gpu": memory.kv_on_gpu,
        "score": choice.score,
        "most": choice.most,
    }
    result = choice.result
    names = ("seconds", "gen_tok_s", "proc_tok_s", "ttft", "tbt", "iterations", "preemptions")
    return row | {name: getattr(result, name, math.nan) for name in names}
