"""Shares of streamed weights and of a streamed cache that stay on the GPU (MoE-Lightning's r_w and r_c)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from workbench.models import ModelConfig
from workbench.pipeline.stack_graph import StackGraph
from workbench.stages import Op, Precision, experts, kv

_ROUNDING = 1e-9
"""Relative error that a sum of shares may have, so that a tenth of ten layers is one of them."""


def with_shares(stack: StackGraph, precision: Precision, weights: float, cache: float) -> StackGraph:
    """The stack of which shares of the streamed weights and of the streamed cache stay on the GPU.

    Weights stay in whole tensors: of each layer first the operations other than routed experts, in order, as far as
    they fit, and then experts one by one. The cache stays in whole layers. What is too little for a tensor or a layer
    is added to the next one's share, so that the shares hold over the layers together.

    Parameters
    ----------
    stack : StackGraph
        Of a model.
    precision : Precision
    weights, cache : float
        Shares from 0 to 1.
    """
    if not (weights or cache):
        return stack
    resident = tuple(_resident(stack, precision, weights)) if weights else ()
    return replace(
        stack, resident=resident, kv_resident=frozenset(_resident_cache(stack, cache)) if cache else frozenset()
    )


def _resident(stack: StackGraph, precision: Precision, share: float) -> Iterator[dict[Op, int]]:
    """The weights that stay of each layer; see `StackGraph.resident`."""
    model = stack.model
    if model is None:
        return
    room = 0.0
    for layer in range(stack.layers):
        sizes = _streamed_bytes(stack, model, precision, layer)
        room += share * sum(sizes.values())
        found = dict[Op, int]()
        for op in sorted(sizes, key=lambda op: op.plain is experts):
            count = op.members(model, layer) if op.plain is experts else 1
            each = sizes[op] / count if count else 0.0
            stays = min(count, math.floor(room * (1 + _ROUNDING) / each)) if each else 0
            if stays:
                found[op] = stays
                room -= stays * each
        yield found


def _streamed_bytes(stack: StackGraph, model: ModelConfig, precision: Precision, layer: int) -> dict[Op, float]:
    """Bytes of every operation's streamed weights in one layer."""
    kind = stack.kind(layer)
    of_kind = model if kind is None else model.of_kind(kind)
    ops = [stage.op.holder for stage in stack.stages(layer) if stack.streams(stage, layer)]
    return {op: op.weight_bytes(of_kind, precision, layer) for op in dict.fromkeys(ops)}


def _resident_cache(stack: StackGraph, share: float) -> Iterator[int]:
    """Layers whose cache stays, spread evenly."""
    fetching = [layer for layer in range(stack.layers) if kv in stack.pipeline(layer).fetches]
    for number, layer in enumerate(fetching):
        before, now = (math.floor(share * count * (1 + _ROUNDING)) for count in (number, number + 1))
        if now > before:
            yield layer
