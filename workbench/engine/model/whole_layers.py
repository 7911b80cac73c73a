"""Layers that one call computes for few decodes, instead of one call for each of their stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from workbench.engine.devices.driver import Driver
from workbench.engine.model.few_rows import MOST, FewRows, layer_of
from workbench.engine.model.kv_cache import KVCache
from workbench.engine.model.operations import OPERATIONS
from workbench.engine.model.ops import Ops, RowLayout
from workbench.engine.model.weights import Weights
from workbench.kernels import FewLayer, FewLayers
from workbench.models import ModelConfig
from workbench.pipeline.layer_graph import NodeKind
from workbench.pipeline.stack_graph import StackGraph
from workbench.schedules.plan import Task
from workbench.stages import (
    Place,
    Precision,
    Stage,
    experts,
    out_proj,
    qkv,
    route,
)

_HELD = (qkv, out_proj, route, experts)
"""The operations of such a layer that have weights."""
_MOST_BYTES = 4e9
"""Most bytes of weights that a call of several layers reads: at 20 GB/s a stop request waits 0.2 s."""


class Run(NamedTuple):
    """Tasks of a plan that compute consecutive layers of one part on one lane.

    Each but the first waits for the one before it alone. Of the other tasks, none waits for one of them but the last.

    Attributes
    ----------
    tasks : tuple of Task
        All tasks of the plan.
    first, past : int
        The first of them, and that behind the last.
    """

    tasks: tuple[Task, ...]
    first: int
    past: int

    @property
    def own(self) -> tuple[Task, ...]:
        """These tasks."""
        return self.tasks[self.first : self.past]


class Whole(NamedTuple):
    """All stages of some layers that follow one another in a run.

    Attributes
    ----------
    first, past : int
        Place in the plan of the first one's task, and that behind the last one's.
    call : FewLayers
    device : Place
    layers : tuple of int
    ops : tuple of (layer, name of the operation)
        All that it computes.
    """

    first: int
    past: int
    call: FewLayers
    device: Place
    layers: tuple[int, ...]
    ops: tuple[tuple[int, str], ...]


class WholeLayers:
    """Finds the layers that `FewLayers` can compute.

    All of their stages run on one device, have kernels for few rows, and keep their weights and KV cache there.
    `layers` has the operations of each layer by device.
    """

    def __init__(
        self,
        layers: Mapping[Place, Sequence[Ops]],
        weights: Weights,
        few: FewRows,
        cache: KVCache,
        stack: StackGraph,
        driver: Driver,
    ) -> None:
        self._layers = layers
        self._weights = weights
        self._few = few
        self._cache = cache
        self._stack = stack
        self._driver = driver
        self._made: dict[tuple[int, int], tuple[Sequence[Stage], FewLayer | None]] = {}
        self._known: dict[tuple[int, int, int], tuple[Run, list[tuple[Whole, list[Whole]]]]] = {}

    def of(self, run: Run, layout: RowLayout) -> list[Whole]:
        """The calls that compute layers of a run at once; the stages of the others are computed one by one.

        There are none for prompts and for more rows than `MOST`. A layer in which several threads attend faster is left
        out.
        """
        if layout.prefill or not 0 < layout.rows <= MOST:
            return []
        key = (id(run.tasks), run.first, run.past)
        known = self._known.get(key)
        if known is None:  # the tasks are kept, so that no others get their id
            known = self._known[key] = run, list(self._find(run))
        found = list[Whole]()
        for whole, apart in known[1]:
            if whole.call.reads_alone(layout.few):
                found.append(whole)
            else:  # those with a window may still read alone
                found += [each for each in apart if each.call.reads_alone(layout.few)]
        return found

    def let_go(self) -> None:
        """Free what the calls hold, though an error's frames may still hold the calls."""
        for _, found in self._known.values():
            for whole, apart in found:
                for each in (whole, *apart):
                    vars(each.call).clear()

    def _find(self, run: Run) -> Iterator[tuple[Whole, list[Whole]]]:
        """The calls for layers in which nothing but the rows and their KV entries changes from pass to pass.

        If layers of a call have unlike windows, a call for each stretch with the same window stands beside it.
        """
        layers = {place: self._layer(run.tasks[place]) for place in range(run.first, run.past)}
        there = {place: layer for place, layer in layers.items() if layer is not None}
        for alike in _following(there, lambda layer: layer.kind):
            apart = [_joined(run.tasks, some) for some in _following(alike, lambda layer: layer.window)]
            yield _joined(run.tasks, alike), apart if len(apart) > 1 else []

    def _layer(self, task: Task) -> FewLayer | None:
        """The kernel of a task's layer, if it has one; made once."""
        stages = task.node.stages
        key = (task.layer, id(stages))
        if key not in self._made:  # the stages are kept, so that no others get their id
            self._made[key] = stages, self._new_layer(stages, task.layer)
        return self._made[key][1]

    def _new_layer(self, stages: Sequence[Stage], layer: int) -> FewLayer | None:
        if not self._stack.is_whole(stages, layer):
            return None
        device = stages[0].device
        by_numba = device is Place.CPU or self._driver.on_host
        cache = self._cache.held(layer)
        if not by_numba or cache is None:
            return None
        ops = self._layers[device][layer]
        kernels = list[object]()
        for stage in stages:
            if stage.op in _HELD:
                held = self._few.of(getattr(ops, OPERATIONS[stage.op]), self._weights.get(layer, stage), MOST)
                if held is None or held.stage is None:
                    return None
                kernels.append(held.stage)
        return layer_of(kernels, cache, ops.attention)


def _following(layers: Mapping[int, FewLayer], mark: Callable[[FewLayer], Hashable]) -> Iterator[dict[int, FewLayer]]:
    """Layers by their places in a plan, in ascending order, cut where a place is missing or their mark changes."""
    numbered = enumerate(layers)
    for _, group in groupby(numbered, lambda each: (each[1] - each[0], mark(layers[each[1]]))):
        yield {place: layers[place] for _, place in group}


def _joined(tasks: Sequence[Task], layers: Mapping[int, FewLayer]) -> Whole:
    """One call for layers, whose places in the plan follow one another."""
    first = min(layers)
    own = [tasks[place] for place in layers]
    numbers = tuple(task.layer for task in own)
    ops = [(task.layer, stage.op.name) for task in own for stage in task.node.stages]
    device = own[0].node.stages[0].device
    return Whole(first, first + len(own), FewLayers([*layers.values()]), device, numbers, tuple(ops))


def layers_at_once(model: ModelConfig, precision: Precision) -> int:
    """Layers that one call computes at most, so that it ends soon after a stop request; 1 where it has no clock."""
    touched = min(model.num_local_experts, MOST * model.num_experts_per_tok) * model.expert_params
    size = touched * precision.expert_bytes + model.attention_params * precision.other_bytes
    return max(1, int(_MOST_BYTES / size)) if FewLayers.TELLS_TIME else 1


def runs_of(tasks: tuple[Task, ...], most: int) -> list[Run]:
    """The runs of a plan's tasks, of `most` layers at most."""
    awaited = {other for place, task in enumerate(tasks) for other in task.after if other != place - 1}
    begins = [place for place in range(1, len(tasks)) if not _goes_on(tasks, place) or place - 1 in awaited]
    edges = [0, *begins, len(tasks)]
    return [
        Run(tasks, first, min(first + most, past))
        for begin, past in pairwise(edges)
        for first in range(begin, past, most)
        if tasks[first].node.kind is NodeKind.SEGMENT
    ]


def _goes_on(tasks: Sequence[Task], place: int) -> bool:
    """True if a task computes the layer after that of the task before, of the same part and on the same lane."""
    before, task = tasks[place - 1], tasks[place]
    alike = task.node.kind is before.node.kind is NodeKind.SEGMENT and task.node.lane == before.node.lane
    return alike and task.part == before.part and task.layer == before.layer + 1 and {*task.after} <= {place - 1}
