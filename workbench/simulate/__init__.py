"""HOW FAST, in virtual time."""

from workbench.simulate.clock import Detail, simulate
from workbench.simulate.steady import steady

__all__ = ["Detail", "simulate", "steady"]
