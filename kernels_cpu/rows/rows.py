"""Checks of operands of fp32 or bfloat16 rows, and the division of rows among threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arguments import Operand, checked, contiguous, frozen, in_rows
from ..machine.parameters import parameters
from ..threads.team import side_by_side, team_size

FLOATS = (np.float32, np.uint16)
_LINE = 64  # bytes of a cache line
_MANY = 1 << 16  # bytes of results for which the place of the first counts
SHARE = parameters().rows.thread_numbers


class RowOperand(NamedTuple):
    """An operand of strided rows with contiguous numbers, in a form that the compiler vectorises.

    numbers (n,): the memory from the first row to the last; strides: numbers from one row to the next, and from one
    head to the next if there are heads.
    """

    numbers: NDArray[Any]
    strides: tuple[int, ...]


def rows_of(
    name: str, operand: Operand, letters: str, like: NDArray[Any] | None = None
) -> tuple[NDArray[Any], RowOperand]:
    """Check an operand of fp32 or bfloat16 with the axes in `letters`; return it as an array and as a RowOperand.

    Raises
    ------
    TypeError
        If it has another dtype, or not that of `like`.
    ValueError
        If shape or memory layout is another, or the shape not that of `like`.
    """
    array = checked(name, operand, letters, *(FLOATS if like is None else (like.dtype,)))
    if like is not None and array.shape != like.shape:
        raise ValueError(f"{name} must be {like.shape} as x, not {array.shape}: pass one batch.")
    if 0 in array.shape[1:]:
        raise ValueError(f"{name} must have numbers in every row, not {array.shape}: leave the call out.")
    return array, RowOperand(*in_rows(name, array))


def vector_of(name: str, operand: Operand, x: NDArray[Any]) -> NDArray[Any]:
    """Check an operand with one number of x's type per column of x, and return it as an array.

    Raises
    ------
    TypeError
        If it has another dtype.
    ValueError
        If shape or memory layout is another.
    """
    vector = contiguous(name, checked(name, operand, "M", x.dtype))
    if vector.shape != x.shape[-1:]:
        raise ValueError(f"{name} must be ({x.shape[-1]},), not {vector.shape}: pass one number per column.")
    return frozen(vector)


def results(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Memory for results; if they are many, it begins with a cache line, which numpy's need not.

    Matrix products of torch read such rows faster: 64 rows of 1024 numbers times 1536 x 1024 take 333 us instead of
    443 us (bf16, one core of a Xeon with AMX). For few rows they are as fast, and numpy's own memory is found sooner.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _MANY:
        return np.empty(shape, dtype)
    memory = np.empty(size + _LINE, np.uint8)
    begin = -memory.__array_interface__["data"][0] % _LINE
    return memory[begin : begin + size].view(dtype).reshape(shape)


def by_rows(work: Callable[[int, int], object], shape: tuple[int, ...], threads: int | None) -> None:
    """Run `work(low, high)` over all rows of a result of this shape, in as many threads as have enough work."""
    rows = shape[0]
    most = min(shape[0], math.prod(shape) // SHARE)
    team = min(team_size(threads), max(1, most)) if most > 1 or threads is not None else 1
    if team == 1:
        work(0, rows)
        return
    edges = [rows * share // team for share in range(team + 1)]
    shares = iter(list(pairwise(edges)))
    side_by_side(lambda: work(*next(shares)), team)
