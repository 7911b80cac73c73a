"""The base of micro-batched schedules: tasks that wait only for their data, and weights that come one layer ahead."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from workbench.core.errors import ScheduleError
from workbench.core.units import is_whole
from workbench.pipeline.layer_graph import EMBED, HEAD, WEIGHTS, LayerGraph, NodeKind
from workbench.schedules.base import Schedule, Step, TaskList
from workbench.schedules.plan import Page, Task

_A, _Q, _C, _H, _B = range(5)
_ATTENTION_ON_CPU = "gpu segment, d2h move, cpu segment, h2d move, gpu segment"


class WeightPlace(enum.Enum):
    """Position of the next layer's weights among the other transfers to the GPU, which go in issue order.

    FIRST: before those of the layer. LAST: behind them. PAGED: a page behind each micro-batch's.
    """

    FIRST = "first"
    LAST = "last"
    PAGED = "paged"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class MicroBatched(Schedule):
    """A schedule that splits the batch into `micro_batches` parts.

    Raises
    ------
    ScheduleError
        If `micro_batches` is no whole number, or less than the schedule needs.
    """

    least: ClassVar[int] = 1
    micro_batches: int = 4

    def __post_init__(self) -> None:
        if not is_whole(self.micro_batches) or self.micro_batches < self.least:
            what = "one micro-batch" if self.least == 1 else f"{self.least} micro-batches"
            raise ScheduleError(f"{type(self).__name__} needs at least {what}, not {self.micro_batches!r}.")
        object.__setattr__(self, "micro_batches", int(self.micro_batches))

    @property
    def parts(self) -> int:
        """Micro-batches per iteration."""
        return self.micro_batches


def shape(graph: LayerGraph) -> str:
    """Lanes and kinds of a layer's nodes in order; empty for a layer that does not begin and end on the GPU."""
    if graph.enter or graph.leave:
        return ""
    return ", ".join(f"{node.lane} {node.kind.value}" for node in graph.nodes)


def wrong_shape(schedule: str, needed: str, graph: LayerGraph) -> ScheduleError:
    """The error that tells which pipeline a schedule needs."""
    return ScheduleError(
        f"{schedule} needs a pipeline of the shape {needed}, not {graph.pipeline}. Wire it so, or use "
        "Sequential(prefetch=True)."
    )


def check_attention_on_cpu(schedule: str, graph: LayerGraph) -> None:
    """Refuse a layer that is not two segments on the GPU with one on the CPU between them.

    Raises
    ------
    ScheduleError
        If it has another shape.
    """
    if shape(graph) != _ATTENTION_ON_CPU:
        raise wrong_shape(schedule, "gpu(...) >> offload >> cpu(...) >> load >> gpu(...)", graph)


class Dataflow:
    """Collects tasks that wait for what they read: earlier nodes of the layer, the layer before, and weights.

    Lanes keep the order in which tasks are added. Weights alternate between two slots: those of the next layer may
    come once the layer before the present one has been computed.
    """

    def __init__(self, graph: LayerGraph, layers: int, step: Step, pages: int = 1) -> None:
        self.order = TaskList()
        self.graph = graph
        self.layers = layers
        self._step = step
        self._pages = pages
        self._done: dict[tuple[int, int, int], int] = {}  # task by layer, node and part; layer -1 for the embedding
        self._arrived: dict[int, list[int]] = {}  # tasks that bring the weights of a layer
        self._readers: dict[int, list[int]] = {}  # tasks that compute with the weights of a layer
        if Step.FIRST in step:
            for page in range(pages):
                self.load(0, page)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks added so far."""
        return tuple(self.order.tasks)

    def begin(self, part: int) -> None:
        """Add the embedding of a part's tokens."""
        start = self.order.add(EMBED, -1, part, ())
        if self.graph.enter:
            start = self.order.add(self.graph.enter, -1, part, (start,))
        self._done[-1, 0, part] = start

    def run(self, layer: int, node: int, part: int, *also: int) -> int:
        """Add the task of one node in one layer for one part; it also waits for the tasks `also`."""
        task = self.graph.planned(layer, self.layers)[node]
        if task is None:
            raise ScheduleError(f"layer {layer} has no node {node}; add only those of LayerGraph.planned.")
        after = [*also, *self._before(layer, node, part)]
        if task.streamed:
            after += self._arrived.get(layer, ())
        index = self.order.add(task, layer, part, after)
        if task.streamed:
            self._readers.setdefault(layer, []).append(index)
        self._done[layer, node, part] = index
        return index

    def _before(self, layer: int, node: int, part: int) -> Iterator[int]:
        inside = self.graph.nodes[node].after
        if inside or self.graph.nodes[node].kind is NodeKind.KV_IN:
            return (self._done[layer, other, part] for other in inside)
        return self._ended(layer - 1, part)

    def _ended(self, layer: int, part: int) -> Iterator[int]:
        ends = self.graph.sinks if layer >= 0 else (0,)
        return (self._done[layer, node, part] for node in ends)

    def load(self, layer: int, page: int = 0) -> None:
        """Add the transfer of a layer's weights, or of a page of them.

        The layer after the last is the first of the next iteration.
        """
        if not self.graph.streamed or (layer == self.layers and Step.LAST in self._step):
            return
        weights_of = tuple((layer % self.layers, node) for node in self.graph.streamed)
        after = self._readers.get(layer - 2, ())
        cut = Page(page, self._pages)
        task = self.order.add(WEIGHTS, layer % self.layers, None, after, weights_of=weights_of, page=cut)
        self._arrived.setdefault(layer, []).append(task)

    def load_at(self, place: WeightPlace, layer: int, part: int, parts: int) -> None:
        """Add, behind the transfers of one part in one layer, the next layer's weights that have their place there."""
        if place is WeightPlace.PAGED:
            self.load(layer + 1, part)
        elif part == (0 if place is WeightPlace.FIRST else parts - 1):
            self.load(layer + 1)

    def end(self, part: int) -> None:
        """Add the head, which samples from a part's output of the last layer."""
        after = tuple(self._ended(self.layers - 1, part))
        if self.graph.leave:
            after = (self.order.add(self.graph.leave, -1, part, after),)
        self.order.add(HEAD, -1, part, after)


def attention_on_cpu(
    graph: LayerGraph, layers: int, step: Step, micro_batches: int, *, ahead: int, weights: WeightPlace
) -> tuple[Task, ...]:
    """Tasks of a layer with attention on the CPU, which begins `ahead` micro-batches before the experts."""
    plan = Dataflow(graph, layers, step, micro_batches if weights is WeightPlace.PAGED else 1)
    turns = [(layer, part) for layer in range(layers) for part in range(micro_batches)]
    begun = 0

    def attend(until: int) -> None:
        nonlocal begun
        for layer, part in turns[begun:until]:
            if not layer:
                plan.begin(part)
            for node in (_A, _Q, _C):
                plan.run(layer, node, part)
        begun = max(begun, until)

    for number, (layer, part) in enumerate(turns):
        attend(number + 1)
        if weights is WeightPlace.FIRST:
            plan.load_at(weights, layer, part, micro_batches)
        plan.run(layer, _H, part)
        if weights is not WeightPlace.FIRST:
            plan.load_at(weights, layer, part, micro_batches)
        attend(number + ahead)
        plan.run(layer, _B, part)
        if layer + 1 == layers:
            plan.end(part)
    return plan.tasks
