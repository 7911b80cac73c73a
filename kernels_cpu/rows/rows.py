"""Operands and threads of all ops on rows of fp32 or bfloat16: checks, and the division of rows among threads."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand, SameKind, checked, contiguous, frozen, in_rows
from ..threads.team import side_by_side, team_size

FLOATS = (np.float32, np.uint16)
SHARE = 1 << 17  # numbers per thread: one more comes after 54 us, in which an AVX-512 core norms so many


class Rows(NamedTuple):
    """Rows whose numbers are neighbours, wherever the rows are: compiled code then finds vectors.

    numbers (n,): memory from the first row to the last; strides: numbers from one row to the next, and from one head
    to the next where there are heads.
    """

    numbers: NDArray[Any]
    strides: tuple[int, ...]


def rows_of(name: str, operand: Operand, letters: str, like: NDArray[Any] | None = None) -> tuple[NDArray[Any], Rows]:
    """An operand of fp32 or bfloat16 with these axes as an array, and as rows; of the dtype and shape of `like`.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If shape or memory layout is another.
    """
    array = checked(name, operand, letters, *(FLOATS if like is None else (like.dtype,)))
    if like is not None and array.shape != like.shape:
        raise ValueError(f"{name} must be {like.shape} as x, not {array.shape}: pass one batch.")
    if 0 in array.shape[1:]:
        raise ValueError(f"{name} must have numbers in every row, not {array.shape}: leave the call out.")
    return array, Rows(*in_rows(name, array))


def vector_of(name: str, operand: Operand, x: NDArray[Any]) -> NDArray[Any]:
    """An operand with one number of x's type per column of x.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If shape or memory layout is another.
    """
    vector = contiguous(name, checked(name, operand, "M", x.dtype))
    if vector.shape != x.shape[-1:]:
        raise ValueError(f"{name} must be ({x.shape[-1]},), not {vector.shape}: pass one number per column.")
    return frozen(vector)


def same_type(operand: SameKind, array: NDArray[Any]) -> SameKind:
    """`array` as a torch tensor of the dtype of `operand` where that is one, else as it is; no copy."""
    if isinstance(operand, np.ndarray):
        return cast(SameKind, array)
    return cast(SameKind, sys.modules["torch"].from_numpy(array).view(operand.dtype))


def by_rows(work: Callable[[int, int], object], shape: tuple[int, ...], threads: int | None) -> None:
    """Run `work(low, high)` over all rows of a result of this shape, in as many threads as pay."""
    rows = shape[0]
    most = min(shape[0], math.prod(shape) // SHARE)
    team = min(team_size(threads), max(1, most)) if most > 1 or threads is not None else 1
    if team == 1:
        work(0, rows)
        return
    edges = [rows * part // team for part in range(team + 1)]
    parts = iter(list(pairwise(edges)))
    side_by_side(lambda: work(*next(parts)), team)
