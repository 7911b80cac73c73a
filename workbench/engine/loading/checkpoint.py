"""Opens Hugging Face checkpoints, in safetensors only, and checks every tensor before any work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from reprlib import repr as short
from typing import Self

import torch

from workbench.core.errors import CheckpointError
from workbench.core.records import is_file, read_json
from workbench.core.units import STORED_INT4
from workbench.engine.loading.int4 import Int4Matrices
from workbench.engine.loading.tensor_files import TensorFile
from workbench.engine.loading.tensors import Source, every_source, sources
from workbench.kernels import fp8_weights, mxfp4_weights
from workbench.models import ModelConfig
from workbench.models.formats import int4_layout_of
from workbench.stages import Op

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STORED_DTYPES = TORCH_DTYPES | {"fp16": torch.float16}
"""Types in which a checkpoint may hold its tensors; those in fp16 are converted when they are loaded."""
FP8_BLOCK = 128
"""Rows and columns of FP8 weights that share a factor."""


class Checkpoint:
    """The tensors of a model and of users' operations, checked before any is read; a context manager.

    Each is read into memory of its own; several threads may read at once. Files are open until the end of the context,
    and not longer: if one is cut or rewritten later, this process goes on with the same answer.

    Parameters
    ----------
    model : ModelConfig
    wanted : iterable of (layer, Op)
        Operations of layers, which may have tensors in the checkpoint beside the model's own.
    check : callable, optional
        Called between pieces of a long read; it may raise.

    Raises
    ------
    CheckpointError
        If a file is truncated or damaged, or a tensor is missing or has another shape or type than its config or an
        operation says.
    """

    def __init__(
        self, model: ModelConfig, wanted: Iterable[tuple[int, Op]] = (), check: Callable[[], object] = lambda: None
    ) -> None:
        if model.path is None:
            raise CheckpointError(f"model {model.name!r} has no weights here; give wb.checkpoint(folder).")
        added = [source for layer, op in wanted for source in _added(op, model, layer)]
        self.sources = (*every_source(model), *added)
        theirs = {source.name for source in added}
        self.folder = model.path
        self._file_of: dict[str, TensorFile] = {}
        self._converted = threading.local()
        with ExitStack() as closing:
            self.files = [closing.enter_context(TensorFile(path, check)) for path in _files(model.path)]
            for file in self.files:
                self._file_of.update(dict.fromkeys(file.names, file))
            self._int4 = self._in_int4(model)
            for source in {source.name: source for source in self.sources}.values():
                self._check(model, source, "an operation" if source.name in theirs else "its config.json")
            self._check_zeros()
            self._closing = closing.pop_all()

    def _in_int4(self, model: ModelConfig) -> Int4Matrices | None:
        """The matrices in INT4 by GPTQ and AWQ, if there are any."""
        layout = int4_layout_of(self.folder) if any(name.endswith(".qweight") for name in self._file_of) else None
        if layout is None:
            return None
        if model.expert_dtype in STORED_INT4 and model.expert_dtype != layout.name:
            raise CheckpointError(
                f"model {model.name!r} has experts in {model.expert_dtype}, the config.json in {self.folder.name!r} "
                f"says {layout.name}; read it again by wb.checkpoint."
            )
        entries = {name: file[name] for name, file in self._file_of.items()}
        return Int4Matrices(layout, entries, lambda name: self._slice(name, None), model.name)

    def _check_zeros(self) -> None:
        """Check the zero points of one matrix in INT4: the settings of all are the same."""
        if self._int4 is not None:
            one = next((source.name for source in self.sources if source.name in self._int4), None)
            if one is not None:
                self._int4.check_zeros(one)

    def _check(self, model: ModelConfig, source: Source, asking: str) -> None:
        name = source.name
        if self._int4 is not None and name in self._int4:
            self._int4.check(source)
            return
        if _fp4(name, "blocks") in self._file_of:
            self._check_fp4(model, source)
            return
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"checkpoint {model.name!r} has no tensor {name}; fetch its files again.")
        wanted = [STORED_DTYPES[model.dtype], *([torch.float32] if source.kept else [])]
        if self._int4 is not None:  # what is not quantised is in fp16 more often than its config.json says
            wanted += [torch.float16, torch.bfloat16]
        if model.expert_dtype == "fp8" and _fp8_scale(name) in self._file_of:
            wanted = [torch.float8_e4m3fn]
            self._check_scales(model, source)
        found = file[name]
        if found.shape != source.shape or found.dtype not in wanted:
            raise CheckpointError(
                f"tensor {name} of {model.name!r} is {found.shape} {found.dtype}, {asking} asks for {source.shape} "
                f"{wanted[0]}; the two do not belong together."
            )

    def _check_fp4(self, model: ModelConfig, source: Source) -> None:
        """Check the two tensors in which MXFP4 holds a matrix of each expert: its rows are outputs."""
        experts, columns, rows = source.shape
        wanted = {"blocks": (experts, rows, columns // 32, 16), "scales": (experts, rows, columns // 32)}
        for what, shape in wanted.items():
            self._check_part(model, _fp4(source.name, what), shape, torch.uint8)
        if columns % 32:
            raise CheckpointError(
                f"MXFP4 has 32 columns in a block, and {source.name} of {model.name!r} has {columns}; use another "
                "model."
            )

    def _check_scales(self, model: ModelConfig, source: Source) -> None:
        """Check the factors of an FP8 matrix."""
        shape = tuple(-(-size // FP8_BLOCK) for size in source.shape)
        self._check_part(model, _fp8_scale(source.name), shape, torch.float32)

    def _check_part(self, model: ModelConfig, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check a tensor that is part of a quantised one."""
        file = self._file_of.get(name)
        found = (None, None) if file is None else (file[name].shape, file[name].dtype)
        if found != (shape, dtype):
            raise CheckpointError(
                f"tensor {name} of {model.name!r} is {found[0]} {found[1]}, its config.json asks for {shape} {dtype}; "
                "the two do not belong together."
            )

    @property
    def stamps(self) -> tuple[str, ...]:
        """Name, size and times of change of each file when it was opened, before anything of it was read."""
        return tuple(file.stamp for file in self.files)

    @property
    def unchanged(self) -> bool:
        """True if nothing has been written to a file since it was opened."""
        return all(file.unchanged for file in self.files)

    def read(self, source: Source, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, or the part of one that is meant, in memory of its own, in a type or as it is in the file.

        Quantised ones are converted, by default to bf16.
        """
        if self._int4 is not None and source.name in self._int4:
            return self._converted_part(source, dtype or torch.bfloat16, self._int4.weights)
        if _fp4(source.name, "blocks") in self._file_of:
            blocks, scales = (self._slice(_fp4(source.name, what), source.part) for what in ("blocks", "scales"))
            return mxfp4_weights(blocks, scales, dtype or torch.bfloat16)
        if _fp8_scale(source.name) in self._file_of:
            return self._converted_part(source, dtype or torch.bfloat16, self._of_fp8)
        tensor = self._slice(source.name, source.part)
        tensor = tensor.T.contiguous() if source.transposed else tensor
        return tensor.to(dtype or tensor.dtype)

    def read_into(self, source: Source, out: torch.Tensor) -> None:
        """Read a tensor, or the part of one that is meant, into contiguous memory, converted to its type."""
        file = self._file_of.get(source.name)
        if file is not None and file[source.name].dtype == out.dtype and not source.transposed:
            file.read_into(source.name, out, source.begin * out.itemsize)
        else:
            out.copy_(self.read(source, out.dtype))

    def read_mxfp4(self, source: Source, what: str) -> torch.Tensor:
        """The codes ("blocks") or the scales of a part of a tensor in MXFP4, as they are in the file.

        Raises
        ------
        CheckpointError
            If the tensor is not in MXFP4.
        """
        if _fp4(source.name, what) not in self._file_of:
            raise CheckpointError(
                f"tensor {source.name} of {self.folder.name!r} is not in MXFP4, which its config.json names; give "
                "Memory(weights='bf16')."
            )
        return self._slice(_fp4(source.name, what), source.part)

    def int4_matrices(self, name: str) -> Int4Matrices:
        """The matrices in INT4, which that of this name must be one of.

        Raises
        ------
        CheckpointError
            If the matrix is not in INT4.
        """
        if self._int4 is None or name not in self._int4:
            raise CheckpointError(
                f"tensor {name} of {self.folder.name!r} is not in INT4, which its config.json names; give "
                "Memory(weights='bf16')."
            )
        return self._int4

    def _of_fp8(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A matrix in FP8, converted to a type."""
        return fp8_weights(self._slice(name, None), self._slice(_fp8_scale(name), None), dtype, block=FP8_BLOCK)

    def _converted_part(
        self, source: Source, dtype: torch.dtype, convert: Callable[[str, torch.dtype], torch.Tensor]
    ) -> torch.Tensor:
        """A part of a quantised matrix; each thread keeps the last one, for its parts are read one after the other."""
        name, matrix = getattr(self._converted, "last", ("", torch.empty(0)))
        if (name, matrix.dtype) != (source.name, dtype):
            matrix = convert(source.name, dtype)
            self._converted.last = source.name, matrix
        return (matrix[slice(*source.part)] if isinstance(source.part, tuple) else matrix).clone()

    def _slice(self, name: str, part: int | tuple[int, int] | None) -> torch.Tensor:
        """A part of a tensor along its first dimension, as it is in the file."""
        file = self._file_of[name]
        meant = Source(name, file[name].shape, part)
        there = torch.empty(meant.taken, dtype=file.dtype(name))
        file.read_into(name, there, meant.begin * there.itemsize)
        return there

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()


def open_checkpoint(model: ModelConfig, wanted: Iterable[tuple[int, Op]] = ()) -> dict[str, torch.Tensor]:
    """Read every tensor of a `Checkpoint` whole, by name."""
    with Checkpoint(model, wanted) as checkpoint:
        return {source.name: checkpoint.read(source.whole) for source in checkpoint.sources}


def _fp4(name: str, what: str) -> str:
    """Name of the tensor that holds the numbers of 4 bits of another, or their scales."""
    return f"{name}_{what}"


def _fp8_scale(name: str) -> str:
    """Name of the tensor that holds the factors of another's blocks."""
    return f"{name}_scale_inv"


def _added(op: Op, model: ModelConfig, layer: int) -> list[Source]:
    """The tensors that a user's operation takes of the checkpoint."""
    return sources(op, model, layer) if op.tensors else []


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
