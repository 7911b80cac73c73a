"""Serving: lowers and prices a scenario and schedule, checks that they fit, and serves the workload to its end.

`bound`, `simulate` and `run` all begin with `prepare`; both clocks drive the one serving loop. `fits` only checks.
"""

from workbench.serving.capacity import fits, prepare
from workbench.serving.loop import Clock, Progress, serve

__all__ = ["Clock", "Progress", "fits", "prepare", "serve"]
