"""Operations with declared buffers, weights and work (WHAT is computed), and their placement on devices.

The built-in operations make up the decoder layer of a mixture of experts. Each is one record of everything that the
readers need to know of it. They say what is computed; `workbench.engine` contains the computation, for the
architectures of `workbench.models.families`. Where the layers of a model are not all alike (dense ones before those
with experts, sliding windows in some), an operation's weights and work are the mean over the layers of the model that
it is given; readers give it one whose layers are all of one kind (`ModelConfig.of_kind`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple

from workbench.core.errors import PipelineError
from workbench.core.units import DTYPE_BYTES, is_whole
from workbench.models import LayerKind, ModelConfig
from workbench.models.layers import Recurrence
from workbench.stages.expert_sets import ExpertSet
from workbench.stages.work import Precision, Rows, Work

WorkFunction = Callable[[Rows, ModelConfig, Precision], Work]
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by their names."""


class RowClass(enum.Enum):
    """The rows of a batch that an operation takes."""

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def classes(self) -> tuple[RowClass, ...]:
        """The classes in which buffers are tracked, prefill and decode, that these rows consist of."""
        return (RowClass.PREFILL, RowClass.DECODE) if self is RowClass.ALL else (self,)

    @staticmethod
    def of(*, prefill: bool, decode: bool) -> RowClass | None:
        """The rows of these classes; None for none."""
        if prefill and decode:
            return RowClass.ALL
        return RowClass.PREFILL if prefill else RowClass.DECODE if decode else None


class Place(enum.Enum):
    """The device that a stage is placed on."""

    GPU = "gpu"
    CPU = "cpu"
    __hash__ = object.__hash__  # members are few and themselves; Enum's own takes a call of Python at every look-up

    @property
    def other(self) -> Place:
        """The other side of the link."""
        return Place.CPU if self is Place.GPU else Place.GPU


@dataclass(frozen=True)
class Op:
    """One operation of a decoder layer.

    Parameters
    ----------
    name : str
    reads, writes : tuple of str
        Buffers that it reads and writes. A buffer that is not built in (see `BUFFERS`) is as wide as the model.
    rows : RowClass
        The rows of a batch that it takes.
    work : callable (Rows, ModelConfig, Precision) -> Work, optional
        FLOP and bytes for these rows; `bound` and `simulate` need it.
    run : callable, optional
        The computation. `run` calls it with the read buffers as keyword arguments, tensors of shape (rows, width), and
        with `weights`, its tensors by name, if it has any; it returns the written buffer, or a tuple of them. The
        computation of built-in operations is in the engine.
    params : callable (ModelConfig) -> float, optional
        Weights that it reads per layer [elements], if `tensors` is not given.
    routed : bool
        True for the routed experts, whose weights may have a number format of their own.
    keeps_kv : bool
        True for the operation that reads the KV cache: the cache lives on its device, and the keys and values of
        all new rows are appended there.
    working : callable (ModelConfig, int) -> float, optional
        Bytes per row that it needs while it runs beyond its buffers, for weights of so many bytes each.
    tensors : callable (ModelConfig) -> {name: shape}, optional
        Its weights in the checkpoint. ``gain`` is the tensor ``model.layers.0.gain`` in layer 0. They are resident or
        streamed like those of built-in operations.
    reads_past : bool
        True for prompt attention that can take chunks: where a prompt comes in chunks, it also takes `k_before` and
        `v_before`, the keys and values of all earlier chunks, chunk after chunk. It must read `k`.
    in_parts : bool
        True if GPUs or sockets that share its weights compute partial sums, which must be added up.
    kept : callable (ModelConfig) -> float, optional
        Weights per layer that stay in fp32 whatever the precision [elements], beside `params`.
    present : callable (ModelConfig, LayerKind) -> bool, optional
        True for the kinds of layers that have it; by default every layer has it.
    subset : ExpertSet, optional
        The experts that it computes, for ``experts[subset]``.
    variant_of : Op, optional
        The built-in operation of which it computes some rows or some experts, or which it is with other buffers.

    Raises
    ------
    PipelineError
        If it has both `params` and `tensors`, or `reads_past` and is no prompt attention.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    rows: RowClass = RowClass.ALL
    work: WorkFunction | None = None
    run: Callable[..., Any] | None = None
    params: Callable[[ModelConfig], float] | None = None
    routed: bool = False
    keeps_kv: bool = False
    working: Callable[[ModelConfig, int], float] | None = None
    tensors: Callable[[ModelConfig], Shapes] | None = None
    reads_past: bool = False
    in_parts: bool = False
    kept: Callable[[ModelConfig], float] | None = None
    present: Callable[[ModelConfig, LayerKind], bool] | None = None
    subset: ExpertSet | None = None
    variant_of: Op | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.params is not None and self.tensors is not None:
            raise PipelineError(f"Op({self.name!r}) has params and tensors; give tensors alone, which tell how many.")
        if self.reads_past and not ("k" in self.reads and self.rows is RowClass.PREFILL):
            raise PipelineError(
                f"Op({self.name!r}) has reads_past and takes no keys of prompts; give rows=RowClass.PREFILL and k "
                "among its reads."
            )

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)  # the engine looks operations up dozens of times per layer

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A built-in operation by its name and a variant by how it is made, so that another process has its own."""
        if BUILT_IN.get(self.name) == self:
            return self.name
        if self.plain is combine:
            return combine_of, self.reads[1:]
        if self.plain is experts:
            return _variant, (self.subset, self.rows)
        return Op, tuple(getattr(self, known.name) for known in fields(self))

    __iter__ = None
    """An operation is no sequence of experts."""

    def __getitem__(self, which: slice | ExpertSet) -> Op:
        """The operation for some of the routed experts: ``experts[:32]``, or ``experts[hot]`` with an `ExpertSet`.

        Raises
        ------
        PipelineError
            If it is not the built-in `experts`, or `which` is neither a slice nor a set.
        """
        if self is not experts:
            raise PipelineError(f"{self.name}[...] names some experts; only the built-in experts have any.")
        subset = ExpertSet.of_slice(which) if isinstance(which, slice) else which
        if not isinstance(subset, ExpertSet):
            raise PipelineError(f"experts[...] takes a range or an ExpertSet, not {which!r}; write experts[:32].")
        writes = (f"routed[{subset}]",)
        return replace(self, name=f"experts[{subset}]", writes=writes, subset=subset, variant_of=self)

    @property
    def prefill(self) -> Op:
        """The routed experts for the prefill rows alone; `decode` has the others.

        Raises
        ------
        PipelineError
            If it is another operation.
        """
        return self._of_class(RowClass.PREFILL)

    @property
    def decode(self) -> Op:
        """The routed experts for the decode rows alone; see `prefill`."""
        return self._of_class(RowClass.DECODE)

    def _of_class(self, rows: RowClass) -> Op:
        if self.plain is not experts or self.rows is not RowClass.ALL:
            raise PipelineError(f"{self.name}.{rows.value} is not known; only experts have their rows placed apart.")
        return replace(self, name=f"{self.name}.{rows.value}", rows=rows, variant_of=experts)

    @property
    def chosen(self) -> Streamed:
        """The weights of the routed experts that a batch's tokens chose, for `fetch(experts.chosen)`.

        Raises
        ------
        PipelineError
            If it is another operation.
        """
        if self.plain is not experts:
            raise PipelineError(f"{self.name}.chosen is not known; only experts are chosen. Write {self.name}.weights.")
        return Streamed(f"{self.name}.chosen", self.name, chosen=True)

    @property
    def plain(self) -> Op:
        """The built-in operation of which this one is a variant; itself if it is none."""
        return self.variant_of or self

    @property
    def holder(self) -> Op:
        """The operation for all rows, whose weights it shares."""
        if self.plain is not experts or self.rows is RowClass.ALL:
            return self
        return experts if self.subset is None else experts[self.subset]

    def members(self, model: ModelConfig, layer: int) -> int:
        """Number of the routed experts of a layer that it computes."""
        every = model.num_local_experts
        return every if self.subset is None else len(self.subset.of(layer, every))

    @property
    def weights(self) -> Streamed:
        """This operation's weights, for `fetch(experts.weights)`."""
        return Streamed(f"{self.name}.weights", self.name)

    @property
    def needs(self) -> tuple[tuple[str, RowClass], ...]:
        """The rows of buffers that must be on its device when it runs, as (buffer, row class)."""
        read = [(buffer, rows) for buffer in self.reads for rows in self.rows.classes]
        if self.keeps_kv:
            read += [(buffer, rows) for buffer in ("k", "v") for rows in RowClass.ALL.classes]
        return tuple(dict.fromkeys(read))

    @property
    def has_weights(self) -> bool:
        """True if it reads weights, which can be streamed."""
        return self.params is not None or self.tensors is not None

    def is_in(self, model: ModelConfig, kind: LayerKind) -> bool:
        """True if a model's layers of this kind have it."""
        return self.present is None or self.present(model, kind)

    def elements(self, model: ModelConfig) -> float:
        """Weights in one layer, mean over the layers."""
        return self.params(model) if self.params else sum(math.prod(shape) for shape in self.shapes(model).values())

    def shapes(self, model: ModelConfig) -> Shapes:
        """Shapes of a user's tensors by name; empty for built-in operations, whose tensors the engine knows.

        Raises
        ------
        PipelineError
            If a shape is no tuple of positive whole numbers.
        """
        found = self.tensors(model) if self.tensors else {}
        for name, shape in found.items():
            if not isinstance(shape, tuple) or not shape or not all(is_whole(size) and size > 0 for size in shape):
                raise PipelineError(
                    f"tensor {name!r} of Op({self.name!r}) has the shape {shape!r}; give a tuple of sizes from 1 on."
                )
        return found

    def bytes_each(self, model: ModelConfig, precision: Precision) -> float:
        """Bytes per weight: of its own format, or else of the routed experts' or the other weights'."""
        usual = precision.expert_bytes if self.routed else precision.other_bytes
        if self.params is not None and self.plain.name == "experts" and model.expert_vectors:
            usual = _with_biases(model, usual, DTYPE_BYTES[precision.weights])
        rounded = self.routed and precision.group is not None
        if rounded or not (model.formats and precision.as_stored):
            return usual
        return model.format_of(self.plain.name) or usual

    def weight_bytes(self, model: ModelConfig, precision: Precision, layer: int = 0) -> float:
        """Bytes of its weights in one layer, mean over the layers; for a set of experts, in this layer."""
        kept = self.kept(model) * DTYPE_BYTES["fp32"] if self.kept else 0.0
        whole = kept + self.elements(model) * self.bytes_each(model, precision)
        if self.subset is None:
            return whole
        return whole * self.members(model, layer) / model.num_local_experts

    def working_bytes(self, model: ModelConfig, precision: Precision) -> float:
        """Bytes per row that it needs while it runs, beyond the buffers that it reads and writes."""
        return self.working(model, DTYPE_BYTES[precision.weights]) if self.working else 0.0


@dataclass(frozen=True)
class Stage:
    """One operation placed on one device.

    Of the experts that a decode token chose, the output of the `defer` lowest-scored is added one layer later
    (KTransformers), and the `skip` lowest-scored are never computed. Prefills have all of their experts at once. The
    last layer defers nothing.
    """

    op: Op
    device: Place
    defer: int = 0
    skip: int = 0

    def __post_init__(self) -> None:
        for name in ("defer", "skip"):
            count = getattr(self, name)
            if not is_whole(count) or count < 0 or (count and self.op is not experts):
                raise PipelineError(
                    f"{name}={count!r} of {self.device.value}({self.op.name}) must be a whole number from 0 on, and 0 "
                    "for all but the built-in experts, whole and for all rows."
                )
            object.__setattr__(self, name, int(count))

    def __str__(self) -> str:
        return f"{self.device.value}({self.op.name}{''.join(f', {option}' for option in self.options)})"

    @property
    def options(self) -> tuple[str, ...]:
        """Options that leave experts out, as a user writes them: ``defer=3``."""
        return tuple(f"{name}={getattr(self, name)}" for name in ("defer", "skip") if getattr(self, name))


@dataclass(frozen=True)
class Move:
    """A transfer to `target`; it moves the buffers that later stages read there."""

    target: Place

    def __str__(self) -> str:
        return "offload" if self.target is Place.CPU else "load"


@dataclass(frozen=True)
class Streamed:
    """Something that `fetch` streams to the GPU: all weights, one operation's weights, or the KV cache.

    With `chosen`, of the operation's experts only those come that a batch's tokens chose.
    """

    name: str
    op: str | None = None
    chosen: bool = False

    def __reduce__(self) -> str | tuple[Any, ...]:
        """`weights` and `kv` by their names, so that another process has its own."""
        known = next((name for name in ("weights", "kv") if globals()[name] == self), None)
        return known or (Streamed, (self.name, self.op, self.chosen))


weights = Streamed("weights")
kv = Streamed("kv")


@dataclass(frozen=True)
class Buffer:
    """Width and number format of the rows of a buffer.

    Parameters
    ----------
    width : callable (ModelConfig) -> int
        Elements of a row.
    prefill : callable (ModelConfig) -> int, optional
        Elements of a prefill row, if they differ.
    dtype : str, optional
        Number format, if it is not that of the weights.
    """

    width: Callable[[ModelConfig], int]
    prefill: Callable[[ModelConfig], int] | None = None
    dtype: str | None = None


def _with_biases(model: ModelConfig, each: float, of_bias: float) -> float:
    """Bytes per number of routed experts whose weights take `each`, and whose biases take `of_bias`."""
    weights = model.num_local_experts * model.expert_params
    biases = model.expert_vectors
    return (weights * each + biases * of_bias) / (weights + biases)


def _hidden(model: ModelConfig) -> int:
    return model.hidden_size


def _routing(model: ModelConfig) -> int:
    return 2 * model.num_experts_per_tok


def _nothing(model: ModelConfig) -> int:
    return 0


BUFFERS = {
    "x": Buffer(_hidden),
    "q": Buffer(lambda m: m.absorbed_q_size + m.sent_sizes[0], prefill=lambda m: m.q_size + m.sent_sizes[0]),
    "k": Buffer(lambda m: m.sent_sizes[1]),
    "v": Buffer(lambda m: m.sent_sizes[2]),
    "attn": Buffer(lambda m: m.absorbed_attn_size, prefill=lambda m: m.attn_size),
    "h": Buffer(_hidden),
    "gates": Buffer(_routing, dtype="fp32"),
    "routed": Buffer(_hidden),
    "shared": Buffer(_hidden),
    "late_h": Buffer(_hidden, prefill=_nothing),
    "late_gates": Buffer(_routing, prefill=_nothing, dtype="fp32"),
    "pending": Buffer(_hidden, prefill=_nothing),
}
"""The built-in buffers: the residual stream x, queries, keys, values, attention output, the normed MoE input h, the
routing (expert id and weight per choice), the outputs of routed and shared experts, and `DEFERRED_BUFFERS`. With latent
attention k and v are the contents of the cache: the rotated key and the latent. Queries and outputs of decodes are in
the absorbed form, those of prefills are expanded."""
DEFERRED_BUFFERS = ("late_h", "late_gates", "pending")
"""Buffers of decode rows that deferral keeps from one layer to the next: inputs of the deferred experts, and their
output."""


def buffer_row(
    buffer: str, model: ModelConfig, precision: Precision, rows: RowClass = RowClass.DECODE
) -> tuple[int, str]:
    """Number of elements of one row of a buffer, and their number format."""
    found = BUFFERS.get(buffer, BUFFERS["x"])
    width = found.prefill if rows is RowClass.PREFILL and found.prefill else found.width
    return width(model), found.dtype or precision.weights


def buffer_bytes(buffer: str, model: ModelConfig, precision: Precision, rows: RowClass = RowClass.DECODE) -> int:
    """Bytes of one row of a buffer."""
    width, dtype = buffer_row(buffer, model, precision, rows)
    return width * DTYPE_BYTES[dtype]


def _gemm(params: float, read: float, each: float, moved: float, tokens: float, precision: Precision) -> Work:
    """Work of a matrix product with `params` weights per token, of which `read` of `each` bytes are read.

    `moved` are the elements of activations that are read and written.
    """
    if not (tokens and params):
        return Work(dtype=precision.weights)
    size = DTYPE_BYTES[precision.weights]
    return Work(2.0 * params * tokens, each * read + size * moved, precision.weights)


def _times(share: float, work: Work) -> Work:
    """Work of an operation that only this share of the layers has."""
    return Work(share * work.flops, share * work.bytes, work.dtype)


def _qkv_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    moved = (m.hidden_size + m.absorbed_q_size + m.kv_width) * rows.tokens
    moved += (m.q_size - m.absorbed_q_size) * rows.prefill
    params = m.attention_in_params
    return _gemm(params, params, qkv.bytes_each(m, precision), moved, rows.tokens, precision)


def _prefill_attention_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    """Work of prompt attention. With latent attention, `qkv` and `out_proj` account for expanding keys and values.

    A recurrent layer reads and writes the states of all prompts, and computes token by token.
    """
    if m.recurrence is not None:
        return _recurrent_work(rows.prefill, rows.emits - rows.decode, m.recurrence, precision)
    keys_and_values = m.pair_macs if m.qk_nope_head_dim else m.kv_width
    moved = rows.prefill * (m.pair_macs + keys_and_values) * DTYPE_BYTES[precision.weights]
    moved += rows.before * m.kv_width * DTYPE_BYTES[precision.kv]
    index = 0.0 if m.sparse is None else m.sparse.macs * rows.scored
    return Work(2.0 * (m.pair_macs * rows.pairs + index), moved, precision.weights)


def _recurrent_work(tokens: float, sequences: float, recurrence: Recurrence, precision: Precision) -> Work:
    """Work of a recurrent layer for tokens of so many sequences: every state is read and written once."""
    if not tokens:
        return Work(dtype=precision.weights)
    moved = 2 * sequences * recurrence.state * DTYPE_BYTES["fp32"]
    moved += tokens * (recurrence.taken + recurrence.given) * DTYPE_BYTES[precision.weights]
    return Work(2.0 * recurrence.macs * tokens, moved, precision.weights)


def _decode_attention_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    """Work of the kernels `decode_attention` and `append_kv` together; with latent attention in the absorbed form."""
    if m.recurrence is not None:
        return _recurrent_work(rows.decode, rows.decode, m.recurrence, precision)
    kv_bytes = m.kv_width * DTYPE_BYTES[precision.kv]
    append = rows.tokens * m.kv_elements * (DTYPE_BYTES[precision.kv] + DTYPE_BYTES["fp32"])
    rows_in_out = m.entry_macs * DTYPE_BYTES["fp32"] * rows.decode
    flops = 2.0 * m.entry_macs * rows.context
    read = kv_bytes * rows.context
    if m.sparse is not None:
        flops += 2.0 * m.sparse.macs * rows.scanned
        read += m.sparse.keys * DTYPE_BYTES[precision.kv] * rows.scanned
    return Work(flops, read + rows_in_out + append, "fp32")


def _out_proj_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    moved = (m.absorbed_attn_size + 2 * m.hidden_size) * rows.tokens
    moved += (m.attn_size - m.absorbed_attn_size) * rows.prefill
    params = m.attention_out_params
    return _gemm(params, params, out_proj.bytes_each(m, precision), moved, rows.tokens, precision)


def _route_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    moved = 2 * m.hidden_size * rows.tokens
    work = _gemm(m.router_params, m.router_params, route.bytes_each(m, precision), moved, rows.tokens, precision)
    return _times(m.moe_share, work)


class Chosen(NamedTuple):
    """Expected share of one layer's routing that some of its experts get.

    Attributes
    ----------
    share : float
        Share of all pairs of a token and an expert.
    touched : callable (tokens, experts of each) -> float
        Distinct experts of them that so many tokens are routed to, if so many experts of each token count.
    """

    share: float
    touched: Callable[[float, int], float]


def _experts_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    return _choices_work(rows, m, precision, m.num_experts_per_tok, Chosen(1.0, m.touched_experts))


def _choices_work(rows: Rows, m: ModelConfig, precision: Precision, of_decodes: int, chosen: Chosen) -> Work:
    """Work of routed experts if `of_decodes` are computed per decode token, and all chosen ones per prefill token."""
    every = m.num_experts_per_tok
    pairs = m.computed_share * chosen.share * (every * rows.prefill + of_decodes * rows.decode)
    if of_decodes == every:
        touched = chosen.touched(rows.tokens, every)
    else:
        prefill = chosen.touched(rows.prefill, every)
        decode = chosen.touched(rows.decode, of_decodes)
        touched = prefill + decode - prefill * decode / m.num_local_experts
    moved = 2 * m.hidden_size * (rows.tokens if chosen.share == 1 else min(rows.tokens, pairs))
    read = touched * m.expert_params
    each = experts.bytes_each(m, precision)
    return _times(m.moe_share, _gemm(m.expert_params, read, each, moved, pairs, precision))


def at_once(stage: Stage, chosen: Chosen | None = None) -> WorkFunction | None:
    """Work of a stage when its layer runs, without deferred and skipped experts; None if its op declares no work.

    `chosen` is what a stage of routed experts gets of the routing; by default all of it, uniformly.
    """
    left_out = stage.defer + stage.skip
    if stage.op.plain is not experts or not (left_out or chosen or stage.op.variant_of):
        return stage.op.work
    return _some_experts(stage.op.rows, chosen, lambda each: each - left_out)


def afterwards(stage: Stage, chosen: Chosen | None = None) -> WorkFunction:
    """Work of the experts that a stage defers, which is done once the next layer may begin."""
    return _some_experts(RowClass.DECODE, chosen, lambda each: stage.defer)


def _some_experts(row_class: RowClass, chosen: Chosen | None, of_decodes: Callable[[int], int]) -> WorkFunction:
    """Work of routed experts for the rows of a class, of which decodes have the number that `of_decodes` gives."""
    takes = row_class.classes

    def work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
        prefill = rows.prefill if RowClass.PREFILL in takes else 0
        decode = rows.decode if RowClass.DECODE in takes else 0
        some = chosen or Chosen(1.0, m.touched_experts)
        return _choices_work(Rows(prefill, decode), m, precision, of_decodes(m.num_experts_per_tok), some)

    return work


def _combine_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    size = DTYPE_BYTES[precision.weights]
    return Work(m.hidden_size * rows.tokens, 3 * m.hidden_size * size * rows.tokens, precision.weights)


def _shared_experts_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    """Work of shared experts, and of the dense network in layers without experts; 0 if the model has neither."""
    if not m.unrouted_params:
        return Work(dtype=precision.weights)
    passes = 1.0 if m.shared_params else 1.0 - m.moe_share
    moved = passes * 2 * m.hidden_size * rows.tokens
    params = m.unrouted_params
    return _gemm(params, params, shared_experts.bytes_each(m, precision), moved, rows.tokens, precision)


def _embed_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    return Work(0.0, 2.0 * rows.tokens * m.hidden_size * DTYPE_BYTES[precision.weights], precision.weights)


def head_format(m: ModelConfig, precision: Precision) -> float:
    """Bytes per weight of the head."""
    return (m.format_of("head") if precision.as_stored else None) or DTYPE_BYTES[precision.weights]


def _head_work(rows: Rows, m: ModelConfig, precision: Precision) -> Work:
    """Work of the final norm and the head, only for the rows that sample a token."""
    each = head_format(m, precision)
    moved = (m.hidden_size + m.vocab_size) * rows.emits
    return _gemm(m.head_params, m.head_params, each, moved, rows.emits, precision)


def _qkv_working(m: ModelConfig, size: int) -> float:
    """Bytes per row of `qkv`: normed heads and the projections that they were made of exist until all are rotated."""
    q = m.q_size
    kv = m.kv_size
    needed = max((8 + size) * m.hidden_size, size * (3 * q + m.kv_width))
    if not m.family.qk_norm:
        return needed
    return max(needed + size * (q + kv), (8 + 2 * size) * q, (8 + 2 * size) * kv + size * q)


def _prefill_attention_working(m: ModelConfig, size: int) -> float:
    """Bytes per row of `prefill_attention`: with latent attention, the expanded keys and values too."""
    return size * (m.attn_size + (m.pair_macs if m.qk_nope_head_dim else 0)) + 4 * m.num_attention_heads


def _out_proj_working(m: ModelConfig, size: int) -> float:
    """Bytes per row of `out_proj`: with latent attention, the expanded outputs of decodes too."""
    return size * (m.hidden_size + (m.attn_size if m.kv_lora_rank else 0))


def _experts_working(m: ModelConfig, size: int) -> float:
    """Bytes per row of `experts`: a fused kernel holds gate, up, their product, and the row in and out, per choice.

    A loop over the experts needs as much if all rows choose the same two.
    """
    return size * max(2, m.num_experts_per_tok) * (3 * m.expert_width + 2 * m.hidden_size)


def _shared_experts_working(m: ModelConfig, size: int) -> float:
    if m.counted is not None:
        return size * m.counted.unrouted / m.hidden_size
    return 3 * size * max(m.shared_expert_intermediate_size, m.intermediate_size if m.dense_layers else 0)


def _router_elements(m: ModelConfig) -> float:
    """Elements of one MoE layer's router in the precision of the others."""
    return m.router_params + m.router_vectors + m.choice_vectors - m.kept_router_params


embed = Op("embed", (), ("x",), work=_embed_work)
"""The implicit first stage, on the GPU: one row of the embedding per token."""
qkv = Op(
    "qkv",
    ("x",),
    ("q", "k", "v"),
    work=_qkv_work,
    params=lambda m: m.attention_in_params + m.attention_vectors + m.norm_size,
    working=_qkv_working,
)
prefill_attention = Op(
    "prefill_attention",
    ("q", "k", "v"),
    ("attn",),
    rows=RowClass.PREFILL,
    work=_prefill_attention_work,
    working=_prefill_attention_working,
    reads_past=True,
)
decode_attention = Op(
    "decode_attention",
    ("q", "k", "v"),
    ("attn",),
    rows=RowClass.DECODE,
    work=_decode_attention_work,
    keeps_kv=True,
    working=lambda m, size: 4 * (m.entry_macs + m.kv_width),
)
attention = (prefill_attention, decode_attention)
out_proj = Op(
    "out_proj",
    ("attn", "x"),
    ("x",),
    work=_out_proj_work,
    params=lambda m: m.attention_out_params + m.out_vectors,
    working=_out_proj_working,
    in_parts=True,
)
route = Op(
    "route",
    ("x",),
    ("h", "gates"),
    work=_route_work,
    params=lambda m: m.norm_size + m.moe_share * _router_elements(m),
    kept=lambda m: m.moe_share * m.kept_router_params,
    working=lambda m, size: (8 + size) * m.hidden_size,
)
experts = Op(
    "experts",
    ("h", "gates"),
    ("routed",),
    work=_experts_work,
    params=lambda m: m.moe_share * (m.num_local_experts * m.expert_params + m.expert_vectors),
    routed=True,
    working=_experts_working,
    in_parts=True,
    present=lambda m, kind: not kind.dense,
)
shared_experts = Op(
    "shared_experts",
    ("h",),
    ("shared",),
    work=_shared_experts_work,
    params=lambda m: m.unrouted_params,
    working=_shared_experts_working,
    in_parts=True,
    present=lambda m, kind: kind.dense or m.shared_params > 0,
)
combine = Op("combine", ("x", "routed"), ("x",), work=_combine_work)
moe = (route, experts, combine)
add_shared = replace(shared_experts, reads=("h", "routed"), writes=("routed",), variant_of=shared_experts)
"""`shared_experts` if their output is not on the device of `combine`: they add it to that of the routed experts, before
this is moved."""


@cache
def combine_of(*buffers: str) -> Op:
    """`combine` for the output of several sets of experts, and of shared ones that are on its device."""
    return replace(combine, reads=("x", *buffers), variant_of=combine)


head = Op(
    "head",
    ("x",),
    ("logits",),
    work=_head_work,
    working=lambda m, size: (4 + size) * m.vocab_size + (8 + 2 * size) * m.hidden_size,
)
"""The implicit last stage, on the GPU; it holds its logits in fp32 and in the weights' precision at once."""
BUILT_IN = {op.name: op for op in (qkv, *attention, out_proj, *moe, shared_experts)}
"""The operations that a pipeline places, by name."""


def _variant(subset: ExpertSet | None, rows: RowClass) -> Op:
    """The routed experts of a set, for the rows of a class."""
    op = experts if subset is None else experts[subset]
    return op if rows is RowClass.ALL else op._of_class(rows)


OpTree = Op | tuple["OpTree", ...]


def flatten(ops: tuple[OpTree, ...]) -> Iterator[Op]:
    """The operations of nested tuples, in order."""
    for op in ops:
        if isinstance(op, tuple):
            yield from flatten(op)
        else:
            yield op
