"""Many simulations at once: each scenario under each schedule."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.core.result import Result
from workbench.scenario import Scenario
from workbench.schedules.base import Schedule
from workbench.simulate.clock import simulate


def simulate_all(scenarios: Iterable[Scenario], schedules: Schedule | Iterable[Schedule]) -> list[list[Result]]:
    """Simulate each scenario under each schedule.

    What scenarios have in common is made once: the graph of the layers, the tasks of a schedule, the prices of
    operations and the lengths of a workload. So give scenarios that differ in little, such as those that
    ``scenario.on(...)`` makes; one after the other they take the same time.

    Parameters
    ----------
    scenarios : iterable of Scenario
    schedules : Schedule or iterable of Schedule

    Returns
    -------
    list of lists of Result
        For each scenario the results of all schedules, equal to those of `simulate`.

    Raises
    ------
    WorkbenchError
        If a scenario and a schedule do not go together.

    Examples
    --------
    >>> outputs = (wb.Workload.lengths(98, output, 20_000) for output in (32, 64, 128))  # doctest: +SKIP
    >>> simulate_all((scenario.on(workload=each) for each in outputs), VSLPipe())  # doctest: +SKIP
    """
    tried = (schedules,) if isinstance(schedules, Schedule) else tuple(schedules)
    found = list[list[Result]]()
    for scenario in scenarios:
        found.append([simulate(scenario, schedule) for schedule in tried])
    return found
