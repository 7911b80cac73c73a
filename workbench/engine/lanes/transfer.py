"""Transfers over the link, which a mover makes in packets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Copy(Protocol):
    """Something to copy, piece after piece."""

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""

    def pieces(self, size: int) -> Iterator[int]:
        """Copy pieces of about `size` bytes with the GIL released, and yield the bytes of each after it is copied."""


@dataclass(frozen=True)
class ArrayCopy:
    """Copy of an array: one-dimensional, of the target's type and length."""

    target: npt.NDArray[np.generic]
    source: npt.NDArray[np.generic]

    @property
    def nbytes(self) -> int:
        """See `Copy.nbytes`."""
        return self.target.nbytes

    def pieces(self, size: int) -> Iterator[int]:
        """See `Copy.pieces`."""
        step = max(1, size // self.target.itemsize)
        for low in range(0, self.target.size, step):
            piece = self.target[low : low + step]
            np.copyto(piece, self.source[low : low + step])  # Tensor.copy_ would take every core
            yield piece.nbytes


@dataclass
class Transfer:
    """Copies to make over the link, and an action to take when they have arrived."""

    copies: Sequence[Copy]
    arrived: Callable[[], None] | None = None

    @property
    def bytes(self) -> int:
        """Bytes that are moved."""
        return sum(copy.nbytes for copy in self.copies)

    def make(self) -> None:
        """Make all copies now, as fast as they go, and take no action."""
        for copy in self.copies:
            for _ in copy.pieces(max(1, copy.nbytes)):
                pass
