"""The functions by which the engine computes the built-in operations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workbench.engine.model.ops import Ops, RowLayout, Tensors
from workbench.stages import (
    Op,
    add_shared,
    combine,
    combine_shared,
    experts,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
)

Implementation = Callable[[Ops, RowLayout, Tensors, Tensors], torch.Tensor | tuple[torch.Tensor, ...]]
"""Takes the layout of the rows, the buffers and the weights; returns the written buffer or buffers."""
OPERATIONS: dict[Op, Implementation] = {
    qkv: Ops.qkv,
    prefill_attention: Ops.prefill_attention,
    out_proj: Ops.out_proj,
    route: Ops.route,
    experts: Ops.experts,
    shared_experts: Ops.shared_experts,
    add_shared: Ops.shared_experts,
    combine: Ops.combine,
    combine_shared: Ops.combine,
}
"""Implementations by operation. `decode_attention` is not here: it belongs to the KV cache. Neither are users'
operations: they bring their own functions."""
