"""Scenario and schedule brought together: lowered, priced, checked against the memories, and served to the end.

`bound`, `simulate` and `run` all begin with `prepare`; both clocks turn the one serving loop. `fits` is only the check.
"""

from workbench.serving.capacity import fits, prepare
from workbench.serving.loop import Clock, Progress, serve

__all__ = ["Clock", "Progress", "fits", "prepare", "serve"]
