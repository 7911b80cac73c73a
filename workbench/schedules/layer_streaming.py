"""Layer streaming as in DeepSpeed ZeRO-Inference: the GPU computes everything, and weights come one layer ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.pipeline import Pipeline, fetch, gpu
from workbench.pipeline.stack_graph import StackGraph
from workbench.scheduler.static import StaticBatching
from workbench.schedules.base import Schedule, Step
from workbench.schedules.micro_batches import shape, shapes, wrong_shape
from workbench.schedules.plan import Task
from workbench.schedules.sequential import Sequential
from workbench.stages import attention, moe, out_proj, qkv, weights


@dataclass(frozen=True)
class LayerStreaming(Schedule):
    """One part on the GPU alone, while the weights of the next layer stream in one transfer.

    Needs a pipeline of the shape ``fetch(weights) | gpu(...)`` with its KV cache on the GPU. The order is that of
    ``Sequential(prefetch=True)``; the name says what it is used for. Two layers, between the first and the last
    iteration::

        gpu Ea  A0a A1a Za
        h2d .   W1  W0  .

    Notes
    -----
    DeepSpeed ZeRO-Inference, a baseline of MoE-Lightning (section 5). Steady layer time max(W, computing).
    """

    example: ClassVar[Pipeline] = fetch(weights) | gpu(qkv, attention, out_proj, moe)

    @property
    def parts(self) -> int:
        """One: the batch is not split."""
        return 1

    @property
    def scheduler(self) -> StaticBatching:
        """See `Schedule.scheduler`: static batches, one micro-batch for each part."""
        return StaticBatching(self.parts)

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        if shape(stack) != "gpu segment" or not all(graph.streamed for graph in stack.graphs):
            raise wrong_shape("LayerStreaming", "fetch(weights) | gpu(...)", shapes(stack))
        return Sequential(prefetch=True).tasks(stack, step)
