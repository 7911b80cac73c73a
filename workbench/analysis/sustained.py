"""The highest request rate at which enough requests meet their objective."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.core.latency import Slo, capacity, check_slo
from workbench.core.units import is_whole
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.simulate import simulate


def sustained_rate(
    scenario: Scenario,
    schedule: Schedule,
    slo: Slo,
    *,
    low: float,
    high: float,
    target: float = 0.9,
    seeds: Iterable[int] = range(3),
) -> float:
    """Highest rate of Poisson arrivals whose simulated attainment reaches a target, to 1 % of the range [requests/s].

    Parameters
    ----------
    scenario : Scenario
        The scenario; its requests keep their lengths and order, and only their arrivals are drawn anew.
    schedule : Schedule
    slo : Slo
        Objective of a request.
    low, high : float
        Rates between which to search [requests/s].
    target : float
        Share of the requests that must meet the objective, mean over the seeds.
    seeds : iterable of int
        One seed per draw of arrivals; near saturation a single draw says little.

    Raises
    ------
    ValueError
        If the objective is no Slo, a seed no whole number from 0 on or there is none, the target is no share, or `low`
        is not below `high`, misses the target, or `high` reaches it.
    WorkbenchError
        As `simulate` does.
    """
    check_slo(slo)
    chosen = tuple(seeds) if isinstance(seeds, Iterable) else ()
    if not chosen or not all(is_whole(seed) and seed >= 0 for seed in chosen):
        raise ValueError(f"seeds must be whole numbers from 0 on, at least one, not {seeds!r}; give such as range(3).")

    def attained(rate: float) -> float:
        arriving = (scenario.on(workload=scenario.workload.arriving(rate=rate, seed=seed)) for seed in chosen)
        return sum(simulate(each, schedule).attainment(slo) for each in arriving) / len(chosen)

    return capacity(attained, target=target, low=low, high=high)
