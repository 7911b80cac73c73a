"""Nothing overlaps: the baseline that every schedule is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import ScheduleError
from workbench.plan import Task
from workbench.schedules.base import Schedule, Step, TaskList
from workbench.segments import EMBED, HEAD, WEIGHTS, LayerGraph


@dataclass(frozen=True)
class Sequential(Schedule):
    """Every task waits for the one before; each layer's weights are loaded once for all micro-batches.

    Takes any pipeline. For VSLPipe's, two layers and ``micro_batches=2``::

        gpu Ea  Eb  .   A0a .   .   .   B0a A0b .   .   .   B0b .   A1a .   .   .   B1a A1b .   .   .   B1b Za  Zb
        cpu .   .   .   .   .   C0a .   .   .   .   C0b .   .   .   .   .   C1a .   .   .   .   C1b .   .   .   .
        d2h .   .   .   .   Q0a .   .   .   .   Q0b .   .   .   .   .   Q1a .   .   .   .   Q1b .   .   .   .   .
        h2d .   .   W0  .   .   .   H0a .   .   .   .   H0b .   W1  .   .   .   H1a .   .   .   .   H1b .   .   .
    """

    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ScheduleError(f"Sequential needs at least one micro-batch, not {self.micro_batches}.")

    @property
    def parts(self) -> int:
        """Micro-batches per iteration."""
        return self.micro_batches

    def tasks(self, graph: LayerGraph, layers: int, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        order = TaskList()
        for part in range(self.parts):
            order.then(EMBED, -1, part)
            if graph.enter:
                order.then(graph.enter, -1, part)
        for layer in range(layers):
            if graph.streamed:
                order.then(WEIGHTS, layer, None, pieces=tuple((layer, node) for node in graph.streamed))
            for part in range(self.parts):
                for node in graph.nodes:
                    order.then(node, layer, part)
        for part in range(self.parts):
            if graph.leave:
                order.then(graph.leave, -1, part)
            order.then(HEAD, -1, part)
        return tuple(order.tasks)
