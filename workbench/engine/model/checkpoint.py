"""Opens Hugging Face checkpoints, in safetensors only, and checks every tensor before any work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from reprlib import repr as short

import torch
from safetensors import SafetensorError, safe_open

from workbench.core.errors import CheckpointError
from workbench.core.records import is_file, read_json, reason
from workbench.models import ModelConfig
from workbench.stages import Op

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def expected_tensors(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a model's checkpoint."""
    hidden = model.hidden_size
    yield "model.embed_tokens.weight", (model.vocab_size, hidden)
    for layer in range(model.num_hidden_layers):
        yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in _of_layer(model))
    yield "model.norm.weight", (hidden,)
    if not model.tie_word_embeddings:
        yield "lm_head.weight", (model.vocab_size, hidden)


def _of_layer(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    family = model.family
    tensors = family.tensors
    hidden = model.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    widths = {"q": model.q_size, "k": model.kv_size, "v": model.kv_size}
    for letter, width in widths.items():
        yield f"self_attn.{letter}_proj.weight", (width, hidden)
    if family.qkv_bias:
        yield from ((f"self_attn.{letter}_proj.bias", (width,)) for letter, width in widths.items())
    if family.qk_norm:
        for letter, size in zip("qk", model.head_norm_sizes, strict=True):
            yield f"self_attn.{letter}_norm.weight", (size,)
    yield "self_attn.o_proj.weight", (hidden, model.q_size)
    yield f"{tensors.mixture}.gate.weight", (model.num_local_experts, hidden)
    for expert in range(model.num_local_experts):
        yield from _of_expert(model, tensors.expert(expert), model.expert_width)
    if model.shared_params:
        yield from _of_expert(model, tensors.shared_expert, model.shared_expert_intermediate_size)
        yield f"{tensors.shared_expert}_gate.weight", (1, hidden)


def _of_expert(model: ModelConfig, name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    tensors = model.family.tensors
    hidden = model.hidden_size
    yield f"{name}.{tensors.gate}.weight", (width, hidden)
    yield f"{name}.{tensors.down}.weight", (hidden, width)
    yield f"{name}.{tensors.up}.weight", (width, hidden)


def tensors_of(ops: Iterable[Op], model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of users' operations in a model's checkpoint."""
    layers = range(model.num_hidden_layers)
    shapes = [(name, shape) for op in ops for name, shape in op.shapes(model).items()]
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes}


def open_checkpoint(model: ModelConfig, ops: Iterable[Op] = ()) -> dict[str, torch.Tensor]:
    """Read every tensor of the model and of users' operations, by name, into memory of its own.

    No file stays mapped: if one is cut or rewritten later, this process goes on with the same answer.

    Raises
    ------
    CheckpointError
        If a file is truncated or damaged, or a tensor is missing or has another shape or type than its config or an
        operation says.
    """
    if model.path is None:
        raise CheckpointError(f"model {model.name!r} has no weights here; give wb.checkpoint(folder).")
    tensors: dict[str, torch.Tensor] = {}
    added = tensors_of(ops, model)
    expected = dict(expected_tensors(model)) | added
    for file in _files(model.path):
        tensors.update(_read(file, expected.keys()))
    wanted = TORCH_DTYPES[model.dtype]
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"checkpoint {model.name!r} has no tensor {name}; fetch its files again.")
        if tuple(tensor.shape) != shape or tensor.dtype is not wanted:
            raise CheckpointError(
                f"tensor {name} of {model.name!r} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"{'an operation' if name in added else 'its config.json'} asks for {shape} {wanted}; the two do not "
                "belong together."
            )
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not is_file(index):
        return sorted(folder.glob("*.safetensors"))
    try:
        raw = read_json(index)
    except ValueError as error:
        raise CheckpointError(f"{error}; fetch it again.") from error
    found = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch it again.")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name or not is_file(folder / name):
            raise CheckpointError(
                f"{index.name} of {folder.name!r} names the file {short(name)}, not there; fetch it again."
            )
    return [folder / name for name in sorted(set(found.values()))]


def _read(file: Path, expected: Set[str]) -> dict[str, torch.Tensor]:
    if not is_file(file):  # opening a pipe would wait for a writer
        raise CheckpointError(f"{file} is no file, so it holds no weights; fetch it again.")
    try:
        with safe_open(file, framework="pt") as opened:
            kept = expected & set(opened.keys())
            return {name: opened.get_tensor(name).clone() for name in kept}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({reason(error)}); fetch it again.") from error
