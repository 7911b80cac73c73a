"""The baselines that every schedule is compared with: nothing overlaps, or only the next layer's weights do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.pipeline import Pipeline, fetch, gpu
from workbench.pipeline.layer_graph import EMBED, HEAD, WEIGHTS, Node
from workbench.pipeline.stack_graph import StackGraph
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

    Attributes
    ----------
    prefetch : bool
        True if the weights of the next layer stream while the layer before is computed.
    """

    example: ClassVar[Pipeline] = fetch(weights) | gpu(qkv, attention, out_proj, moe)

    micro_batches: int = 1
    prefetch: bool = False

    @property
    def part_slots(self) -> int:
        """One: a part's KV is read before the KV of the next part is fetched."""
        return 1

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        chain = _Chain(stack, step)
        for part in range(self.parts):
            chain.add(EMBED, -1, part)
            chain.enter(0, part)
        if self.prefetch and Step.FIRST in step:
            chain.load_ahead(-1)
        for layer in range(stack.layers):
            if self.prefetch:
                chain.await_weights(layer)
                chain.load_ahead(layer)
            elif stack.streamed(layer):
                chain.load(layer)
            for part in range(self.parts):
                if layer:
                    chain.enter(layer, part)
                for node in stack.at(layer):
                    if node is not None:
                        chain.add(node, layer, part)
        for part in range(self.parts):
            chain.enter(stack.layers, part)
            chain.add(HEAD, -1, part)
        return tuple(chain.order.tasks)


class _Chain:
    """Collects tasks, each of which waits for the one before, and weights that stream beside them."""

    def __init__(self, stack: StackGraph, step: Step) -> None:
        self.order = TaskList()
        self.stack = stack
        self.last: tuple[int, ...] = ()
        self.coming: dict[int, int] = {}  # transfers of weights that no task waits for yet, by layer
        streaming = [layer for layer in range(stack.layers) if stack.streamed(layer)]
        self.wanted = streaming if Step.FIRST in step else streaming[1:]
        if Step.LAST not in step:
            self.wanted = [*self.wanted, *(stack.layers + layer for layer in streaming[:1])]

    def add(self, node: Node, layer: int, part: int) -> None:
        self.last = (self.order.add(node, layer, part, self.last),)

    def enter(self, layer: int, part: int) -> None:
        """Bring the residual stream to where a layer, or the head, needs it."""
        self.last = tuple(self.order.enter(self.stack, layer, part, self.last))

    def load(self, layer: int) -> None:
        weights_of = self._weights_of(layer)
        self.last = (self.order.add(WEIGHTS, layer, None, self.last, weights_of=weights_of),)

    def load_ahead(self, layer: int) -> None:
        """Request the weights of the next layer behind this one that streams any, unless they are on their way."""
        wanted = next((each for each in self.wanted if each > layer), None)
        if wanted is not None and wanted not in self.coming:
            there = wanted % self.stack.layers
            weights_of = self._weights_of(there)
            self.coming[wanted] = self.order.add(WEIGHTS, there, None, self.last, weights_of=weights_of, bulk=True)

    def await_weights(self, layer: int) -> None:
        """Let the next task wait for a layer's weights."""
        if layer in self.coming:
            self.last = (*self.last, self.coming[layer])

    def _weights_of(self, layer: int) -> tuple[tuple[int, int], ...]:
        return tuple((layer, node) for node in self.stack.streamed(layer))
