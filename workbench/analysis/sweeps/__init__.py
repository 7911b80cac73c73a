"""Sweeps: a scenario read at every combination of other values in some of its fields, here or on many processes."""

from workbench.analysis.sweeps.found import Front, Point, Sweep
from workbench.analysis.sweeps.sweep import sweep

__all__ = ["Front", "Point", "Sweep", "sweep"]
