"""HOW FAST, in virtual time."""

from workbench.simulate.clock import Detail, simulate
from workbench.simulate.steady import in_flight, steady, steady_rates

__all__ = ["Detail", "in_flight", "simulate", "steady", "steady_rates"]
