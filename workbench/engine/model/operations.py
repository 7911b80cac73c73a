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
    """One tensor that an operation takes: checkpoint tensors of one layer, one behind the other.

    Attributes
    ----------
    key : str
    sources : tuple of str
        The checkpoint tensors, joined along their first dimension.
    matrices : int, optional
        Number of matrices of equal shape that they make, along a new first dimension; without it, one.
    """

    key: str
    sources: tuple[str, ...]
    matrices: int | None = None

    def shape(self, rows: int, row: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in which the operation takes `rows` rows of a shape: (matrices, rows / matrices, ...)."""
        return (rows, *row) if self.matrices is None else (self.matrices, rows // self.matrices, *row)


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


def _expert_pack(model: ModelConfig, names: list[str], matrices: int | None = None) -> list[Packed]:
    """Gates and ups, expert by expert, and the down projections."""
    tensors = model.family.tensors
    gate_up = [f"{name}.{matrix}.weight" for name in names for matrix in (tensors.gate, tensors.up)]
    down = [f"{name}.{tensors.down}.weight" for name in names]
    return [Packed("gate_up", tuple(gate_up), matrices), Packed("down", tuple(down), matrices)]


def _routed_pack(model: ModelConfig) -> list[Packed]:
    count = model.num_local_experts
    return _expert_pack(model, [model.family.tensors.expert(number) for number in range(count)], count)


def _shared_pack(model: ModelConfig) -> list[Packed]:
    name = model.family.tensors.shared_expert
    return [*_expert_pack(model, [name]), Packed("gate", (f"{name}_gate.weight",))]


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
