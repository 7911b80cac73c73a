"""The built-in operations on tensors: calls of `workbench.kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, chain, pairwise
from operator import mul
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from workbench.engine.lanes.control import Control
from workbench.engine.loading.stored import experts_of, packed_of
from workbench.engine.loading.tensors import Tensors
from workbench.kernels import (
    Decodes,
    Linear,
    Llama3,
    LongRope,
    NodeExperts,
    PackedExperts,
    Quantised,
    Routing,
    Yarn,
    embed,
    fused_moe,
    gated,
    layer_norm,
    linear,
    prefill_attention,
    rms_norm,
    rope,
    rope_table,
    route,
    warm_up_experts,
)
from workbench.models import ModelConfig
from workbench.models.family import Norm
from workbench.scheduler.batch import Batch
from workbench.scheduler.block_manager import BlockManager
from workbench.stages import RowClass

Matrices: TypeAlias = PackedExperts | NodeExperts | tuple[torch.Tensor, torch.Tensor] | tuple[Quantised, Quantised]


class Attention(NamedTuple):
    """The options of one layer's attention.

    Attributes
    ----------
    scale : float or None
        Factor of the scores, if it is not 1 / sqrt(D).
    window : int or None
        Last tokens that a token attends to, if not all.
    sinks : Tensor (H,) fp32 or None
        Score of each head that adds to the softmax' denominator alone.
    """

    scale: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None


EVERYTHING = Attention()
"""Attention to all tokens before."""
STEP_FLOPS = 5e10
"""Floating-point operations between two checks for a stop request: 0.3 to 1 s on a CPU. With a matrix of 4096 x 28672
a step has 212 rows; reading the weights again in every step costs a few percent of it."""


CARD_STEP_FLOPS = 5e12
"""The same on a card: about 7 ms of an H200. With Mixtral's experts a step has 7,000 rows."""


class Chunks(NamedTuple):
    """Chunks of prompts, one per prefill.

    Attributes
    ----------
    start : ndarray (prefills,) int64
        Position in its prompt of each chunk's first token.
    table : ndarray (prefills, W) int32
        KV blocks that hold the tokens before each chunk.
    emits : ndarray (prefills,) bool
        True where the chunk samples a token.
    """

    start: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    emits: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, batch: Batch, blocks: BlockManager) -> Chunks:
        """Chunks of one part of a batch."""
        width = -(-int(batch.starts.max(initial=0)) // blocks.block_size)
        return cls(batch.starts, blocks.table[batch.prefills, :width], batch.emits)


@dataclass(frozen=True)
class RowLayout:
    """Layout of the rows of one part of a batch: prefill rows first, then one row per decode.

    Attributes
    ----------
    prefill_len : list of int
        Rows of each prefill.
    positions : Tensor (T,) int64
        Position of every row's token in its sequence.
    slots : ndarray (T,) int64
        KV slot of every row: block * block size + offset.
    table : ndarray (decodes, W) int32
        KV blocks of each decode.
    lengths : ndarray (decodes,) int64
        KV entries that each decode reads, its own included.
    chunks : Chunks or None
        Set where the prefills are chunks of their prompts.
    skipped : int
        Rows of prefills that do not pass this layer; they stand before these rows in every buffer.
    """

    prefill_len: list[int]
    positions: torch.Tensor
    slots: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    chunks: Chunks | None = None
    skipped: int = 0

    @classmethod
    def of(cls, batch: Batch, blocks: BlockManager) -> RowLayout:
        """Lay out the rows of one part of a batch."""
        size = blocks.block_size
        table = blocks.table
        lengths = batch.prefill_len
        first = np.repeat(np.cumsum(lengths) - lengths - batch.starts, lengths)
        positions = np.concatenate((np.arange(int(lengths.sum())) - first, batch.context))
        owners = np.concatenate((np.repeat(batch.prefills, lengths), batch.decodes))
        slots = table[owners, positions // size].astype(np.int64) * size + positions % size
        held = batch.context + 1
        width = -(-int(held.max(initial=1)) // size)
        chunks = Chunks.of(batch, blocks) if batch.cut is not None else None
        return cls(lengths.tolist(), torch.from_numpy(positions), slots, table[batch.decodes, :width], held, chunks)

    @cached_property
    def decodes_alone(self) -> RowLayout:
        """The layout of the same part in a layer that its prefills do not pass."""
        first = self.prefill
        rest = (self.positions[first:], self.slots[first:], self.table, self.lengths)
        return RowLayout([], *rest, skipped=self.skipped + first)

    @classmethod
    def smallest(cls) -> RowLayout:
        """The layout of one decode that reads one entry, which is in slot 0."""
        zero = np.zeros(1, np.int64)
        return cls([], torch.from_numpy(zero), zero, np.zeros((1, 1), np.int32), np.ones(1, np.int64))

    @cached_property
    def prefill(self) -> int:
        """Number of prefill rows."""
        return sum(self.prefill_len)

    @cached_property
    def rows(self) -> int:
        """Number of rows, prefill and decode."""
        return len(self.positions)

    @property
    def last_rows(self) -> torch.Tensor:
        """Row in the buffers of each request that emits: the last row of a prefill, and every decode row."""
        ends = np.cumsum(self.prefill_len, dtype=np.int64) - 1
        ends = ends if self.chunks is None else ends[self.chunks.emits]
        return torch.from_numpy(self.skipped + np.concatenate((ends, np.arange(self.prefill, self.rows))))

    @property
    def starts(self) -> list[int]:
        """The first row of each prefill, and the first behind them."""
        return [0, *accumulate(self.prefill_len)]

    @property
    def key_starts(self) -> list[int]:
        """The first key of each prefill where those of its tokens before its chunk come first; one more at the end."""
        keys = [length + before for length, before in zip(self.prefill_len, self.before.tolist(), strict=True)]
        return [0, *accumulate(keys)]

    @cached_property
    def few(self) -> Decodes:
        """The places of its rows, all of which are decodes, for kernels that compute whole layers."""
        return Decodes(self.positions, self.slots, self.table, self.lengths)

    @cached_property
    def _there(self) -> dict[torch.device, OnDevice]:
        return {}

    @cached_property
    def _renumbered(self) -> dict[bytes, RowLayout]:
        return {}

    def renumbered(self, table: npt.NDArray[np.int32], slots: npt.NDArray[np.int64]) -> RowLayout:
        """The same decodes on blocks with other numbers; one layout for all layers that number them so."""
        return self._renumbered.setdefault(table.tobytes(), replace(self, table=table, slots=slots))

    def on(self, device: torch.device) -> OnDevice:
        """The layout in a device's memory."""
        return self._there.setdefault(device, OnDevice(self, device))

    def leave(self) -> None:
        """Free the devices' memory that this layout takes, and that of the layouts made of it."""
        self._there.clear()
        for other in self._renumbered.values():
            other.leave()
        if "decodes_alone" in vars(self):
            self.decodes_alone.leave()

    def rows_of(self, row_class: RowClass) -> slice:
        """Rows of a class in the buffers."""
        first = self.skipped + (self.prefill if row_class is RowClass.DECODE else 0)
        return slice(first, self.skipped + (self.prefill if row_class is RowClass.PREFILL else self.rows))

    def has(self, row_class: RowClass) -> bool:
        """True if there are rows of a class."""
        rows = self.rows_of(row_class)
        return bool(rows.start < rows.stop)

    @property
    def before(self) -> npt.NDArray[np.int64]:
        """KV entries of each prefill that earlier chunks of its prompt wrote."""
        return np.zeros(len(self.prefill_len), np.int64) if self.chunks is None else self.chunks.start


class OnDevice:
    """The tensors of a layout on a device: each comes there once, when it is first asked for."""

    def __init__(self, layout: RowLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device

    @cached_property
    def positions(self) -> torch.Tensor:
        """See `RowLayout`."""
        return self._layout.positions.to(self._device)

    @cached_property
    def slots(self) -> torch.Tensor:
        """See `RowLayout`."""
        return torch.from_numpy(self._layout.slots).to(self._device)

    @cached_property
    def table(self) -> torch.Tensor:
        """See `RowLayout`."""
        return torch.from_numpy(np.ascontiguousarray(self._layout.table)).to(self._device)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """See `RowLayout`."""
        return torch.from_numpy(self._layout.lengths).to(self._device)

    @cached_property
    def last_rows(self) -> torch.Tensor:
        """See `RowLayout.last_rows`."""
        return self._layout.last_rows.to(self._device)

    @cached_property
    def starts(self) -> torch.Tensor:
        """See `RowLayout.starts`."""
        return torch.tensor(self._layout.starts, device=self._device)

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """See `RowLayout.key_starts`."""
        return torch.tensor(self._layout.key_starts, device=self._device)

    @cached_property
    def decodes(self) -> torch.Tensor:
        """1 for every row of a decode and 0 for the others: (T, 1) fp32, made on the device."""
        found = torch.zeros(self._layout.rows, 1, device=self._device)
        found[self._layout.prefill :] = 1
        return found

    def bring(self) -> None:
        """Have all of them come there now: while a card is at work, each would wait for what it is doing."""
        for name, there in vars(OnDevice).items():
            if isinstance(there, cached_property):
                getattr(self, name)


def _matrices(weights: Tensors) -> Matrices:
    """The routed experts as `fused_moe` takes them: packed, or a pair."""
    packed = experts_of(weights)
    if packed is not None:
        return packed
    if "gate_up_scales" in weights:
        gate_up, down = (Quantised(weights[key], weights[f"{key}_scales"]) for key in ("gate_up", "down"))
        return gate_up, down
    return weights["gate_up"], weights["down"]


def options_of(model: ModelConfig, weights: Tensors) -> dict[str, Any]:
    """Activation function and biases of routed experts, as their kernels take them."""
    biases = {key: weights.get(key) for key in ("gate_up_bias", "down_bias")}
    return {"activation": model.family.activation, **biases}


class Ops:
    """Operations of one model, for requests of so many positions at most.

    Each operation takes the layout of the rows, the buffers that it reads (rows of its class) and its weights, and
    returns the buffers that it writes.
    They compute, and keep the tables that they are given, on `device`, by default the CPU.
    Shape letters: T rows, M model dim, H query heads, K key-value heads, D head dim, E experts, F expert dim.

    Attributes
    ----------
    angles : Tensor (P, D) fp32
        See `rope_table`; of the first `held` positions, by default of all that the model takes.
    """

    def __init__(
        self,
        model: ModelConfig,
        control: Control | None = None,
        tables: Tensors | None = None,
        positions: int | None = None,
        held: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._model = model
        self._control = control or Control()
        self._device = device or torch.device("cpu")
        self._tables = {key: tensor.to(self._device) for key, tensor in (tables or {}).items()}
        self.angles = _angles(model, positions or model.max_position_embeddings, held).to(self._device)
        self.attention = EVERYTHING

    @property
    def _step_flops(self) -> float:
        """Floating-point operations between two checks for a stop request."""
        return STEP_FLOPS if self._device.type == "cpu" else CARD_STEP_FLOPS

    def of_layers(self) -> list[Ops]:
        """The operations of every layer."""
        return [self.at(layer) for layer in range(self._model.num_hidden_layers)]

    @property
    def _threads(self) -> int | None:
        """Threads of Numba's kernels: as many as torch uses, and none on a card."""
        return torch.get_num_threads() if self._device.type == "cpu" else None

    def at(self, layer: int) -> Ops:
        """The operations of one layer."""
        model = self._model
        usual = model.score_scale == model.head_dim**-0.5
        window = model.sliding_window if model.layer_kinds[layer].windowed else None
        own = copy(self)
        own.attention = Attention(None if usual else model.score_scale, window, self._tables.get(f"sinks {layer}"))
        return own

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """Token ids -> x (T, M)."""
        there = torch.tensor(ids, device=self._device)
        return _scaled(embed(there, self._tables["embedding"]), self._model.embedding_multiplier)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, M) -> logits (T, V) fp32."""
        tables = self._tables
        head = tables.get("head", tables["embedding"])
        normed = self.norm(x, tables["norm norm"], tables.get("norm norm_bias"))
        found = self.linear(normed, head, tables.get("head bias")).float()
        return _scaled(found, 1 / self._model.logits_scaling)

    def warm_up(self, dtype: torch.dtype) -> Iterator[object]:
        """Compile the kernels for rows of a type, one per step; `warm_up_experts` compiles those of routed experts."""
        model = self._model
        row = torch.zeros(1, model.head_dim, dtype=dtype)
        q = row.new_zeros(2, model.num_attention_heads, model.head_dim)
        k = row.new_zeros(2, model.num_key_value_heads, model.head_dim)
        logits = torch.float32 if model.family.exact_router else dtype
        yield self.norm(row, row[0])
        yield self.linear(row, row)
        yield self._attended(q, k, k, torch.tensor([0, 2]), None)
        yield self._rotated(torch.zeros(1, dtype=torch.int64), row, None)
        yield gated(row, threads=1)
        yield self._chosen(torch.zeros(1, model.num_local_experts, dtype=logits), 1, None)

    def warm_up_experts(self, dtype: torch.dtype, routed: Tensors) -> None:
        """Compile the kernels for rows of a type and for routed experts stored as `routed`."""
        if "gate_up_blocks" in routed:
            warm_up_experts(
                packed_of(routed),
                **options_of(self._model, routed),
                dtype=np.uint16 if dtype is torch.bfloat16 else np.float32,
            )
        else:
            x = torch.zeros(1, routed["gate_up"].shape[2], dtype=dtype)
            self._routed(x, _matrices(routed), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), routed)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The family's norm of rows (T, M), on as many threads as torch uses."""
        eps = self._model.rms_norm_eps
        if self._model.family.norm is not Norm.RMS:
            return layer_norm(x, weight, bias, eps=eps)
        return rms_norm(x, weight, eps=eps, threads=self._threads)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Rows (T, M) times a matrix, in steps between which the run can be stopped."""
        step = max(1, int(self._step_flops / (2 * weight.numel())))
        if x.shape[0] <= step:
            return linear(x, weight, bias)
        out = x.new_empty(len(x), len(weight))
        for low in range(0, len(x), step):
            self._control.check()
            out[low : low + step] = self.linear(x[low : low + step], weight, bias)
        return out

    def qkv(self, layout: RowLayout, read: Tensors, weights: Tensors) -> tuple[torch.Tensor, ...]:
        """x (T, M) -> q (T, H D), k and v (T, K D), rotated."""
        model = self._model
        normed = self.norm(read["x"], weights["norm"], weights.get("norm_bias"))
        projected = self.linear(normed, weights["proj"], weights.get("bias"))
        del normed  # so that there is room for the rotated heads and their copies; see `working` of the operation
        if model.clip_qkv is not None:
            projected.clamp_(-model.clip_qkv, model.clip_qkv)
        positions = layout.on(self._device).positions
        if "q_norm" in weights or "k_norm" in weights:
            q, k, v = projected.split_with_sizes([model.q_size, model.kv_size, model.kv_size], dim=-1)
            q = self._rotated(positions, q, weights.get("q_norm"))
            k = self._rotated(positions, k, weights.get("k_norm"))
            return q, k, v.contiguous()
        both, v = projected.split_with_sizes([model.q_size + model.kv_size, model.kv_size], dim=-1)
        q, k = self._rotated(positions, both, None).split_with_sizes([model.q_size, model.kv_size], dim=-1)
        return q.contiguous(), k.contiguous(), v.contiguous()

    def _rotated(self, positions: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Heads x (T, H D), rotated; before that normed by a weight (D,) one by one, or by (H D,) all together."""
        if weight is not None and len(weight) == x.shape[1]:
            x = self.norm(x, weight)
            weight = None
        heads: torch.Tensor = x.unflatten(1, (-1, self._model.head_dim))
        rotated = rope(
            heads,
            positions,
            self.angles,
            interleaved=self._model.family.interleaved,
            weight=weight,
            eps=self._model.rms_norm_eps,
            threads=self._threads,
        )
        return rotated.flatten(1)

    def prefill_attention(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """q (T, H D), k and v (T, K D) of the prefill rows -> attn (T, H D), causal within each prompt.

        A chunk also attends to the tokens of its prompt before it: `k_before` and `v_before` hold their keys and
        values, chunk after chunk.
        """
        model = self._model
        dims = {"q": model.head_dim, "k": model.head_dim, "v": model.v_head_dim or model.head_dim}
        q, k, v = (_with_before(layout, read, name).unflatten(1, (-1, dim)) for name, dim in dims.items())
        starts = layout.starts
        key_starts = layout.key_starts
        keys = [last - first for first, last in pairwise(key_starts)]
        pair = 4 * self._model.q_size  # floating-point operations of a query and a key
        if pair * sum(map(mul, layout.prefill_len, keys)) <= self._step_flops:
            self._control.check()
            there = layout.on(self._device)
            return self._attended(q, k, v, there.starts, None if key_starts == starts else there.key_starts)
        outputs = []
        for (low, high), (first, last) in zip(pairwise(starts), pairwise(key_starts), strict=True):
            step = max(1, int(self._step_flops / (pair * (last - first))))
            for begin in range(low, high, step):
                self._control.check()
                end = min(begin + step, high)
                seen = slice(first, last - (high - end))
                edges, key_edges = torch.tensor([[0, end - begin], [0, seen.stop - first]], device=self._device)
                outputs.append(self._attended(q[begin:end], k[seen], v[seen], edges, key_edges))
        return torch.cat(outputs)

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of sequences by their first queries, and by their first keys if these are others: -> (T, H D)."""
        return prefill_attention(q, k, v, starts, key_starts=key_starts, **self.attention._asdict()).flatten(1)

    def _added(self, x: torch.Tensor, sublayer: torch.Tensor) -> torch.Tensor:
        """The residual stream x (T, M) with what a sublayer adds."""
        return added(x, sublayer, self._model.residual_multiplier)

    def out_proj(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """attn (T, H D) and x (T, M) -> x."""
        return self._added(read["x"], self.linear(read["attn"], weights["proj"], weights.get("bias")))

    def route(self, layout: RowLayout, read: Tensors, weights: Tensors) -> tuple[torch.Tensor, ...]:
        """x (T, M) -> h (T, M) and gates (T, 2 k) fp32, the k expert ids of each row and then their k weights.

        A layer without experts has no gate, and its gates are zeros.
        """
        h = self.norm(read["x"], weights["norm"], weights.get("norm_bias"))
        count = self._model.num_experts_per_tok
        if "gate" not in weights:
            return h, torch.zeros(len(h), 2 * count, device=h.device)
        gate = weights["gate"]
        exact = self._model.family.exact_router
        rows, gate = (h.float(), gate.float()) if exact else (h, gate)
        logits = self.linear(rows, gate, weights.get("gate_bias"))
        ids, scales = self._chosen(logits, count, weights.get("choice_bias"))
        return h, torch.cat((ids.float(), scales), dim=-1)

    def _chosen(self, logits: torch.Tensor, count: int, bias: torch.Tensor | None) -> Routing:
        """The experts of each row and their weights, on as many threads as torch uses where Numba chooses."""
        model = self._model
        scale = model.routed_scaling_factor
        renormalise = model.norm_topk_prob
        if model.family.scoring == "softmax" and bias is None and model.n_group == 1:
            return route(logits, count, renormalise=renormalise, scale=scale, threads=self._threads)
        return route(
            logits,
            count,
            scoring=model.family.scoring,
            renormalise=renormalise,
            bias=bias,
            groups=model.n_group,
            kept_groups=model.topk_group,
            scale=scale,
        )

    def experts(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """h (T, M), gates (T, 2 j) -> routed (T, M), the weighted sum over the j experts of each row.

        With `pages` among the weights, over those that are on a page; see `fused_moe`.
        """
        h = read["h"]
        ids, scales = read["gates"].chunk(2, dim=-1)
        chosen = ids.int()
        scales = scales.contiguous()
        matrices = _matrices(weights)
        step = max(1, int(self._step_flops / (2 * chosen.shape[1] * self._model.expert_params)))
        if h.shape[0] <= step:
            self._control.check()
            return self._routed(h, matrices, chosen, scales, weights)
        outputs = []
        for low in range(0, len(h), step):
            self._control.check()
            some = slice(low, low + step)
            outputs.append(self._routed(h[some], matrices, chosen[some], scales[some], weights))
        return torch.cat(outputs)

    def _routed(
        self,
        h: torch.Tensor,
        matrices: Matrices,
        ids: torch.Tensor,
        scales: torch.Tensor,
        weights: Tensors,
    ) -> torch.Tensor:
        """Rows h (T, M) through the experts `ids` (T, j) -> (T, M); packed ones on as many threads as torch uses."""
        options = options_of(self._model, weights)
        found: torch.Tensor
        if isinstance(matrices, tuple):
            found = fused_moe(h, matrices, ids, scales, pages=weights.get("pages"), **options)
        else:
            found = fused_moe(h, matrices, ids, scales, threads=self._threads, **options)
        return found

    def shared_experts(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """h (T, M) -> shared (T, M), scaled by the sigmoid of a gate if there is one; with `routed`, their sum."""
        inner = gated(self.linear(read["h"], weights["gate_up"]), threads=self._threads)
        out = self.linear(inner, weights["down"])
        if "gate" in weights:
            out.mul_(self.linear(read["h"], weights["gate"]).sigmoid_())
        return added(out, read["routed"]) if "routed" in read else out

    def combine(self, layout: RowLayout, read: Tensors, weights: Tensors) -> torch.Tensor:
        """x (T, M) + the sum of what experts made (T, M), in the order in which it is read -> x."""
        first, *others = (read[buffer] for buffer in read if buffer != "x")
        return self._added(read["x"], reduce(added, others, first))


def added(x: torch.Tensor, other: torch.Tensor | float, factor: float = 1.0) -> torch.Tensor:
    """x + factor * other."""
    return torch.add(x, other, alpha=factor)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply x by a factor in place, and return it."""
    return x if factor == 1 else x.mul_(factor)


def _with_before(layout: RowLayout, read: Tensors, name: str) -> torch.Tensor:
    """Rows of a buffer, each prompt's behind those of its tokens before."""
    if f"{name}_before" not in read:
        return read[name]
    before = read[f"{name}_before"].split(layout.before.tolist())
    rows = read[name].split(layout.prefill_len)
    return torch.cat([*chain.from_iterable(zip(before, rows, strict=True))])


def _angles(model: ModelConfig, positions: int, held: int | None) -> torch.Tensor:
    """The table of RoPE's angles; LongRoPE's differ if some of `positions` are beyond the trained ones."""
    found = model.rope
    factor = found.factor or 1.0
    trained = int(found.trained or model.max_position_embeddings)
    scaling: Linear | Yarn | Llama3 | LongRope | None = None
    if found.kind == "linear":
        scaling = Linear(factor)
    elif found.kind == "yarn":
        scaling = Yarn(factor, trained, found.fast, found.slow, found.yarn_amplitude, found.truncate)
    elif found.kind == "llama3":
        scaling = Llama3(factor, trained, found.low, found.high)
    elif found.kind == "longrope":
        scaling = LongRope(*found.longrope(positions, model.max_position_embeddings))
    held = held or model.max_position_embeddings
    return rope_table(model.rotated_dims, held, theta=model.rope_theta, scaling=scaling)
