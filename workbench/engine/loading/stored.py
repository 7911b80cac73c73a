"""Tensors as the host stores them; routed experts are packed for the kernel that computes them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workbench.core.errors import CheckpointError
from workbench.core.units import GROUPS, PACKED, QUANTISED
from workbench.engine.loading.checkpoint import TORCH_DTYPES, Checkpoint
from workbench.engine.loading.int4 import Int4Matrices
from workbench.engine.loading.tensor_files import TensorFile, bytes_of
from workbench.engine.loading.tensors import Operand, Tensors, operands
from workbench.kernels import (
    CodePath,
    Format,
    NodeExperts,
    PackedExperts,
    empty_in_huge_pages,
    experts_by_node,
    experts_in_rows,
    experts_of_blocks,
    features,
    numa_nodes,
    pack_experts,
    pack_int4,
    pack_mxfp4,
)
from workbench.models import ModelConfig
from workbench.stages import Op, Precision

FORMATS = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.int8: "int8", torch.uint8: "int4"}
"""Number formats by the type of the tensors that hold them."""
_PAGES = 1 << 16
"""Fewest bytes for which memory is asked of the system itself."""
_VERSION = "3"
"""Changes when the same weights are rounded or laid out otherwise."""


class Stored(NamedTuple):
    """A tensor that an operation takes, as the host stores it.

    Attributes
    ----------
    key : str
    tensor : Tensor
    aligned : bool
        True if its size is a multiple of a cache line, on which it must begin.
    """

    key: str
    tensor: torch.Tensor
    aligned: bool = False


def host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros for tensors that the lanes read many times, in huge pages where the system grants them.

    Other memory stays with the process when it is freed; this goes back, so that the next model finds it.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _PAGES:
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(empty_in_huge_pages(size, np.int8)).view(dtype).view(shape)


def packed(model: ModelConfig, precision: Precision) -> bool:
    """True if routed experts are packed: quantised ones, and whole blocks where Numba's kernel has vectors."""
    whole = not (model.hidden_size % PackedExperts.UNIT or model.expert_width % PackedExperts.UNIT)
    return precision.experts in PACKED or (whole and features().path is not CodePath.PORTABLE)


def pack(
    files: Checkpoint, model: ModelConfig, layer: int, op: Op, precision: Precision, step: Callable[[int], object]
) -> list[Stored]:
    """The packed matrices of one layer's experts, or of the set of them that an operation computes.

    Rounded ones of a whole layer are kept for the next run, in a folder within the checkpoint's.

    `step` is called with the bytes that were read, as they are held, and may raise.

    Raises
    ------
    CheckpointError
        If experts that are to be rounded are not finite, or are not in the format that the config names.
    """
    if precision.experts == "mxfp4":
        return _stored(_in_mxfp4(files, model, layer, op, step))
    if precision.keeps_int4(model.expert_dtype):
        return _stored(_in_int4(files, model, layer, op, precision, step))
    if precision.experts is None or precision.experts not in QUANTISED:
        return _stored(_packed(files, model, layer, op, precision, step))
    path = files.folder / f"experts-{precision.experts}" / f"{layer:05d}.safetensors"
    source = fingerprint(files)
    found = _read(path, source, step)
    if found is None or not _fits(found, model, precision):
        found = _packed(files, model, layer, op, precision, step)
        if files.unchanged and op.subset is None:
            _write(path, found, source, like=files.files[0].path)
        return _stored(found)
    if op.subset is not None:
        found = _of_members(found, op.subset.of(layer, model.num_local_experts))
    step(sum(tensor.nbytes for tensor in found.values()))
    return _stored(found)


def _of_members(tensors: Tensors, members: Sequence[int]) -> Tensors:
    """The packed experts of a layer that belong to some of them, in memory of their own."""
    found = Tensors()
    for key, tensor in tensors.items():
        found[key] = host_memory((len(members), *tensor.shape[1:]), tensor.dtype)
        for place, expert in enumerate(members):
            found[key][place].copy_(tensor[expert])
    return found


def _stored(tensors: Tensors) -> list[Stored]:
    return [Stored(key, tensor, aligned=True) for key, tensor in tensors.items()]


class _EachRead(Sequence[torch.Tensor]):
    """A tensor per expert, each read when it is asked for, so that no more than one is held."""

    def __init__(self, count: int, read: Callable[[int], torch.Tensor]) -> None:
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, expert: Any) -> Any:
        return self._read(expert)


def _in_mxfp4(files: Checkpoint, model: ModelConfig, layer: int, op: Op, step: Callable[[int], object]) -> Tensors:
    """Read and pack the experts of a checkpoint that holds them in MXFP4; their numbers stay."""

    def read(operand: Operand, what: str, expert: int) -> torch.Tensor:
        found = files.read_mxfp4(operand.sources[expert], what)
        step(found.nbytes)
        return found

    given = list[_EachRead]()
    for operand in operands(op, model, layer):
        if operand.matrices is not None:
            given += [_EachRead(len(operand.sources), partial(read, operand, what)) for what in ("blocks", "scales")]
    try:
        return _tensors(pack_mxfp4(*given))
    except ValueError as error:
        raise CheckpointError(f"experts of layer {layer} of {model.name!r} cannot be read: {error}") from error


_OfInt4: TypeAlias = Callable[[Int4Matrices, str], torch.Tensor]


def _in_int4(
    files: Checkpoint, model: ModelConfig, layer: int, op: Op, precision: Precision, step: Callable[[int], object]
) -> Tensors:
    """Read and pack the experts of a checkpoint that holds them in INT4; their numbers stay."""

    def read(operand: Operand, what: _OfInt4, size: float, expert: int) -> torch.Tensor:
        names = [source.name for source in operand.of_matrix(expert)]
        found = torch.cat([what(files.int4_matrices(name), name) for name in names])
        step(round(found.numel() * size))
        return found

    given = dict[str, Any]()
    for operand in operands(op, model, layer):
        if operand.matrices is None:
            continue
        parts: list[tuple[str, _OfInt4, float]] = [("", Int4Matrices.codes, 0.5), ("_scales", Int4Matrices.scales, 4)]
        if precision.experts == "uint4":  # the zero points lie within the scales
            parts.append(("_zeros", Int4Matrices.zeros, 0))
        for suffix, what, size in parts:
            given[operand.key + suffix] = _EachRead(operand.matrices, partial(read, operand, what, size))
    try:
        return _tensors(pack_int4(**given))
    except ValueError as error:
        raise CheckpointError(
            f"experts of layer {layer} of {model.name!r} cannot be read: {error} Or give Memory(weights='bf16')."
        ) from error


def _packed(
    files: Checkpoint, model: ModelConfig, layer: int, op: Op, precision: Precision, step: Callable[[int], object]
) -> Tensors:
    """Read and pack one expert after the other, so that no more than one is held in rows."""

    def read(operand: Operand, matrix: torch.Tensor, expert: int) -> torch.Tensor:
        parts = operand.of_matrix(expert)
        for source, own in zip(parts, matrix.split([source.taken[0] for source in parts]), strict=True):
            files.read_into(source, own)
        step(round(matrix.numel() * precision.expert_bytes))
        return matrix

    rows = dict[str, _EachRead]()
    for operand in operands(op, model, layer):
        if operand.matrices is not None:
            matrix = host_memory(operand.shape[1:], TORCH_DTYPES[precision.weights])  # all are read into the same
            rows[operand.key] = _EachRead(operand.matrices, partial(read, operand, matrix))
    try:
        return _in_blocks(rows["gate_up"], rows["down"], precision)
    except ValueError as error:
        raise CheckpointError(
            f"experts of layer {layer} of {model.name!r} cannot be rounded to {precision.experts}: {error} Or leave "
            "weights out."
        ) from error


def _in_blocks(gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor], precision: Precision) -> Tensors:
    """Pack gates and ups (2 F, M) and downs (M, F) of every expert."""
    form = precision.experts if precision.experts in PACKED else None
    return _tensors(pack_experts(gate_up, down, format=form, group=precision.group or GROUPS[0]))


def _tensors(both: PackedExperts) -> Tensors:
    """The memory of packed experts as tensors."""
    found = Tensors()
    for key, matrices in (("gate_up", both.gate_up), ("down", both.down)):
        found[f"{key}_blocks"] = _tensor(matrices.blocks, matrices.format)
        if matrices.format.scaled:
            found[f"{key}_scales"] = torch.from_numpy(matrices.scales)
    return found


def divided(model: ModelConfig, matrices: list[Stored]) -> list[Stored]:
    """Cut packed experts into a slice for each NUMA node, in that node's memory.

    They are returned as they are if there is one node, if they have biases or another activation function than SwiGLU,
    or if they have fewer pieces than there are nodes.
    """
    nodes = host_nodes()
    whole = packed_of({each.key: each.tensor for each in matrices})
    cut = model.family.activation == "swiglu" and not model.expert_vectors and len(nodes) <= whole.pieces
    if len(nodes) == 1 or not cut:
        return matrices
    found = Tensors()
    for number, own in enumerate(experts_by_node(whole, nodes=nodes).slices):
        found |= {key + _of_node(number): tensor for key, tensor in _tensors(own).items()}
    return _stored(found)


def _of_node(number: int) -> str:
    """End of the names of a node's tensors."""
    return f" of node {number}"


def packed_of(weights: Tensors) -> PackedExperts:
    """The packed routed experts among an operation's weights; they must not be divided."""
    return _packed_of(weights, "")


def experts_of(weights: Tensors) -> PackedExperts | NodeExperts | None:
    """The packed routed experts among an operation's weights, whole or in slices; None if they are not packed."""
    if "gate_up_blocks" in weights:
        return packed_of(weights)
    count = sum(key.startswith("gate_up_blocks") for key in weights)
    slices = tuple(_packed_of(weights, _of_node(number)) for number in range(count))
    return NodeExperts(slices, host_nodes()) if slices else None


@functools.cache
def host_nodes() -> tuple[frozenset[int], ...]:
    """CPUs of each NUMA node of the host, read once: slices do not move when the process's CPUs change."""
    return numa_nodes()


def _packed_of(weights: Tensors, end: str) -> PackedExperts:
    """The experts of the tensors whose names have this end."""
    scales = [weights.get(f"{key}_scales{end}") for key in ("gate_up", "down")]
    return experts_of_blocks(*(weights[f"{key}_blocks{end}"] for key in ("gate_up", "down")), *scales)


def in_rows(tensors: Tensors) -> Tensors:
    """Packed experts in 4 or 8 bits as a card's kernel reads them, beside their other tensors."""
    both = dict(zip(("gate_up", "down"), experts_in_rows(packed_of(tensors)), strict=True))
    found = {key: tensor for key, tensor in tensors.items() if not key.endswith(("_blocks", "_scales"))}
    for key, rows in both.items():
        found[key] = torch.from_numpy(rows.values)
        found[f"{key}_scales"] = torch.from_numpy(rows.scales)
    return found


def smallest(model: ModelConfig, precision: Precision) -> Tensors:
    """One expert of zeros, of the least size, stored as the model's are."""
    dtype = TORCH_DTYPES[precision.weights]
    size = max(precision.group or 0, PackedExperts.UNIT)
    gate_up = torch.zeros(1, 2 * size, size, dtype=dtype)
    down = torch.zeros(1, size, size, dtype=dtype)
    biases = {"gate_up_bias": gate_up[:, :, 0], "down_bias": down[:, :, 0]} if model.expert_vectors else {}
    whole = {key: bias.contiguous() for key, bias in biases.items()}
    if packed(model, precision):
        return _in_blocks([*gate_up], [*down], precision) | whole
    return {"gate_up": gate_up, "down": down} | whole


def format_of(held: Tensors) -> tuple[str, int | None]:
    """Number format of routed experts as they are held, and the columns that share a scale."""
    first = {key.removesuffix(_of_node(0)): tensor for key, tensor in held.items()}
    matrices = first["down_blocks"] if "down_blocks" in first else first["down"]
    scales = first.get("down_scales")
    if scales is not None and scales.dtype is torch.uint8:
        return "mxfp4", None
    columns = matrices.shape[2] * (2 if matrices.dtype is torch.uint8 else 1)
    if scales is not None and scales.dtype is torch.int32:
        return "uint4", columns // scales.shape[2]
    return FORMATS[matrices.dtype], columns // scales.shape[2] if scales is not None else None


def _fits(tensors: Tensors, model: ModelConfig, precision: Precision) -> bool:
    """True if tensors are the rounded experts of one layer of a model."""
    try:
        found = packed_of(tensors)
    except (KeyError, TypeError, ValueError):
        return False
    sizes = len(found), found.gate_up.dim, found.down.dim
    forms = found.format.name.lower(), found.gate_up.group, found.down.group
    group = precision.group or GROUPS[0]
    return (sizes, forms) == (
        (model.num_local_experts, model.hidden_size, model.expert_width),
        (precision.experts, group, group),
    )


def _tensor(array: npt.NDArray[Any], format: Format) -> torch.Tensor:
    """A tensor over the memory of a packed array, of the format's type."""
    if format is Format.BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def fingerprint(files: Checkpoint) -> str:
    """Tells a checkpoint's files, as they were opened, from others: by their names, sizes and times of change."""
    return hashlib.sha256("\n".join((_VERSION, *files.stamps)).encode()).hexdigest()


def _read(path: Path, source: str, step: Callable[[int], object]) -> Tensors | None:
    """The tensors of a file that was written for these sources; None if there is none, or it is damaged."""
    with contextlib.suppress(CheckpointError), TensorFile(path, lambda: step(0)) as file:
        if file.metadata.get("source") == source:
            found = Tensors()
            for name in sorted(file.names):
                found[name] = host_memory(file[name].shape, file.dtype(name))
                file.read_into(name, found[name])
            if all(file.metadata.get(name) == _checksum(tensor) for name, tensor in found.items()):
                return found
    return None


def _checksum(tensor: torch.Tensor) -> str:
    return f"{zlib.crc32(bytes_of(tensor)):08x}"


def _write(path: Path, tensors: Tensors, source: str, *, like: Path) -> None:
    """Write a file whole or not at all, for those who may read `like`; where nothing can be written, do nothing."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(exist_ok=True)
        try:
            sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
            save_file(tensors, partial, {"source": source, **sums})
            shutil.copymode(like, partial)
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
