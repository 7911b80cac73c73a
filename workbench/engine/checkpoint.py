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
    """Name and shape of every tensor of a Mixtral checkpoint."""
    hidden, inner = model.hidden_size, model.intermediate_size
    yield "model.embed_tokens.weight", (model.vocab_size, hidden)
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (model.q_size, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (model.kv_size, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (model.kv_size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, model.q_size)
        yield f"{prefix}.block_sparse_moe.gate.weight", (model.num_local_experts, hidden)
        for expert in range(model.num_local_experts):
            part = f"{prefix}.block_sparse_moe.experts.{expert}"
            yield f"{part}.w1.weight", (inner, hidden)
            yield f"{part}.w2.weight", (hidden, inner)
            yield f"{part}.w3.weight", (inner, hidden)
    yield "model.norm.weight", (hidden,)
    if not model.tie_word_embeddings:
        yield "lm_head.weight", (model.vocab_size, hidden)


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
