"""Operands of the stages: weights, checked once, and rows, checked at every call as cheaply as possible."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, checked, contiguous
from ..codegen.vector_ir import Storage
from ..declarations import public
from ..experts.rows import TOGETHER
from ..experts.weights import aligned
from ..machine.features import CodePath, code_path
from ..threads.crew import Crew
from .calls import Plan
from .products import MOST


class Weight(NamedTuple):
    """A matrix (R, C) in rows, where it lies in memory; `lanes` is the register width that reads it."""

    array: NDArray[Any]
    lanes: int

    @property
    def rows(self) -> int:
        """R."""
        return len(self.array)

    @property
    def columns(self) -> int:
        """C."""
        return int(self.array.shape[1])

    @property
    def storage(self) -> Storage:
        """Format of its numbers."""
        return Storage.BF16 if self.array.dtype == np.uint16 else Storage.FP32


@public
def fits_few_rows(weight: Operand, path: CodePath | None = None) -> bool:
    """Tell whether `FewLinear` and the other stages for few rows take a matrix (R, C).

    Its rows are read in registers, four at a time: R is a multiple of 4, and C one of 32 in bfloat16 and of 16 in fp32
    with AVX-512, half of that with AVX2. The portable path takes none.

    Parameters
    ----------
    weight : (R, C) fp32, torch.bfloat16, or uint16 that holds bfloat16 bits
    path : CodePath, optional
        Code path, by default this computer's own (`features`).

    Raises
    ------
    TypeError
        If it is neither an array nor a tensor, or has another dtype.
    ValueError
        If it has another number of axes.

    Examples
    --------
    >>> fits_few_rows(np.zeros((4, 30), np.float32))
    False
    """
    return _fits(checked("weight", weight, "R C", np.float32, np.uint16), code_path(path).value)


def _fits(array: NDArray[Any], lanes: int) -> bool:
    rows, columns = array.shape
    whole = lanes > 0 and not columns % (4 * lanes // array.itemsize) and not rows % TOGETHER
    return bool(whole and array.size and array.flags.c_contiguous and array.flags.aligned)


def weight_of(name: str, operand: Operand, path: CodePath | None) -> Weight:
    """Check a matrix that `fits_few_rows`."""
    array = checked(name, operand, "R C", np.float32, np.uint16)
    lanes = code_path(path).value
    if not _fits(array, lanes):
        raise ValueError(
            f"{name} must be C-contiguous with whole registers of columns and a multiple of {TOGETHER} rows on a path "
            f"with vectors, not {array.shape} on {code_path(path).name.lower()}: see fits_few_rows."
        )
    return Weight(array, lanes)


def vector_of(name: str, operand: Operand | None, dtype: Any, *sizes: int) -> NDArray[Any]:
    """Check a vector with one of these numbers of elements; of none if it is None."""
    if operand is None:
        return np.empty(0, dtype)
    vector = contiguous(name, checked(name, operand, "N", dtype))
    if len(vector) not in sizes:
        raise ValueError(
            f"{name} must have {' or '.join(map(str, sizes))} numbers, not {len(vector)}: pass one layer's."
        )
    return vector


@functools.cache
def storage_of(dtype: Any) -> Storage | None:
    """The format of rows of a dtype of numpy or torch: fp32, or bfloat16, which arrays hold as uint16."""
    return {"float32": Storage.FP32, "uint16": Storage.BF16, "bfloat16": Storage.BF16}.get(
        str(dtype).removeprefix("torch.")
    )


def _address(operand: Any) -> int | None:
    """The address of an operand in CPU memory, contiguous; None for any other."""
    if isinstance(operand, np.ndarray):
        found = operand.flags.c_contiguous and operand.flags.aligned
        return int(operand.__array_interface__["data"][0]) if found else None
    return int(operand.data_ptr()) if operand.is_cpu and operand.is_contiguous() else None


def rows_at(name: str, operand: Any, width: int, storage: Storage | None, *, most: float = MOST) -> tuple[int, int]:
    """T and the address of rows (T, width), T in 1 .. most, of a format; None is a format of no rows."""
    shape = operand.shape
    own = storage_of(operand.dtype)
    if len(shape) == 2 and 1 <= shape[0] <= most and shape[1] == width and own is not None and own is storage:
        address = _address(operand)
        if address is not None:
            return shape[0], address
    wanted = "fp32 or bfloat16" if storage is None else storage.name
    counts, pass_ = ("from 1 on", "rows") if math.isinf(most) else (f"in 1 .. {most}", "few rows")
    raise ValueError(
        f"{name} must be (T, {width}) of {wanted} in CPU memory, contiguous, with T {counts}, not {tuple(shape)} of "
        f"{operand.dtype}: pass {pass_} of the model's type (uint16 holds bfloat16 bits)."
    )


def residual_at(residual: Operand | None, tokens: int, width: int, storage: Storage | None) -> int:
    """The address of a residual (tokens, width) of a format; 0 for none."""
    if residual is None:
        return 0
    rows, address = rows_at("residual", residual, width, storage, most=math.inf)
    if rows != tokens:
        raise ValueError(f"residual must have the {tokens} rows of x, not {rows}: pass one batch.")
    return address


def new_rows(like: Any, rows: int, width: int, *, fp32: bool = False) -> tuple[Any, int]:
    """Memory (rows, width) of the kind of `like`, and of its dtype or fp32, with its address."""
    if isinstance(like, np.ndarray):
        array = np.empty((rows, width), np.float32 if fp32 else like.dtype)
        return array, array.__array_interface__["data"][0]
    tensor = (
        like.new_empty((rows, width), dtype=sys.modules["torch"].float32) if fp32 else like.new_empty((rows, width))
    )
    return tensor, tensor.data_ptr()


class Uses:
    """Memory that a stage uses: a use, dtype and width of so many rows for each; equal ones are one object."""

    def __init__(self, each: tuple[tuple[str, Any, int], ...], rows: int) -> None:
        self.each = each
        self.rows = rows


@functools.cache
def uses(*each: tuple[str, Any, int], rows: int = MOST) -> Uses:
    """The object of these uses."""
    return Uses(each, rows)


def memory_of(crew: Crew, wanted: Uses) -> Plan:
    """Addresses of memory (rows, width) of the calling thread, one for each use, dtype and width.

    The next call with this use overwrites it.
    """
    found = crew.kept.get(wanted)
    if found is None:
        arrays = []
        for use in wanted.each:
            key = (*use, wanted.rows)
            if key not in crew.kept:
                crew.kept[key] = aligned(use[1], wanted.rows, use[2])
            arrays.append(crew.kept[key])
        found = crew.kept[wanted] = Plan(*arrays)
    return cast("Plan", found)


def whole_numbers_at(name: str, operand: Any, count: int) -> int:
    """The address of int64 (count,)."""
    right = str(operand.dtype).endswith("int64") and tuple(operand.shape) == (count,)
    address = _address(operand) if right else None
    if address is None:
        raise ValueError(
            f"{name} must be ({count},) int64 in CPU memory, contiguous, not {tuple(operand.shape)} of "
            f"{operand.dtype}: pass one number per row."
        )
    return address


def table_at(name: str, operand: Any, count: int) -> tuple[int, int]:
    """W and the address of int32 (count, W)."""
    right = str(operand.dtype).endswith("int32") and len(operand.shape) == 2 and operand.shape[0] == count
    address = _address(operand) if right else None
    if address is None:
        raise ValueError(
            f"{name} must be ({count}, W) int32 in CPU memory, contiguous, not {tuple(operand.shape)} of "
            f"{operand.dtype}: pass the blocks of one sequence per row."
        )
    return int(operand.shape[1]), address
