"""The auto-scheduler: it searches placement, schedule, scheduler and KV cache for the best way to serve a scenario."""

from workbench.analysis.optimize.auto_scheduler import optimize
from workbench.analysis.optimize.optimum import Choice, Counts, Optimum

__all__ = ["Choice", "Counts", "Optimum", "optimize"]
