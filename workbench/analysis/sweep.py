"""Sweeps: bound and simulations over a range of KV capacities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.core.errors import CapacityError, ScenarioError, ScheduleError
from workbench.core.result import Result
from workbench.core.units import parse_bytes
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.simulate import simulate

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class SweepPoint:
    """Predictions for one KV capacity [B]: the bound, then one simulation per schedule that works.

    Attributes
    ----------
    problem : str
        The reason if there are no results: the capacity cannot serve the workload.
    refused : tuple of (str, str)
        Name of each schedule that does not take the pipeline or does not fit, and the reason.
    """

    kv_capacity: float
    results: tuple[Result, ...]
    problem: str = ""
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Sweep:
    """Predictions over KV capacities."""

    points: tuple[SweepPoint, ...]

    def pairs(self) -> list[tuple[float, Result]]:
        """Every result with its KV capacity [B]."""
        return [(point.kv_capacity, result) for point in self.points for result in point.results]

    def to_pandas(self) -> pandas.DataFrame:
        """One row per capacity and result, in plain units; a schedule without a result has a row with the reason."""
        import pandas

        keys = ("schedule", "gen_tok_s", "proc_tok_s", "seconds", "iterations", "preemptions")
        rows = []
        for capacity, result in self.pairs():
            row = {"kv_capacity": capacity, "source": result.source.value}
            row |= {key: getattr(result, key) for key in keys}
            rows.append(row)
        for point in self.points:
            rows += [
                {"kv_capacity": point.kv_capacity, "schedule": name, "problem": why} for name, why in point.refused
            ]
        return pandas.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot output tokens per second over KV capacity: the bound dashed, and one line per schedule."""
        from workbench.plots import plot_sweep

        return plot_sweep(self.pairs(), ax)


def sweep(
    scenario: Scenario,
    schedules: Schedule | Iterable[Schedule],
    *,
    kv_capacity: str | float | Iterable[str | float],
) -> Sweep:
    """Bound and simulate a scenario at several KV capacities.

    Parameters
    ----------
    scenario : Scenario
        The scenario; its own KV capacity is not used.
    schedules : Schedule or iterable of Schedule
        The schedules to simulate; the bound is the same for all. One that does not take the pipeline, or does not fit,
        is told with the reason.
    kv_capacity : str or float, or iterable of them
        Capacities such as ``["10GB", "20GB"]`` [B].

    Returns
    -------
    Sweep
        Points of all capacities; those that cannot serve the workload have no results but a reason.

    Raises
    ------
    WorkbenchError
        If the scenario goes together with no schedule, whatever the capacity.

    Examples
    --------
    >>> sweep(scenario, contenders(scenario.stack), kv_capacity=["10GB", "30GB", "70GB"]).plot()  # doctest: +SKIP
    """
    wanted = _schedules(schedules)
    capacities = [kv_capacity] if isinstance(kv_capacity, str | float | int) else kv_capacity
    sizes = [parse_bytes(capacity, what="kv_capacity") for capacity in capacities]
    return Sweep(tuple(predict(scenario, wanted, size) for size in sizes))


def _schedules(given: object) -> Sequence[Schedule]:
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    if not found or not all(isinstance(schedule, Schedule) for schedule in found):
        raise ScenarioError(f"a sweep needs schedules, such as [Sequential(prefetch=True), VSLPipe()], not {given!r}.")
    return found


def predict(scenario: Scenario, schedules: Sequence[Schedule], kv_capacity: str | float) -> SweepPoint:
    """One point of a sweep.

    Raises
    ------
    WorkbenchError
        As `sweep` does.
    """
    size = parse_bytes(kv_capacity, what="kv_capacity")
    try:
        at = scenario.on(memory=replace(scenario.memory, kv_capacity=size))
    except CapacityError as error:
        return SweepPoint(size, (), str(error))
    results = list[Result]()
    refused = list[tuple[str, CapacityError | ScheduleError]]()
    for schedule in schedules:
        try:
            simulated = simulate(at, schedule)
        except (CapacityError, ScheduleError) as error:
            refused.append((schedule.name, error))
            continue
        results += [simulated] if results else [bound(at, schedule), simulated]
    if not results and all(isinstance(error, ScheduleError) for _, error in refused):
        raise refused[0][1]
    told = tuple((name, str(error)) for name, error in refused)
    return SweepPoint(size, tuple(results), "" if results else told[0][1], told)
