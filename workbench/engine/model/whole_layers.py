"""Layers that one call computes for few decodes, instead of one call for each of their stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from workbench.engine.devices.driver import Driver
from workbench.engine.model.few_rows import MOST, FewRows, layer_of
from workbench.engine.model.kv_cache import KVCache
from workbench.engine.model.operations import OPERATIONS
from workbench.engine.model.ops import Ops, RowLayout
from workbench.engine.model.weights import Weights
from workbench.kernels import FewLayer
from workbench.pipeline.stack_graph import StackGraph
from workbench.stages import (
    Place,
    Stage,
    experts,
    out_proj,
    qkv,
    route,
)

_HELD = (qkv, out_proj, route, experts)
"""The operations of such a layer that have weights."""


class Whole(NamedTuple):
    """All stages of a layer.

    Attributes
    ----------
    call : FewLayer
    device : Place
    """

    call: FewLayer
    device: Place


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
        self._known: dict[tuple[int, int], tuple[Sequence[Stage], Whole | None]] = {}

    def of(self, stages: Sequence[Stage], layer: int, layout: RowLayout) -> Whole | None:
        """The call that computes these stages of a layer; None where they are computed one by one.

        That is so for prompts, for more rows than `MOST`, and for sequences that several threads read faster.
        """
        if layout.prefill or not 0 < layout.rows <= MOST:
            return None
        known = self._known.get((layer, id(stages)))
        if known is None:  # the stages are kept, so that no others get their id
            known = self._known[layer, id(stages)] = stages, self._find(stages, layer)
        whole = known[1]
        return whole if whole is not None and whole.call.reads_alone(layout.few) else None

    def _find(self, stages: Sequence[Stage], layer: int) -> Whole | None:
        """The call for these stages, where nothing but the rows and their KV entries changes from pass to pass."""
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
                if held is None:
                    return None
                kernels.append(held.stage)
        call = layer_of(kernels, cache, ops.attention)
        return None if call is None else Whole(call, device)
