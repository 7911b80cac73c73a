"""HOW FAST, in virtual time."""

from workbench.simulate.clock import Detail, simulate

__all__ = ["Detail", "simulate"]
