"""KTransformers: the CPU computes the routed experts, and the GPU meanwhile whatever does not need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.pipeline import Pipeline, cpu, gpu, load, offload
from workbench.pipeline.layer_graph import NodeKind
from workbench.pipeline.stack_graph import StackGraph
from workbench.scheduler.continuous import ContinuousBatching
from workbench.schedules.base import Schedule, Step
from workbench.schedules.micro_batches import Dataflow, wrong_shape
from workbench.schedules.plan import Task
from workbench.stages import Place, attention, combine, experts, out_proj, qkv, route

NEEDED = "gpu(..., route) >> (gpu(shared_experts) | offload >> cpu(experts) >> load) >> gpu(combine)"


@dataclass(frozen=True)
class KTransformers(Schedule):
    """Every task starts as soon as its data is there; shared experts on the GPU run beside the routed ones.

    Needs a pipeline with routed experts on the CPU, attention on the GPU and nothing fetched, such as
    ``gpu(..., route) >> (gpu(shared_experts) | offload >> cpu(experts) >> load) >> gpu(combine)``. The transfer to the
    CPU submits the experts, and the transfer back waits for them. Two layers, in every iteration::

        gpu Ea  A0a B0a .   .   F0a A1a B1a .   .   F1a Za
        cpu .   .   .   C0a D0a .   .   .   C1a .   .   .
        d2h .   .   Q0a .   .   .   .   Q1a .   .   .   .
        h2d .   .   .   .   H0a .   .   .   .   H1a .   .

    Notes
    -----
    KTransformers, sections 3.3 and 4. The batch is one part, as in the paper's decoding. The fixed cost of submission
    and waiting is that of the two transfers.
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
        check_experts_on_cpu("KTransformers", stack)
        plan = Dataflow(stack, step)
        plan.begin(0)
        for layer in range(stack.layers):
            for place, node in enumerate(stack.at(layer)):
                if node is not None:
                    plan.run(layer, place, 0)
        plan.end(0)
        return plan.tasks


def check_experts_on_cpu(schedule: str, stack: StackGraph) -> None:
    """Refuse layers that have no routed experts on the CPU, or decode attention there, or anything streamed.

    Raises
    ------
    ScheduleError
        If some have another shape.
    """
    for graph in stack.graphs:
        stages = graph.pipeline.stages
        fetched = graph.streamed or any(node.kind in (NodeKind.KV_IN, NodeKind.EXPERTS_IN) for node in graph.nodes)
        found = []
        if not any(stage.op.plain is experts and stage.device is Place.CPU for stage in stages):
            found.append("its routed experts are not on the cpu")
        if graph.pipeline.kv_device is not Place.GPU:
            found.append("its KV cache is on the cpu")
        if fetched:
            found.append(f"it fetches {', '.join(item.name for item in graph.pipeline.fetches)}")
        if found:
            *first, last = found
            raise wrong_shape(schedule, NEEDED, f"{', '.join(first)} and {last}" if first else last)
