"""Simulation in virtual time (HOW FAST): a clock that plays plans by their prices.

It drives the serving loop of `workbench.serving` and gives a `Result`, as `bound` and `run` do.
"""

from workbench.simulate.clock import Detail, simulate
from workbench.simulate.many import simulate_all
from workbench.simulate.steady import in_flight, steady, steady_rates
from workbench.simulate.typical import typical_iteration

__all__ = ["Detail", "in_flight", "simulate", "simulate_all", "steady", "steady_rates", "typical_iteration"]
