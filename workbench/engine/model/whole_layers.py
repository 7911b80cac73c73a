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
    combine,
    decode_attention,
    experts,
    out_proj,
    prefill_attention,
    qkv,
    route,
)

_OPS = [qkv, decode_attention, out_proj, route, experts, combine]
"""The operations of a layer's decodes that one call can compute."""
_HELD = (qkv, out_proj, route, experts)
"""Those of them that have weights."""


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
        self._known: dict[int, tuple[Sequence[Stage], Whole | None]] = {}

    def of(self, stages: Sequence[Stage], layer: int, layout: RowLayout) -> Whole | None:
        """The call that computes these stages of a layer; None where they are computed one by one.

        That is so for prompts, for more rows than `MOST`, and for sequences that several threads read faster.
        """
        if layout.prefill or layout.skipped or not 0 < layout.rows <= MOST:
            return None
        known = self._known.get(layer)
        if known is None or known[0] is not stages:
            known = self._known[layer] = stages, self._find(stages, layer)
        whole = known[1]
        return whole if whole is not None and whole.call.reads_alone(layout.few) else None

    def _find(self, stages: Sequence[Stage], layer: int) -> Whole | None:
        """The call for these stages, where nothing but the rows and their KV entries changes from pass to pass."""
        if not self._are_usual(stages, layer):
            return None
        device = stages[0].device
        by_numba = device is Place.CPU or self._driver.on_host
        stay = self._weights.buffer is None and self._stack.kv_device(layer) is device
        cache = self._cache.held(layer)
        if not (by_numba and stay) or cache is None:
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

    def _are_usual(self, stages: Sequence[Stage], layer: int) -> bool:
        """True if these are the built-in stages of a whole layer, and each row has all of its experts at once."""
        ops = [stage.op for stage in stages if stage.op is not prefill_attention]
        late = any(stage.defer or stage.skip for stage in self._stack.pipeline(layer).stages)
        return ops == _OPS and not late and tuple(stages) == self._stack.pipeline(layer).stages
