"""The auto-scheduler: a search over placements, schedules, schedulers and KV caches for one scenario."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from workbench.analysis.optimize.ceilings import Ceilings
from workbench.analysis.optimize.decision import Decision
from workbench.analysis.optimize.objective import Objective, objective_of
from workbench.analysis.optimize.optimum import Optimum
from workbench.analysis.optimize.search import search
from workbench.analysis.optimize.space import Space
from workbench.analysis.optimize.trials import Budget, Trials
from workbench.core.errors import ScenarioError, StoppedError
from workbench.core.latency import Slo
from workbench.core.units import is_whole, parse_seconds
from workbench.scenario import Scenario
from workbench.scheduler.block_manager import block_iterations
from workbench.workload import Workload
from workbench.workload.resizing import chosen

_FULL = 1.5
"""A sample has so many times the requests that the KV cache holds at once."""
_FEWEST = 64
_WORTH = 2
"""A sample with more than one in so many of the requests is not worth its error."""
_SAMPLING = 0.6
"""Share of the time that is spent on samples, where there are any."""


def optimize(
    scenario: Scenario,
    *,
    objective: str | Slo = "gen_tok_s",
    budget: str | float = "30 s",
    simulations: int | None = None,
) -> Optimum:
    """Search for the fastest way to serve a scenario's workload with its model on its machine.

    Model, machine, workload, routing, precisions, reserves and `max_running` stay, and so does the model's answer:
    experts come late or never only if they do so already. All else is searched: the wiring and what of it stays on the
    GPU, the schedule and its options, the scheduler and its token budget, the KV cache's size and block. Named systems
    are tried first, under every scheduler; then each wiring that may be better; then, from the best few, one setting
    or two at a time. Every candidate passes the ledger, none is simulated whose bound is no better than the best found,
    and of a long job a sample of requests decides what is simulated whole. Which schedules and settings are simulated
    is chosen by estimates from three iterations each, which do not count as simulations. The best named system is the
    answer unless something else is 1 % better, which is about what a simulation errs.

    Parameters
    ----------
    scenario : Scenario
    objective : str or Slo
        "gen_tok_s", output tokens per second; "seconds" of the whole job; "ttft" or "tbt", the mean time to the first
        token or between tokens; or an `Slo`: output tokens per second of the requests that meet it.
    budget : str or float
        Time for the search, as "30 s" or "2 min"; the named systems are tried, and one simulation that has begun is
        ended, whatever time that takes. A search that ends before is the same every time.
    simulations : int, optional
        Most simulations, samples included.

    Returns
    -------
    Optimum
        A scenario and a schedule for every reader. On Ctrl-C the best so far.

    Raises
    ------
    ScenarioError
        If this is no scenario, objective or budget, or nothing that was tried fits.

    Examples
    --------
    >>> found = wb.optimize(scenario)  # doctest: +SKIP
    >>> wb.simulate(found.scenario, found.schedule)  # doctest: +SKIP
    """
    if not isinstance(scenario, Scenario):
        raise ScenarioError(f"optimize takes a Scenario, not {scenario!r}; give one as for simulate.")
    if simulations is not None and (not is_whole(simulations) or simulations < 1):
        raise ScenarioError(f"simulations={simulations!r} is no number of them; give a whole number from 1 on.")
    target = objective_of(objective, scenario.workload)
    try:
        seconds = parse_seconds(budget, what="budget")
    except ValueError as error:
        raise ScenarioError(str(error)) from None
    limit = Budget(seconds, math.inf if simulations is None else simulations)
    return optimum_of(Space.of(scenario), target, limit)


def optimum_of(space: Space, objective: Objective, budget: Budget) -> Optimum:
    """The best that a search finds in a space; see `optimize`.

    Raises
    ------
    ScenarioError
        If nothing that was tried fits.
    """
    from tqdm.auto import tqdm

    workload = space.scenario.workload
    sample = sample_of(space.scenario)
    ceilings = Ceilings(space, objective)
    with tqdm(unit=" simulations", desc="optimize", delay=1, leave=False, mininterval=1) as bar:
        trials = Trials(space.scenario, sample, objective, budget, _SAMPLING if sample is not workload else 1.0, bar)
        ended = _until_stopped(lambda: search(space, trials, ceilings))
        whole = trials if sample is workload else Trials(space.scenario, workload, objective, budget, 1.0, bar)
        decision = Decision(space, objective, trials, whole, ceilings)
        if whole is not trials:
            ended = _until_stopped(decision.simulate_whole) or ended
        return decision.optimum(budget, ended)


def _until_stopped(work: Callable[[], None]) -> str:
    """Work; the reason if it was stopped, else nothing."""
    try:
        work()
    except StoppedError as error:
        return str(error)
    except KeyboardInterrupt:
        return "it was interrupted"
    return ""


def sample_of(scenario: Scenario) -> Workload:
    """A sample of a scenario's requests: some times as many as the KV cache can hold at once, or all if these are few.

    Of requests that are all there every so manieth is taken, of others the first.
    """
    workload = scenario.workload
    served = workload.as_served
    held = block_iterations(served.prompt_len, served.output_len, 1)
    largest = (scenario.machine.gpu.memory + scenario.machine.cpu.memory) / 2
    tokens = largest / scenario.model.kv_bytes_per_token(scenario.precision.kv)
    together = tokens * float(served.output_len.sum()) / float(held.sum())
    count = max(_FEWEST, math.ceil(_FULL * together))
    if _WORTH * count >= len(workload):
        return workload
    places = np.arange(count) if len(workload.arrival) else np.arange(count) * len(workload) // count
    return chosen(workload, places)
