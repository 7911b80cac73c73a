"""Layers that one call computes for few decodes, instead of one call for each of their stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    experts,
    out_proj,
    qkv,
    route,
)

_HELD = (qkv, out_proj, route, experts)
"""The operations of such a layer that have weights."""
_MOST_BYTES = 4e9
"""Bytes that one call reads of several layers at most: a stop request need not wait longer than 0.2 s."""


class Run(NamedTuple):
    """Tasks of a plan that follow one another on a compute lane, each a layer's stages of one part.

    Nothing else waits for one of them but the last.

    Attributes
    ----------
    tasks : tuple of Task
        All of the plan.
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
    """Finds the layers whose stages have kernels for few rows and one place, with weights and a KV cache that stay.

    `layers` are the operations of each layer by place.
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
        self._known: dict[tuple[int, int, int], tuple[Run, list[Whole]]] = {}

    def of(self, run: Run, layout: RowLayout) -> list[Whole]:
        """The calls that compute layers of a run at once; the stages of the others are computed one by one.

        There are none for prompts, for more rows than `MOST`, and for sequences that several threads read faster.
        """
        if layout.prefill or not 0 < layout.rows <= MOST:
            return []
        key = (id(run.tasks), run.first, run.past)
        known = self._known.get(key)
        if known is None:  # the tasks are kept, so that no others get their id
            known = self._known[key] = run, list(self._find(run))
        return [whole for whole in known[1] if whole.call.reads_alone(layout.few)]

    def _find(self, run: Run) -> Iterator[Whole]:
        """The calls for layers in which nothing but the rows and their KV entries changes from pass to pass."""
        past = run.first
        for kind, group in groupby((self._layer(task) for task in run.own), lambda layer: layer and layer.kind):
            layers = list(group)
            first = past
            past += len(layers)
            if kind is not None:
                yield _joined(run.tasks, first, [layer for layer in layers if layer is not None])

    def _layer(self, task: Task) -> FewLayer | None:
        """The kernel of a task's layer, if it has one."""
        stages = task.node.stages
        layer = task.layer
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


def _joined(tasks: Sequence[Task], first: int, layers: Sequence[FewLayer]) -> Whole:
    own = tasks[first : first + len(layers)]
    numbers = tuple(task.layer for task in own)
    ops = [(task.layer, stage.op.name) for task in own for stage in task.node.stages]
    device = own[0].node.stages[0].device
    return Whole(first, first + len(own), FewLayers(layers), device, numbers, tuple(ops))


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
