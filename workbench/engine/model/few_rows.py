"""Kernels that hold the weights of a layer's stage, each for calls with a limited number of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from workbench.engine.loading.stored import experts_of
from workbench.engine.loading.tensors import Tensors
from workbench.engine.model import ops
from workbench.engine.model.ops import Attention, Ops, RowLayout, options_of
from workbench.kernels import (
    FewExperts,
    FewLayer,
    FewLayers,
    FewLinear,
    FewQkv,
    FewRoute,
    PackedExperts,
    PagedDecode,
    features,
    fits_few_rows,
    fused_moe,
    linear,
)
from workbench.models import ModelConfig
from workbench.models.family import Norm

MOST = FewLinear.MOST
"""Most rows that are multiplied with one read of the weights."""
_ALONE = 128
"""Most rows whose norms and rotations one thread computes; with more, several are faster."""
Written: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
Compute: TypeAlias = Callable[[RowLayout, Tensors], Written]
"""An operation on held weights: the layout of the rows and the buffers read -> the buffers written."""


class Held(NamedTuple):
    """An operation on held weights.

    Attributes
    ----------
    most : int
        Most rows that it takes.
    compute : Compute
    stage : object or None
        The kernel that holds the weights; None where they are divided among NUMA nodes.
    """

    most: int
    compute: Compute
    stage: FewQkv | FewLinear | FewRoute | FewExperts | None

    def takes(self, rows: int) -> bool:
        """True if it computes so many rows."""
        return rows <= self.most


class FewRows:
    """The kernels of one model's stages, made when a stage is first computed.

    Reading the experts evicts everything else from the caches, so after them each operation of Python and torch reads
    its own code from memory, which takes 0.1 to 0.4 ms. A stage therefore consists of as few operations as possible.

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
    logits : Held or None
        Computes logits (T, V) fp32 of x.
    """

    def __init__(self, model: ModelConfig, angles: torch.Tensor, tables: Tensors) -> None:
        self._model = model
        self._angles = angles
        self._made: dict[int, tuple[Tensors, Held | None]] = {}
        self.logits = self._logits(tables)

    def of(self, method: MethodType, weights: Tensors, rows: int) -> Held | None:
        """The operation of a method of `Ops` on held weights, which stay where they are; None for too many rows."""
        make = _MAKE.get(method.__func__)
        if make is None:
            return None
        made = self._made.get(id(weights))
        if made is None:  # the weights are kept, so that no others get their id
            made = self._made[id(weights)] = weights, make(self, weights)
        held = made[1]
        return held if held and held.takes(rows) else None

    def qkv(self, weights: Tensors) -> Held | None:
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

        def compute(layout: RowLayout, read: Tensors) -> Written:
            x = read["x"]
            if len(x) <= stage.most:
                return stage(x, layout.positions, threads=torch.get_num_threads())
            joined = linear(stage.normed(x), weights["proj"], weights.get("bias"))
            return stage.split(joined, layout.positions)

        return Held(_rows_of_step(2 * weights["proj"].numel(), _ALONE), compute, stage)

    def out_proj(self, weights: Tensors) -> Held | None:
        """See `Ops.out_proj`."""
        if not self._fit(weights, "proj", "bias") or self._model.residual_multiplier != 1:
            return None
        stage = FewLinear(weights["proj"], weights.get("bias"))
        most = _rows_of_step(2 * weights["proj"].numel(), stage.most)

        def compute(layout: RowLayout, read: Tensors) -> Written:
            return stage(read["attn"], read["x"], threads=torch.get_num_threads())

        return Held(most, compute, stage)

    def route(self, weights: Tensors) -> Held | None:
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

        def compute(layout: RowLayout, read: Tensors) -> Written:
            return stage(read["x"], threads=torch.get_num_threads())

        return Held(stage.most, compute, stage)

    def experts(self, weights: Tensors) -> Held | None:
        """See `Ops.experts`."""
        return _experts(self._model, weights)

    def _logits(self, tables: Tensors) -> Held | None:
        """See `Ops.logits`."""
        model = self._model
        head = tables.get("head", tables["embedding"])
        if model.family.norm is not Norm.RMS or model.logits_scaling != 1 or not fits_few_rows(head):
            return None
        stage = FewLinear(head, tables.get("head bias"), norm=tables["norm norm"], eps=model.rms_norm_eps)
        most = _rows_of_step(2 * head.numel(), stage.most)

        def compute(layout: RowLayout, read: Tensors) -> Written:
            return stage(read["x"], threads=torch.get_num_threads()).float()

        return Held(most, compute, stage)

    def _fit(self, weights: Tensors, matrix: str, *others: str) -> bool:
        """True if there are no other weights than these, the matrix is one for few rows, and norms are RMSNorms."""
        whole = weights.keys() <= {matrix, *others} and matrix in weights
        return whole and self._model.family.norm is Norm.RMS and fits_few_rows(weights[matrix])


def layer_of(kernels: Sequence[Any], cache: PagedDecode, attention: Attention) -> FewLayer | None:
    """All stages of a layer in one call, of those that hold weights; None where their rows have unlike types."""
    projection, out, router, routed = kernels
    if router.storage is not projection.storage:
        return None
    return FewLayer(projection, cache, out, router, routed, **attention._asdict())


def _rows_of_step(flops: float, most: float) -> int:
    """Rows that are computed at once, `most` if a stop request need not wait long for them, and `MOST` at least.

    A row takes so many floating-point operations.
    """
    return max(MOST, int(min(most, ops.STEP_FLOPS / flops)))


def _experts(model: ModelConfig, weights: Tensors) -> Held | None:
    packed = experts_of(weights)
    if packed is None or not features().lanes:
        return None
    options = options_of(model, weights)
    few = FewExperts(packed, **options) if isinstance(packed, PackedExperts) else None

    def compute(layout: RowLayout, read: Tensors) -> Written:
        h = read["h"]
        threads = torch.get_num_threads()
        if few is not None and len(h) <= MOST:
            return few(h, read["gates"], threads=threads)
        gates = read["gates"].numpy()
        half = gates.shape[1] // 2
        scales = np.ascontiguousarray(gates[:, half:])
        found: torch.Tensor = fused_moe(h, packed, gates[:, :half].astype(np.int64), scales, threads=threads, **options)
        return found

    return Held(_rows_of_step(2 * model.num_experts_per_tok * model.expert_params, math.inf), compute, few)


def warm_up(model: ModelConfig, angles: torch.Tensor, dtype: torch.dtype, routed: Tensors) -> None:
    """Compile a model's kernels for rows of a type, these angles, and routed experts stored as `routed`."""
    size = 64
    row = torch.zeros(1, size, dtype=dtype)
    if not fits_few_rows(row.expand(size, size).contiguous()):
        return
    dim = 2 * angles.shape[1]
    qkv = FewQkv(row[0], row.new_zeros(3 * dim, size), angles, 1, 1)
    first = torch.zeros(1, dtype=torch.int64)
    qkv(row, first)
    qkv.normed(row)
    qkv.split(row.new_zeros(1, 3 * dim), first)
    FewLinear(row.new_zeros(size, size), norm=row[0])(row, row)
    FewRoute(row[0], row.new_zeros(size, size), 1)(row)
    FewLayers.warm_up()
    if (held := _experts(model, routed)) is not None:
        width = routed["down_blocks"].shape[1]
        held.compute(RowLayout.smallest(), {"h": row.new_zeros(1, width), "gates": torch.zeros(1, 2)})


_MAKE: dict[Any, Callable[[FewRows, Tensors], Held | None]] = {
    Ops.qkv: FewRows.qkv,
    Ops.out_proj: FewRows.out_proj,
    Ops.route: FewRows.route,
    Ops.experts: FewRows.experts,
}
