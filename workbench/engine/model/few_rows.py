"""Stages of few rows: kernels that hold a layer's weights, made when few rows first come to it."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias

import torch

from workbench.engine.loading.stored import packed_of
from workbench.engine.loading.tensors import Tensors
from workbench.engine.model.ops import Ops, RowLayout, options_of
from workbench.kernels import (
    FewExperts,
    FewLinear,
    FewQkv,
    FewRoute,
    features,
    fits_few_rows,
)
from workbench.models import ModelConfig
from workbench.models.family import Norm

MOST = FewLinear.MOST
"""Most rows that these kernels take."""
Written: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
Few: TypeAlias = Callable[[RowLayout, Tensors], Written]
"""An operation on held weights: the layout of the rows and the buffers read -> the buffers written."""


class FewRows:
    """Kernels for few rows of one model, by the weights that they hold.

    Each method that is named like an operation takes the operation's weights and makes its kernel, or gives None for
    weights or options of the model that the kernel does not take.

    Parameters
    ----------
    model : ModelConfig
    angles : Tensor
        The table of RoPE's angles.
    tables : dict
        Tensors that belong to no stage.

    Attributes
    ----------
    logits : callable (x (T, M)) -> logits (T, V) fp32, or None
    """

    def __init__(self, model: ModelConfig, angles: torch.Tensor, tables: Tensors) -> None:
        self._model = model
        self._angles = angles
        self._made: dict[int, tuple[Tensors, Few | None]] = {}
        self.logits = self._logits(tables)

    def of(self, method: MethodType, weights: Tensors) -> Few | None:
        """The kernel that computes as a method of `Ops` on held weights, which stay where they are."""
        make = _MAKE.get(method.__func__)
        if make is None:
            return None
        made = self._made.get(id(weights))
        if made is None:  # the weights are kept, so that no others get their id
            made = self._made[id(weights)] = weights, make(self, weights)
        return made[1]

    def qkv(self, weights: Tensors) -> Few | None:
        """See `Ops.qkv`."""
        model = self._model
        if not self._fit(weights, "proj", "norm", "bias", "q_norm", "k_norm") or model.clip_qkv is not None:
            return None
        stage = FewQkv(
            weights["norm"],
            weights["proj"],
            self._angles,
            model.num_attention_heads,
            model.num_key_value_heads,
            bias=weights.get("bias"),
            q_norm=weights.get("q_norm"),
            k_norm=weights.get("k_norm"),
            interleaved=model.family.interleaved,
            eps=model.rms_norm_eps,
        )
        return lambda layout, read: stage(read["x"], layout.positions, threads=torch.get_num_threads())

    def out_proj(self, weights: Tensors) -> Few | None:
        """See `Ops.out_proj`."""
        if not self._fit(weights, "proj", "bias") or self._model.residual_multiplier != 1:
            return None
        stage = FewLinear(weights["proj"], weights.get("bias"))
        return lambda layout, read: stage(read["attn"], read["x"], threads=torch.get_num_threads())

    def route(self, weights: Tensors) -> Few | None:
        """See `Ops.route`."""
        model = self._model
        plain = model.family.scoring == "softmax" and model.n_group == 1
        if not self._fit(weights, "gate", "norm", "gate_bias") or not plain:
            return None
        if model.family.exact_router and weights["gate"].dtype is not torch.float32:
            return None
        stage = FewRoute(
            weights["norm"],
            weights["gate"],
            model.num_experts_per_tok,
            bias=weights.get("gate_bias"),
            renormalise=model.norm_topk_prob,
            scale=model.routed_scaling_factor,
            eps=model.rms_norm_eps,
        )
        return lambda layout, read: stage(read["x"], threads=torch.get_num_threads())

    def experts(self, weights: Tensors) -> Few | None:
        """See `Ops.experts`."""
        return _experts(self._model, weights)

    def _logits(self, tables: Tensors) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """See `Ops.logits`."""
        model = self._model
        head = tables.get("head", tables["embedding"])
        if model.family.norm is not Norm.RMS or model.logits_scaling != 1 or not fits_few_rows(head):
            return None
        stage = FewLinear(head, tables.get("head bias"), norm=tables["norm norm"], eps=model.rms_norm_eps)
        return lambda x: stage(x, threads=torch.get_num_threads()).float()

    def _fit(self, weights: Tensors, matrix: str, *others: str) -> bool:
        """True if there are no other weights than these, the matrix is one for few rows, and norms are RMSNorms."""
        whole = weights.keys() <= {matrix, *others} and matrix in weights
        return whole and self._model.family.norm is Norm.RMS and fits_few_rows(weights[matrix])


def _experts(model: ModelConfig, weights: Tensors) -> Few | None:
    if "gate_up_blocks" not in weights or not features().lanes:
        return None
    stage = FewExperts(packed_of(weights), **options_of(model, weights))
    return lambda layout, read: stage(read["h"], read["gates"], threads=torch.get_num_threads())


def warm_up(model: ModelConfig, angles: torch.Tensor, dtype: torch.dtype, routed: Tensors) -> None:
    """Compile a model's kernels for rows of a type, these angles, and routed experts stored as `routed`."""
    size = 64
    row = torch.zeros(1, size, dtype=dtype)
    if not fits_few_rows(row.expand(size, size).contiguous()):
        return
    dim = 2 * angles.shape[1]
    FewQkv(row[0], row.new_zeros(3 * dim, size), angles, 1, 1)(row, torch.zeros(1, dtype=torch.int64))
    FewLinear(row.new_zeros(size, size), norm=row[0])(row, row)
    FewRoute(row[0], row.new_zeros(size, size), 1)(row)
    if (stage := _experts(model, routed)) is not None:
        width = routed["down_blocks"].shape[1]
        stage(RowLayout.smallest(), {"h": row.new_zeros(1, width), "gates": torch.zeros(1, 2)})


_MAKE: dict[Any, Callable[[FewRows, Tensors], Few | None]] = {
    Ops.qkv: FewRows.qkv,
    Ops.out_proj: FewRows.out_proj,
    Ops.route: FewRows.route,
    Ops.experts: FewRows.experts,
}
