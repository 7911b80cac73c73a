"""The base of micro-batched schedules: tasks that wait only for their data, and weights that come one layer ahead."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from workbench.core.errors import ScheduleError
from workbench.core.units import is_whole
from workbench.pipeline import Element, Fork, Pipeline
from workbench.pipeline.layer_graph import EMBED, HEAD, WEIGHTS, LayerGraph, NodeKind
from workbench.pipeline.stack_graph import StackGraph
from workbench.schedules.base import Schedule, Step, TaskList
from workbench.schedules.plan import Page, Task
from workbench.stages import Stage

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
    """A schedule that splits the batch into parts.

    Attributes
    ----------
    micro_batches : int
        Number of parts that a batch is split into.

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


def shape(stack: StackGraph) -> str:
    """Lanes and kinds of a layer's nodes in order; empty if layers differ in it, or do not begin and end on the GPU."""
    found = set(map(_shape, stack.graphs))
    moves = any(stack.before(layer) for layer in range(stack.layers + 1))
    return "" if moves or len(found) > 1 else found.pop()


def _shape(graph: LayerGraph) -> str:
    return ", ".join(f"{node.lane} {node.kind.value}" for node in graph.nodes)


def wrong_shape(schedule: str, needed: str, found: str) -> ScheduleError:
    """The error that tells how a pipeline differs from those that a schedule takes.

    Parameters
    ----------
    schedule, needed : str
        Name of the schedule, and the shape of layers that it needs.
    found : str
        What is different about the pipeline, such as ``its layers are gpu(...)``.
    """
    return ScheduleError(
        f"{schedule} does not take this pipeline: {found}, where {schedule} needs {needed}. Wire it so, or use "
        "Sequential(prefetch=True) or Overlap(), which take any pipeline."
    )


def shapes(stack: StackGraph) -> str:
    """The shapes of a stack's layers in words: ``its layers are gpu(...)``."""
    found = dict[str, list[str]]()
    for each in stack.ranges:
        last = (each.stop or stack.layers) - 1
        layers = f"{each.first} to {last}" if last > each.first else f"{last}"
        found.setdefault(outline(each.pipeline), []).append(layers)
    if len(found) == 1:
        return f"its layers are {next(iter(found))}"
    return " and ".join(f"its layers {', '.join(layers)} are {shape}" for shape, layers in found.items())


def outline(pipeline: Pipeline) -> str:
    """A pipeline with dots in the place of operations: ``fetch(weights) | gpu(...) >> offload >> cpu(...)``."""
    fetched = f"fetch({', '.join(item.name for item in pipeline.fetches)}) | " if pipeline.fetches else ""
    return fetched + _outline(pipeline.chain)


def _outline(chain: Sequence[Element]) -> str:
    words = list[str]()
    for element in chain:
        word = str(element)
        if isinstance(element, Fork):
            word = f"({' | '.join(map(_outline, element.arms))})"
        elif isinstance(element, Stage):
            word = f"{element.device.value}({', '.join(('...', *element.options))})"
        if words[-1:] != [word] or isinstance(element, Fork):
            words.append(word)
    return " >> ".join(words)


def check_attention_on_cpu(schedule: str, stack: StackGraph) -> None:
    """Refuse layers that are not two segments on the GPU with one on the CPU between them.

    Raises
    ------
    ScheduleError
        If some have another shape.
    """
    if shape(stack) != _ATTENTION_ON_CPU:
        raise wrong_shape(schedule, "gpu(...) >> offload >> cpu(...) >> load >> gpu(...)", shapes(stack))


WeightsOf = tuple[tuple[int, int], ...]
"""The (layer, node) pairs whose weights a transfer brings."""


def weights_by_layer(stack: StackGraph) -> list[WeightsOf]:
    """The streamed nodes of each layer that streams any."""
    found = list[WeightsOf]()
    for layer in range(stack.layers):
        if streamed := stack.streamed(layer):
            found.append(tuple((layer, node) for node in streamed))
    return found


class Dataflow:
    """Collects tasks that wait for what they read: earlier nodes of the layer, the layer before, and weights.

    Lanes keep the order in which tasks are added. The weights come in groups, each of one transfer, which take turns in
    the slots: a group may come once those that compute with the group in its slot have ended. Behind the last group the
    numbers go on with the first of the next iteration, of which all slots but one are filled.

    Parameters
    ----------
    groups : sequence, optional
        The (layer, node) pairs of each transfer, in the order of their first use; by default those of a layer together.
    """

    def __init__(
        self,
        stack: StackGraph,
        step: Step,
        pages: int = 1,
        slots: int = 2,
        groups: Sequence[WeightsOf] | None = None,
        *,
        bulk: bool = False,
    ) -> None:
        self.order = TaskList()
        self.stack = stack
        self._pages = pages
        self._slots = slots
        self._bulk = bulk
        self._done: dict[tuple[int, int, int], int] = {}  # task by layer, node and part
        self._entered: dict[tuple[int, int], Sequence[int]] = {}  # tasks that a layer's first ones wait for, by part
        found = weights_by_layer(stack) if groups is None else list(groups)
        first = found[: slots - 1]
        self._ahead = len(first)
        self._groups = [*found, *([] if Step.LAST in step else first)]
        self._group_of = {pair: number for number, group in enumerate(found) for pair in group}
        self._begins = [group[0][0] for group in found] + [stack.layers + group[0][0] for group in first]
        self._arrived: dict[int, list[int]] = {}  # tasks that bring a group
        self._readers: dict[int, list[int]] = {}  # tasks that compute with a group
        self._asked = dict.fromkeys(range(len(first)), -1)  # requested groups, and where
        for number in range(len(first)):
            for page in range(pages if Step.FIRST in step else 0):
                self._load(number, page)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks added so far."""
        return tuple(self.order.tasks)

    def begin(self, part: int) -> None:
        """Add the embedding of a part's tokens."""
        embedded = (self.order.add(EMBED, -1, part, ()),)
        self._entered[0, part] = self.order.enter(self.stack, 0, part, embedded)

    def run(self, layer: int, node: int, part: int, *also: int) -> int:
        """Add the task of one node in one layer for one part; it also waits for the tasks `also`."""
        task = self.stack.node(layer, node)
        after = [*also, *self._before(layer, node, part)]
        group = self._group_of.get((layer, node))
        if group is not None:
            after += self._arrived.get(group, ())
        index = self.order.add(task, layer, part, after)
        if group is not None:
            self._readers.setdefault(group, []).append(index)
        self._done[layer, node, part] = index
        return index

    def _before(self, layer: int, node: int, part: int) -> Sequence[int]:
        this = self.stack.graph(layer).nodes[node]
        if this.after or this.kind is NodeKind.KV_IN:
            return [self._done[layer, other, part] for other in this.after]
        return self._entry(layer, part)

    def _entry(self, layer: int, part: int) -> Sequence[int]:
        """Tasks that the first ones of a layer wait for."""
        if (layer, part) not in self._entered:
            ended = [self._done[layer - 1, node, part] for node in self.stack.graph(layer - 1).sinks]
            self._entered[layer, part] = self.order.enter(self.stack, layer, part, ended)
        return self._entered[layer, part]

    def load_at(self, place: WeightPlace, layer: int, part: int, parts: int) -> None:
        """Add, behind the transfers of one part in one layer, the next group of weights that has its place there."""
        behind = [number for number in range(len(self._groups)) if self._begins[number] > layer]
        if not self._ahead or len(behind) < self._ahead:
            return
        wanted = behind[self._ahead - 1]
        if self._asked.setdefault(wanted, layer) != layer:
            return
        if place is WeightPlace.PAGED:
            self._load(wanted, part)
        elif part == (0 if place is WeightPlace.FIRST else parts - 1):
            self._load(wanted)

    def _load(self, number: int, page: int = 0) -> None:
        """Add the transfer of a group, or of a page of it, into the slot that was filled longest ago."""
        group = self._groups[number]
        after = self._readers.get(number - self._slots, ())
        cut = Page(page, self._pages)
        task = self.order.add(WEIGHTS, group[0][0], None, after, weights_of=group, bulk=self._bulk, page=cut)
        self._arrived.setdefault(number, []).append(task)

    def end(self, part: int) -> None:
        """Add the head, which samples from a part's output of the last layer."""
        self.order.add(HEAD, -1, part, self._entry(self.stack.layers, part))


def attention_on_cpu(
    stack: StackGraph, step: Step, micro_batches: int, *, ahead: int, weights: WeightPlace
) -> tuple[Task, ...]:
    """Tasks of layers with attention on the CPU, which begins `ahead` micro-batches before the experts."""
    plan = Dataflow(stack, step, micro_batches if weights is WeightPlace.PAGED else 1)
    turns = [(layer, part) for layer in range(stack.layers) for part in range(micro_batches)]
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
        if layer + 1 == stack.layers:
            plan.end(part)
    return plan.tasks
