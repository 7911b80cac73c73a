"""The built-in operations that the engine computes: one record each, of a function and the tensors it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.engine.model.ops import Ops, RowLayout, Tensors
from workbench.models import ModelConfig
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


@dataclass(frozen=True)
class Packed:
    """One tensor that an operation takes: checkpoint tensors of one layer, stacked along their first dimension."""

    key: str
    sources: tuple[str, ...]


def _qkv_pack(model: ModelConfig) -> list[Packed]:
    packs = [Packed("norm", ("input_layernorm.weight",))]
    packs.append(Packed("proj", tuple(f"self_attn.{letter}_proj.weight" for letter in "qkv")))
    if model.family.qkv_bias:
        packs.append(Packed("bias", tuple(f"self_attn.{letter}_proj.bias" for letter in "qkv")))
    if model.family.qk_norm:
        packs += (Packed(f"{letter}_norm", (f"self_attn.{letter}_norm.weight",)) for letter in "qk")
    return packs


def _route_pack(model: ModelConfig) -> list[Packed]:
    norm = Packed("norm", ("post_attention_layernorm.weight",))
    return [norm, Packed("gate", (f"{model.family.tensors.mixture}.gate.weight",))]


def _expert_pack(model: ModelConfig, name: str, key: str = "") -> list[Packed]:
    tensors = model.family.tensors
    gate = f"{name}.{tensors.gate}.weight"
    up = f"{name}.{tensors.up}.weight"
    down = f"{name}.{tensors.down}.weight"
    return [Packed(f"gate_up{key}", (gate, up)), Packed(f"down{key}", (down,))]


def _routed_pack(model: ModelConfig) -> list[Packed]:
    each = (_expert_pack(model, model.family.tensors.expert(n), f".{n}") for n in range(model.num_local_experts))
    return [packed for packs in each for packed in packs]


def _shared_pack(model: ModelConfig) -> list[Packed]:
    name = model.family.tensors.shared_expert
    return [*_expert_pack(model, name), Packed("gate", (f"{name}_gate.weight",))]


def _no_pack(model: ModelConfig) -> list[Packed]:
    return []


@dataclass(frozen=True)
class Implementation:
    """The function by which the engine computes an operation, and the tensors it takes.

    Attributes
    ----------
    run : callable (Ops, RowLayout, buffers, weights) -> written buffer or buffers
    pack : callable (ModelConfig) -> list of Packed
        Its weights in one layer.
    """

    run: Callable[[Ops, RowLayout, Tensors, Tensors], torch.Tensor | tuple[torch.Tensor, ...]]
    pack: Callable[[ModelConfig], list[Packed]] = _no_pack


_SHARED = Implementation(Ops.shared_experts, _shared_pack)
_COMBINE = Implementation(Ops.combine)
OPERATIONS: dict[Op, Implementation] = {
    qkv: Implementation(Ops.qkv, _qkv_pack),
    prefill_attention: Implementation(Ops.prefill_attention),
    out_proj: Implementation(Ops.out_proj, lambda m: [Packed("proj", ("self_attn.o_proj.weight",))]),
    route: Implementation(Ops.route, _route_pack),
    experts: Implementation(Ops.experts, _routed_pack),
    shared_experts: _SHARED,
    add_shared: _SHARED,
    combine: _COMBINE,
    combine_shared: _COMBINE,
}
"""Implementations by operation. `decode_attention` is not here: it belongs to the KV cache. Neither are users'
operations: they bring their own functions."""


def packs(op: Op, model: ModelConfig) -> list[Packed]:
    """The tensors of an operation in one layer."""
    if op in OPERATIONS:
        return OPERATIONS[op].pack(model)
    return [Packed(name, (name,)) for name in op.shapes(model)]
