"""The operation that each tensor of a GGUF file belongs to, and the bytes of every operation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.core.errors import CheckpointError
from workbench.models.gguf.header import Header, Tensor

_LAYER = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<name>.+)")
_NAME = re.compile(r"(?P<name>\w+?)(?P<expert>\.\d{1,6})?(?:\.(?P<kind>weight|bias|scale))?")
"""Names of tensors within a layer; in files of early 2024 each expert has tensors of its own, with its number."""
_BY_OPERATION = {
    "qkv": (
        *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_q_norm", "attn_k_norm"),
        *("attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b"),
    ),
    "out_proj": ("attn_output", "attn_v_b"),
    "route": ("ffn_norm", "post_attention_norm", "attn_output_norm", "ffn_gate_inp", "exp_probs_b"),
    "experts": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"),
    "shared_experts": (
        *("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_inp_shexp"),
        *("ffn_gate", "ffn_up", "ffn_down"),
    ),
}
"""Tensors of a layer; a norm belongs to the operation that it stands before."""
_OPERATION = {tensor: operation for operation, tensors in _BY_OPERATION.items() for tensor in tensors}
_EMBEDDING = "token_embd.weight"
_OUTSIDE = {_EMBEDDING: "embed", "output.weight": "head"}
_UNCOUNTED = ("attn_sinks", "attn_rot_embd")
_UNCOUNTED_OUTSIDE = (
    *("output_norm.weight", "output_norm.bias", "output.bias"),
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
)
"""Tensors that no operation is charged for: the last norm, biases of the head, sinks, and tables of RoPE."""


class Stored(NamedTuple):
    """Weights of one operation in a file.

    Attributes
    ----------
    bytes : int
        Size of all its tensors.
    weights : int
        Elements of its matrices, without norms and biases.
    """

    bytes: int = 0
    weights: int = 0

    def plus(self, other: Stored) -> Stored:
        """The sum."""
        return Stored(self.bytes + other.bytes, self.weights + other.weights)


@dataclass(frozen=True)
class Contents:
    """All tensors of a file by the operation that reads them.

    Attributes
    ----------
    layers : sequence of mappings of str to Stored
        Of every layer, its operations' weights.
    embed, head : Stored
        Of the embedding and of the head; both are the same tensor where the two are tied.
    uncounted : mapping of str to int
        Bytes of the tensors that belong to no operation, by their names.
    """

    layers: Sequence[Mapping[str, Stored]]
    embed: Stored
    head: Stored
    uncounted: Mapping[str, int]


def contents_of(header: Header, layers: int, keys_and_values: tuple[int, int]) -> Contents:
    """The tensors of a file, of whose layers the first `layers` belong to the model.

    Parameters
    ----------
    keys_and_values : tuple of (int, int)
        Dims of a head's latent key and value, whose expansions an ``attn_kv_b`` holds together.

    Raises
    ------
    CheckpointError
        If a tensor is unknown, or the embedding is missing.
    """
    found: list[dict[str, Stored]] = [{} for _ in range(layers)]
    outside: dict[str, Stored] = {}
    uncounted: dict[str, int] = {}
    for tensor in header.tensors.values():
        match = _LAYER.fullmatch(tensor.name)
        layer = int(match["layer"]) if match else None
        parts = _of_layer(tensor, match["name"], keys_and_values) if match else _of_none(tensor)
        if parts is None and (layer is None or layer < layers):
            raise CheckpointError(
                f"{header.name!r} has the tensor {tensor.name}, which is not understood; use a model without."
            )
        if not parts or (layer is not None and layer >= layers):
            uncounted[tensor.name] = tensor.bytes
        else:
            _add(outside if layer is None else found[layer], parts)
    if "embed" not in outside:
        raise CheckpointError(f"{header.name!r} has no tensor {_EMBEDDING}; give the file of a whole model.")
    return Contents(found, outside["embed"], outside.get("head", outside["embed"]), uncounted)


Parts = list[tuple[str, Stored]]
"""Operations that read a tensor, with what each reads; none for a tensor that no operation is charged for."""


def _of_none(tensor: Tensor) -> Parts | None:
    """The parts of a tensor outside of the layers; None for an unknown one."""
    if tensor.name in _UNCOUNTED_OUTSIDE:
        return []
    operation = _OUTSIDE.get(tensor.name)
    return [(operation, Stored(tensor.bytes, tensor.weights))] if operation else None


def _of_layer(tensor: Tensor, name: str, keys_and_values: tuple[int, int]) -> Parts | None:
    """The parts of a layer's tensor by its name within the layer; None for an unknown one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    base = f"{match['name']}_exps" if match["expert"] else match["name"]
    if base in _UNCOUNTED:
        return []
    if base == "attn_kv_b":
        return _halves(tensor, keys_and_values)
    if base not in _OPERATION:
        return None
    is_matrix = match["kind"] == "weight" and not base.endswith("_norm")
    return [(_OPERATION[base], Stored(tensor.bytes, tensor.weights if is_matrix else 0))]


def _halves(tensor: Tensor, keys_and_values: tuple[int, int]) -> Parts:
    """The rows of a joint expansion that belong to keys, and those that belong to values."""
    both = sum(keys_and_values)
    operations = ("qkv", "out_proj")
    return [
        (operation, Stored(tensor.bytes * dims // both, tensor.weights * dims // both))
        for operation, dims in zip(operations, keys_and_values, strict=True)
    ]


def _add(layer: dict[str, Stored], parts: Iterable[tuple[str, Stored]]) -> None:
    for operation, stored in parts:
        layer[operation] = layer.get(operation, Stored()).plus(stored)
