"""Tensors as the host stores them; routed experts are packed for the kernel that computes them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workbench.core.errors import CheckpointError
from workbench.core.units import GROUPS, QUANTISED
from workbench.engine.model.checkpoint import TORCH_DTYPES, Checkpoint
from workbench.engine.model.ops import Tensors
from workbench.engine.model.tensors import operands
from workbench.kernels import CodePath, Format, features, pack_experts
from workbench.models import ModelConfig
from workbench.stages import Precision, experts

UNIT = 64
"""Packed experts have sizes that are multiples of this."""
FORMATS = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.int8: "int8", torch.uint8: "int4"}
"""Number formats by the type of the tensors that hold them."""
_VERSION = "2"
"""Changes when the same weights are rounded or laid out otherwise."""


class Stored(NamedTuple):
    """A tensor that an operation takes, as the host stores it.

    Attributes
    ----------
    key : str
    shape : tuple of int
    parts : list of Tensor
        Its rows, one part behind the other.
    aligned : bool
        True if it begins on a cache line, and its size is a multiple of one.
    """

    key: str
    shape: tuple[int, ...]
    parts: list[torch.Tensor]
    aligned: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        return self.parts[0].dtype

    def joined(self) -> torch.Tensor:
        """The tensor in one piece: the only part itself, or a copy of several."""
        return (torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0]).view(self.shape)


def packed(model: ModelConfig, precision: Precision) -> bool:
    """True if routed experts are packed: rounded ones always, others of such sizes where Numba's kernel has vectors.

    That kernel has neither biases nor other activations than SwiGLU.
    """
    whole = not (model.hidden_size % UNIT or model.expert_width % UNIT)
    if model.expert_vectors or model.family.activation != "swiglu":
        return False
    return precision.experts in QUANTISED or (whole and features().path is not CodePath.PORTABLE)


def pack(files: Checkpoint, model: ModelConfig, layer: int, precision: Precision, source: str) -> list[Stored]:
    """The packed experts of one layer; rounded ones are kept for the next run, in a folder within the checkpoint's.

    `source` is the checkpoint's fingerprint before anything was read.

    Raises
    ------
    CheckpointError
        If experts that are to be rounded are not finite.
    """
    if precision.experts is None or precision.experts not in QUANTISED:
        return _stored(_packed(files, model, layer, precision))
    path = files.folder / f"experts-{precision.experts}" / f"{layer:05d}.safetensors"
    found = _read(path, source)
    if found is None or not _fits(found, model, precision):
        found = _packed(files, model, layer, precision)
        if fingerprint(files) == source:  # else files were replaced while they were read
            _write(path, found, source, like=files.files[0])
    return _stored(found)


def _stored(tensors: Tensors) -> list[Stored]:
    return [Stored(key, tuple(tensor.shape), [tensor], aligned=True) for key, tensor in tensors.items()]


def _packed(files: Checkpoint, model: ModelConfig, layer: int, precision: Precision) -> Tensors:
    dtype = TORCH_DTYPES[precision.weights]
    taken = {operand.key: operand.sources for operand in operands(experts, model, layer)}
    each = len(taken["gate_up"]) // model.num_local_experts
    gate_up = list[torch.Tensor]()
    for first in range(0, len(taken["gate_up"]), each):
        parts = [files.read(source, dtype) for source in taken["gate_up"][first : first + each]]
        gate_up.append(torch.cat(parts))
    down = [files.read(source, dtype) for source in taken["down"]]
    try:
        return _in_blocks(gate_up, down, precision)
    except ValueError as error:
        raise CheckpointError(
            f"experts of layer {layer} of {model.name!r} cannot be rounded to {precision.experts}: {error} Or leave "
            "weights out."
        ) from error


def _in_blocks(gate_up: list[torch.Tensor], down: list[torch.Tensor], precision: Precision) -> Tensors:
    """Pack gates and ups (2 F, M) and downs (M, F) of every expert."""
    form = precision.experts if precision.experts in QUANTISED else None
    both = pack_experts(gate_up, down, format=form, group=precision.group or GROUPS[0])
    found = Tensors()
    for key, matrices in (("gate_up", both.gate_up), ("down", both.down)):
        found[f"{key}_blocks"] = _tensor(matrices.blocks, matrices.format)
        if matrices.format.scaled:
            found[f"{key}_scales"] = torch.from_numpy(matrices.scales)
    return found


def smallest(model: ModelConfig, precision: Precision) -> Tensors:
    """One expert of zeros, of the least size, stored as the model's are."""
    dtype = TORCH_DTYPES[precision.weights]
    size = precision.group or UNIT
    gate_up = torch.zeros(1, 2 * size, size, dtype=dtype)
    down = torch.zeros(1, size, size, dtype=dtype)
    if packed(model, precision):
        return _in_blocks([*gate_up], [*down], precision)
    return {"gate_up": gate_up, "down": down}


def format_of(held: Tensors) -> tuple[str, int | None]:
    """Number format of routed experts as they are held, and the columns that share a scale."""
    matrices = held["down_blocks"] if "down_blocks" in held else held["down"]
    scales = held.get("down_scales")
    columns = matrices.shape[2] * (2 if matrices.dtype is torch.uint8 else 1)
    return FORMATS[matrices.dtype], columns // scales.shape[2] if scales is not None else None


def _fits(tensors: Tensors, model: ModelConfig, precision: Precision) -> bool:
    """True if tensors have the shapes and types of the rounded experts of one layer."""
    found = dict[str, tuple[tuple[int, ...], str]]()
    group = precision.group or GROUPS[0]
    inner = model.expert_width
    for key, rows, columns in (("gate_up", 2 * inner, model.hidden_size), ("down", model.hidden_size, inner)):
        held = columns // 2 if precision.experts == "int4" else columns
        found[f"{key}_blocks"] = (model.num_local_experts, rows, held), str(precision.experts)
        found[f"{key}_scales"] = (model.num_local_experts, rows // UNIT, columns // group, UNIT), "fp32"
    return {key: (tuple(tensor.shape), FORMATS.get(tensor.dtype)) for key, tensor in tensors.items()} == found


def _tensor(array: npt.NDArray[Any], format: Format) -> torch.Tensor:
    """A tensor over the memory of a packed array, of the format's type."""
    if format is Format.BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def fingerprint(files: Checkpoint) -> str:
    """Tells a checkpoint's files from others: their names, sizes and times of change."""
    told = list[str]()
    for path in files.files:
        stat = path.stat()
        told.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}")
    return hashlib.sha256("\n".join((_VERSION, *told)).encode()).hexdigest()


def _read(path: Path, source: str) -> Tensors | None:
    """The tensors of a file that was written for these sources; None if there is none."""
    try:
        with safe_open(path, framework="pt") as opened:
            if (opened.metadata() or {}).get("source") != source:
                return None
            return {name: opened.get_tensor(name).clone() for name in sorted(opened.keys())}
    except (SafetensorError, OSError):
        return None


def _write(path: Path, tensors: Tensors, source: str, *, like: Path) -> None:
    """Write a file whole or not at all, for those who may read `like`; where nothing can be written, do nothing."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(exist_ok=True)
        try:
            save_file(tensors, partial, {"source": source})
            shutil.copymode(like, partial)
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
