"""Opens Hugging Face checkpoints, in safetensors only, and checks every tensor before any work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from workbench.core.errors import CheckpointError
from workbench.core.records import is_file, read_json, reason
from workbench.models import ModelConfig
from workbench.stages import Op

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STORED_DTYPES = TORCH_DTYPES | {"fp16": torch.float16}
"""Types in which a checkpoint may hold its tensors; those in fp16 are converted when they are loaded."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Types by their names in safetensors."""


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


class Checkpoint:
    """The tensors of a model and of users' operations, checked before any is read; a context manager.

    Each is read into memory of its own. Files are mapped until the end of the context, and not longer: if one is cut or
    rewritten later, this process goes on with the same answer.

    Raises
    ------
    CheckpointError
        If a file is truncated or damaged, or a tensor is missing or has another shape or type than its config or an
        operation says.
    """

    def __init__(self, model: ModelConfig, ops: Iterable[Op] = ()) -> None:
        if model.path is None:
            raise CheckpointError(f"model {model.name!r} has no weights here; give wb.checkpoint(folder).")
        added = tensors_of(ops, model)
        expected = dict(expected_tensors(model)) | added
        self.folder = model.path
        self.files = tuple(_files(model.path))
        self.names = tuple(expected)
        self._file_of: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        with ExitStack() as closing:
            for path in self.files:
                opened = closing.enter_context(_open(path))
                self._opened[path] = opened
                self._file_of.update(dict.fromkeys(opened.keys(), path))
            for name, shape in expected.items():
                asking = "an operation" if name in added else "its config.json"
                self._check(model, name, shape, asking)
            self._closing = closing.pop_all()

    def _check(self, model: ModelConfig, name: str, shape: tuple[int, ...], asking: str) -> None:
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(f"checkpoint {model.name!r} has no tensor {name}; fetch its files again.")
        wanted = STORED_DTYPES[model.dtype]
        with _told(path):
            there = self._opened[path].get_slice(name)
            found = tuple(there.get_shape())
            dtype = there.get_dtype()
        if found != shape or _DTYPES.get(dtype) is not wanted:
            raise CheckpointError(
                f"tensor {name} of {model.name!r} is {found} {_DTYPES.get(dtype, dtype)}, {asking} asks for {shape} "
                f"{wanted}; the two do not belong together."
            )

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own."""
        path = self._file_of[name]
        with _told(path):
            tensor: torch.Tensor = self._opened[path].get_tensor(name)
            return tensor.clone()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.clear()
        self._closing.close()


def open_checkpoint(model: ModelConfig, ops: Iterable[Op] = ()) -> dict[str, torch.Tensor]:
    """Read every tensor of a `Checkpoint`, by name."""
    with Checkpoint(model, ops) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


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


def _open(file: Path) -> Any:
    """Open a file of tensors; a context manager."""
    if not is_file(file):  # opening a pipe would wait for a writer
        raise CheckpointError(f"{file} is no file, so it holds no weights; fetch it again.")
    with _told(file):
        return safe_open(file, framework="pt")


@contextmanager
def _told(file: Path) -> Iterator[None]:
    """Name the file in errors of reading it."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({reason(error)}); fetch it again.") from error
