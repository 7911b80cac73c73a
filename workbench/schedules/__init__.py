"""WHEN: schedules lower a pipeline and a batch to a plan. They decide order and overlap, never what is computed."""

from workbench.schedules.base import Lowering, Schedule, Step
from workbench.schedules.sequential import Sequential
from workbench.schedules.vslpipe import VSLPipe

__all__ = ["Lowering", "Schedule", "Sequential", "Step", "VSLPipe"]
