"""Fiddler: the CPU computes the routed experts while the GPU waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.pipeline import Pipeline, cpu, gpu, load, offload
from workbench.pipeline.stack_graph import StackGraph
from workbench.scheduler.continuous import ContinuousBatching
from workbench.schedules.base import Schedule, Step
from workbench.schedules.ktransformers import check_experts_on_cpu
from workbench.schedules.plan import Task
from workbench.schedules.sequential import Sequential
from workbench.stages import attention, combine, experts, out_proj, qkv, route


@dataclass(frozen=True)
class Fiddler(Schedule):
    """One task after the other: GPU and CPU take turns, even where they could work side by side.

    Needs a pipeline with the routed experts on the CPU, attention on the GPU and nothing fetched, such as
    ``gpu(..., route) >> (gpu(shared_experts) | offload >> cpu(experts) >> load) >> gpu(combine)``. The order is that of
    ``Sequential()``; the name says what it is used for. Two layers, in every iteration::

        gpu Ea  A0a B0a .   .   .   .   F0a A1a B1a .   .   .   F1a Za
        cpu .   .   .   .   C0a D0a .   .   .   .   .   C1a .   .   .
        d2h .   .   .   Q0a .   .   .   .   .   .   Q1a .   .   .   .
        h2d .   .   .   .   .   .   H0a .   .   .   .   .   H1a .   .

    Notes
    -----
    Fiddler, the synchronous baseline of KTransformers (section 6). All routed experts are computed on the CPU, where
    Fiddler itself would copy some experts that many tokens chose to the GPU.
    """

    example: ClassVar[Pipeline] = (
        gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    )

    @property
    def parts(self) -> int:
        """One: the batch is not split."""
        return 1

    @property
    def scheduler(self) -> ContinuousBatching:
        """See `Schedule.scheduler`: requests join a running batch."""
        return ContinuousBatching()

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        check_experts_on_cpu("Fiddler", stack)
        return Sequential().tasks(stack, step)
