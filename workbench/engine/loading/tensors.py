"""The tensors that each operation takes, and where a checkpoint holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from workbench.models import ModelConfig
from workbench.models.family import Norm, Stacked
from workbench.stages import Op, add_shared, experts, out_proj, qkv, route, shared_experts

Tensors = dict[str, torch.Tensor]
"""Tensors by the name of a buffer or a weight."""


class Source(NamedTuple):
    """A tensor, or a part of one, as a checkpoint holds it.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Shape of the checkpoint's tensor.
    part : int or (int, int), optional
        The part along the first dimension that is meant: one entry, or those from the first number to the second.
    transposed : bool
        True if rows and columns of the part are exchanged.
    kept : bool
        True if it stays in fp32 whatever the precision, and may be in fp32 in the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    part: int | tuple[int, int] | None = None
    transposed: bool = False
    kept: bool = False

    @property
    def taken(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = self.shape
        if isinstance(self.part, int):
            shape = shape[1:]
        elif self.part is not None:
            shape = (self.part[1] - self.part[0], *shape[1:])
        return shape[::-1] if self.transposed else shape

    @property
    def begin(self) -> int:
        """Elements of the checkpoint's tensor before the part."""
        first = self.part[0] if isinstance(self.part, tuple) else self.part or 0
        return first * math.prod(self.shape[1:])

    @property
    def whole(self) -> Source:
        """The tensor as the checkpoint has it."""
        return Source(self.name, self.shape)


@dataclass(frozen=True)
class Operand:
    """One tensor that an operation takes: parts of a checkpoint's tensors, one behind the other.

    Attributes
    ----------
    key : str
    sources : tuple of Source
        Joined along their first dimension.
    matrices : int, optional
        Number of matrices of equal shape that they make, along a new first dimension; without it, one.
    """

    key: str
    sources: tuple[Source, ...]
    matrices: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in which the operation takes it."""
        rows = sum(source.taken[0] for source in self.sources)
        row = self.sources[0].taken[1:]
        return (rows, *row) if self.matrices is None else (self.matrices, rows // self.matrices, *row)

    def of_matrix(self, number: int) -> tuple[Source, ...]:
        """The sources of one of several matrices."""
        each = len(self.sources) // (self.matrices or 1)
        return self.sources[each * number : each * (number + 1)]


def operands(op: Op, model: ModelConfig, layer: int) -> list[Operand]:
    """The tensors of an operation in one layer; of a set of experts, of these alone in ascending order."""
    if op.subset is not None:
        members = op.subset.of(layer, model.num_local_experts)
        return [_of_members(operand, members) for operand in _experts(model, layer)]
    if op in _OPERANDS:
        return _OPERANDS[op](model, layer)
    return [Operand(name, (Source(_name(model, layer, name), shape),)) for name, shape in op.shapes(model).items()]


def _of_members(operand: Operand, members: Sequence[int]) -> Operand:
    """The part of a tensor of all experts that belongs to some of them."""
    if operand.matrices is None:
        (bias,) = operand.sources
        return Operand(operand.key, tuple(bias._replace(part=(expert, expert + 1)) for expert in members))
    chosen = tuple(source for expert in members for source in operand.of_matrix(expert))
    return Operand(operand.key, chosen, len(members))


def sources(op: Op, model: ModelConfig, layer: int) -> list[Source]:
    """The tensors that an operation takes of a checkpoint in one layer."""
    return [source for operand in operands(op, model, layer) for source in operand.sources]


def tables(model: ModelConfig) -> dict[str, Source]:
    """Tensors that belong to no stage: embedding, final norm, head, and the scores of sinks layer by layer."""
    names = model.family.tensors
    vocabulary = (model.vocab_size, model.hidden_size)
    found = {"embedding": Source(f"{names.embedding}.weight", vocabulary)}
    found |= {f"norm {operand.key}": operand.sources[0] for operand in _norm(model, names.final_norm)}
    if not model.tie_word_embeddings:
        found["head"] = Source("lm_head.weight", vocabulary)
    if model.lm_head_bias:
        found["head bias"] = Source("lm_head.bias", vocabulary[:1])
    if model.family.sinks:
        for layer in range(model.num_hidden_layers):
            name = _name(model, layer, f"{names.attention}.sinks")
            found[f"sinks {layer}"] = Source(name, (model.num_attention_heads,), kept=True)
    return found


def every_source(model: ModelConfig) -> Iterator[Source]:
    """The tensors that the built-in operations take of a model's checkpoint."""
    yield from tables(model).values()
    for layer, kind in enumerate(model.layer_kinds):
        for op in (qkv, out_proj, route, experts, shared_experts):
            if op.is_in(model, kind):
                yield from sources(op, model, layer)


def _name(model: ModelConfig, layer: int, name: str) -> str:
    return f"{model.family.tensors.layers}.{layer}.{name}"


def _norm(model: ModelConfig, name: str) -> list[Operand]:
    found = [Operand("norm", (Source(f"{name}.weight", (model.hidden_size,)),))]
    if model.family.norm is Norm.LAYER_BIAS:
        found.append(Operand("norm_bias", (Source(f"{name}.bias", (model.hidden_size,)),)))
    return found


def _qkv(model: ModelConfig, layer: int) -> list[Operand]:
    names = model.family.tensors
    hidden = model.hidden_size
    begin = _name(model, layer, names.attention)
    if model.kv_lora_rank:
        return [*_norm(model, _name(model, layer, names.attention_norm)), *_latent(model, begin)]
    widths = {"q": model.q_size, "k": model.kv_size, "v": model.kv_size}
    proj = tuple(Source(f"{begin}.{each}_proj.weight", (width, hidden)) for each, width in widths.items())
    if names.qkv is not None:
        proj = (Source(f"{begin}.{names.qkv}.weight", (sum(widths.values()), hidden)),)
    found = [*_norm(model, _name(model, layer, names.attention_norm)), Operand("proj", proj)]
    if model.has_qkv_bias:
        bias = tuple(Source(f"{begin}.{each}_proj.bias", (width,)) for each, width in widths.items())
        found.append(Operand("bias", bias))
    for each, size in zip("qk", model.head_norm_sizes, strict=True):
        if size:
            found.append(Operand(f"{each}_norm", (Source(f"{begin}.{each}_norm.weight", (size,)),)))
    return found


def _latent(model: ModelConfig, begin: str) -> list[Operand]:
    """The projections of latent attention to queries, the latent and the rotated key, and the expansion of keys."""
    hidden = model.hidden_size
    rank = model.q_lora_rank
    latent = model.kv_lora_rank or 0
    found = []
    if rank:
        found.append(Operand("q_a", (Source(f"{begin}.q_a_proj.weight", (rank, hidden)),)))
        found.append(Operand("q_a_norm", (Source(f"{begin}.q_a_layernorm.weight", (rank,)),)))
    name = "q_b_proj" if rank else "q_proj"
    found.append(Operand("q_b", (Source(f"{begin}.{name}.weight", (model.q_size, rank or hidden)),)))
    kv_a = Source(f"{begin}.kv_a_proj_with_mqa.weight", (model.latent_size, hidden))
    found.append(Operand("kv_a", (kv_a,)))
    found.append(Operand("kv_a_norm", (Source(f"{begin}.kv_a_layernorm.weight", (latent,)),)))
    return [*found, _expansion(model, begin, "up_k", 0, model.qk_nope_head_dim or 0)]


def _expansion(model: ModelConfig, begin: str, key: str, first: int, rows: int) -> Operand:
    """One matrix per head from the latent to keys or values: `rows` rows of the head's, from the `first` on."""
    heads = model.num_attention_heads
    each = (model.qk_nope_head_dim or 0) + (model.v_head_dim or 0)
    shape = (heads * each, model.kv_lora_rank or 0)
    starts = [head * each + first for head in range(heads)]
    parts = tuple(Source(f"{begin}.kv_b_proj.weight", shape, (start, start + rows)) for start in starts)
    return Operand(key, parts, heads)


def _out_proj(model: ModelConfig, layer: int) -> list[Operand]:
    names = model.family.tensors
    name = _name(model, layer, f"{names.attention}.{names.out}")
    found = [Operand("proj", (Source(f"{name}.weight", (model.hidden_size, model.attn_size)),))]
    if model.kv_lora_rank:
        begin = _name(model, layer, names.attention)
        found.append(_expansion(model, begin, "up_v", model.qk_nope_head_dim or 0, model.v_head_dim or 0))
    if model.out_vectors:
        found.append(Operand("bias", (Source(f"{name}.bias", (model.hidden_size,)),)))
    return found


def _route(model: ModelConfig, layer: int) -> list[Operand]:
    names = model.family.tensors
    count = model.num_local_experts
    found = _norm(model, _name(model, layer, names.mixture_norm))
    if model.layer_kinds[layer].dense:
        return found
    begin = _name(model, layer, names.mixture)
    matrix = Source(f"{begin}.{names.router}.weight", (count, model.hidden_size), kept=model.family.kept_router)
    found.append(Operand("gate", (matrix,)))
    if model.router_vectors:
        found.append(Operand("gate_bias", (Source(f"{begin}.{names.router}.bias", (count,)),)))
    if model.choice_vectors:
        found.append(Operand("choice_bias", (_choice_bias(model, begin),)))
    return found


def _choice_bias(model: ModelConfig, begin: str) -> Source:
    """The bias of the scores for the choice."""
    names = model.family.tensors
    count = model.num_local_experts
    name = f"{begin}.{names.choice_bias}"
    if names.choice_bias_in_row:
        return Source(name, (1, count), part=0, kept=True)
    return Source(name, (count,), kept=True)


def _experts(model: ModelConfig, layer: int) -> list[Operand]:
    """Gates and ups, expert by expert, and the down projections; then the biases of both, if there are any."""
    names = model.family.tensors
    count = model.num_local_experts
    width = model.expert_width
    hidden = model.hidden_size
    if not names.gate_up:
        each = [_name(model, layer, names.expert(number)) for number in range(count)]
        return _feed_forward(model, each, width, count)
    begin = _name(model, layer, names.mixture)
    rows = 2 * width // len(names.gate_up)
    both = [_one(stack, begin, number, count, (rows, hidden)) for number in range(count) for stack in names.gate_up]
    down = [_one(stack, begin, number, count, (hidden, width)) for number in range(count) for stack in names.down_stack]
    found = [Operand("gate_up", tuple(both), count), Operand("down", tuple(down), count)]
    for key, stacks, size in (("gate_up", names.gate_up, 2 * width), ("down", names.down_stack, hidden)):
        biases = tuple(Source(f"{begin}.{stack.bias}", (count, size)) for stack in stacks if stack.bias)
        if biases:
            found.append(Operand(f"{key}_bias", biases))
    return found


def _one(stack: Stacked, begin: str, number: int, count: int, matrix: tuple[int, int]) -> Source:
    """One expert's matrix of a tensor that holds all of them."""
    rows, columns = matrix[::-1] if stack.transposed else matrix
    name = f"{begin}.{stack.name}"
    if stack.flat:
        return Source(name, (count * rows, columns), (number * rows, (number + 1) * rows), stack.transposed)
    return Source(name, (count, rows, columns), number, stack.transposed)


def _feed_forward(model: ModelConfig, each: list[str], width: int, matrices: int | None = None) -> list[Operand]:
    """Gates and ups, network by network, and the down projections."""
    names = model.family.tensors
    hidden = model.hidden_size
    both = [Source(f"{name}.{part}.weight", (width, hidden)) for name in each for part in (names.gate, names.up)]
    down = [Source(f"{name}.{names.down}.weight", (hidden, width)) for name in each]
    return [Operand("gate_up", tuple(both), matrices), Operand("down", tuple(down), matrices)]


def _shared_experts(model: ModelConfig, layer: int) -> list[Operand]:
    """The shared experts, or the dense network of a layer without experts."""
    names = model.family.tensors
    if model.layer_kinds[layer].dense:
        return _feed_forward(model, [_name(model, layer, names.mixture)], model.intermediate_size)
    name = _name(model, layer, names.shared_expert)
    found = _feed_forward(model, [name], model.shared_expert_intermediate_size)
    if model.family.shared_gate:
        found.append(Operand("gate", (Source(f"{name}_gate.weight", (1, model.hidden_size)),)))
    return found


_OPERANDS: dict[Op, Callable[[ModelConfig, int], list[Operand]]] = {
    qkv: _qkv,
    out_proj: _out_proj,
    route: _route,
    experts: _experts,
    shared_experts: _shared_experts,
    add_shared: _shared_experts,
}
