"""Opens a Hugging Face checkpoint: safetensors, memory-mapped, every tensor checked before any work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from workbench.errors import CheckpointError
from workbench.models import ModelConfig

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
    family, hidden = model.family, model.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    widths = {"q": model.q_size, "k": model.kv_size, "v": model.kv_size}
    for letter, width in widths.items():
        yield f"self_attn.{letter}_proj.weight", (width, hidden)
    if family.qkv_bias:
        yield from ((f"self_attn.{letter}_proj.bias", (width,)) for letter, width in widths.items())
    if family.qk_norm:
        yield from ((f"self_attn.{letter}_norm.weight", (model.head_dim,)) for letter in "qk")
    yield "self_attn.o_proj.weight", (hidden, model.q_size)
    yield f"{family.mixture}.gate.weight", (model.num_local_experts, hidden)
    for expert in range(model.num_local_experts):
        yield from _of_expert(model, family.expert(expert), model.expert_width)
    if model.shared_params:
        yield from _of_expert(model, family.shared_expert, model.shared_expert_intermediate_size)
        yield f"{family.shared_expert}_gate.weight", (1, hidden)


def _of_expert(model: ModelConfig, name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    family, hidden = model.family, model.hidden_size
    shapes = {family.gate: (width, hidden), family.down: (hidden, width), family.up: (width, hidden)}
    yield from ((f"{name}.{projection}.weight", shape) for projection, shape in shapes.items())


def open_checkpoint(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the model by name, mapped from its files without reading them.

    Raises
    ------
    CheckpointError
        If a file is truncated or damaged, or a tensor is missing, misshapen or of another type than its config says.
    """
    if model.path is None:
        raise CheckpointError(f"model {model.name!r} has no weights here; give wb.checkpoint(folder).")
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(model.path):
        tensors.update(_map(file))
    wanted = TORCH_DTYPES[model.dtype]
    for name, shape in expected_tensors(model):
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"checkpoint {model.name!r} has no tensor {name}; fetch its files again.")
        if tuple(tensor.shape) != shape or tensor.dtype is not wanted:
            raise CheckpointError(
                f"tensor {name} of {model.name!r} is {tuple(tensor.shape)} {tensor.dtype}, its config.json asks for "
                f"{shape} {wanted}; the two do not belong together."
            )
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{index} is no valid JSON ({error}); fetch it again.") from error
    found = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch it again.")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(
                f"{index.name} of {folder.name!r} names the file {name!r}, not there; fetch it again."
            )
    return [folder / name for name in sorted(set(found.values()))]


def _map(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({error}); fetch it again.") from error
