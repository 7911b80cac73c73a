"""The baselines that every schedule is compared with: nothing overlaps, or only the next layer's weights do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.pipeline import Pipeline, fetch, gpu
from workbench.pipeline.layer_graph import EMBED, HEAD, WEIGHTS, LayerGraph, Node
from workbench.schedules.base import Step, TaskList
from workbench.schedules.micro_batches import MicroBatched
from workbench.schedules.plan import Task
from workbench.stages import attention, moe, out_proj, qkv, weights


@dataclass(frozen=True)
class Sequential(MicroBatched):
    """Every task waits for the one before; each layer's weights are loaded once for all micro-batches.

    With ``prefetch=True`` the weights of the next layer stream meanwhile, in packets between which transfers of
    activations pass; the last layer brings the weights with which the next iteration begins. Where lanes share cores,
    each compute task has all of them. Takes any pipeline. For VSLPipe's, two layers and ``micro_batches=2``::

        gpu Ea  Eb  .   A0a .   .   .   B0a A0b .   .   .   B0b .   A1a .   .   .   B1a A1b .   .   .   B1b Za  Zb
        cpu .   .   .   .   .   C0a .   .   .   .   C0b .   .   .   .   .   C1a .   .   .   .   C1b .   .   .   .
        d2h .   .   .   .   Q0a .   .   .   .   Q0b .   .   .   .   .   Q1a .   .   .   .   Q1b .   .   .   .   .
        h2d .   .   W0  .   .   .   H0a .   .   .   .   H0b .   W1  .   .   .   H1a .   .   .   .   H1b .   .   .
    """

    example: ClassVar[Pipeline] = fetch(weights) | gpu(qkv, attention, out_proj, moe)

    micro_batches: int = 1
    prefetch: bool = False

    @property
    def kv_slots(self) -> int:
        """One: a part's KV is read before the KV of the next part is fetched."""
        return 1

    def tasks(self, graph: LayerGraph, layers: int, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        chain = _Chain(graph)
        for part in range(self.parts):
            chain.add(EMBED, -1, part)
            if graph.enter:
                chain.add(graph.enter, -1, part)
        if self.prefetch and Step.FIRST in step:
            chain.load(0)
        for layer in range(layers):
            chain.await_weights()
            if not self.prefetch:
                chain.load(layer)
            elif layer + 1 < layers or Step.LAST not in step:
                chain.load_ahead((layer + 1) % layers)
            for part in range(self.parts):
                for node in graph.planned(layer, layers):
                    if node is not None:
                        chain.add(node, layer, part)
        for part in range(self.parts):
            if graph.leave:
                chain.add(graph.leave, -1, part)
            chain.add(HEAD, -1, part)
        return tuple(chain.order.tasks)


class _Chain:
    """Collects tasks, each of which waits for the one before, and weights that stream beside them."""

    def __init__(self, graph: LayerGraph) -> None:
        self.order = TaskList()
        self.graph = graph
        self.last: tuple[int, ...] = ()
        self.coming: tuple[int, ...] = ()

    def add(self, node: Node, layer: int, part: int) -> None:
        self.last = (self.order.add(node, layer, part, self.last),)

    def load(self, layer: int) -> None:
        if self.graph.streamed:
            self.last = (self.order.add(WEIGHTS, layer, None, self.last, weights_of=self._weights_of(layer)),)

    def load_ahead(self, layer: int) -> None:
        if self.graph.streamed:
            weights_of = self._weights_of(layer)
            self.coming = (self.order.add(WEIGHTS, layer, None, self.last, weights_of=weights_of, bulk=True),)

    def await_weights(self) -> None:
        self.last = (*self.last, *self.coming)
        self.coming = ()

    def _weights_of(self, layer: int) -> tuple[tuple[int, int], ...]:
        return tuple((layer, node) for node in self.graph.streamed)
