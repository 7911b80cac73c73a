"""Transfers over the link, which a mover makes in packets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from workbench.engine.devices.driver import Driver, Stream


class Copy(Protocol):
    """Something to copy, piece after piece."""

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""

    def pieces(self, size: int, stream: Stream) -> Iterator[int]:
        """Copy pieces of about `size` bytes with the GIL released, and yield the bytes of each.

        On the host a piece has been copied then; with a card it has been issued to `stream`.
        """


@dataclass(frozen=True)
class ArrayCopy:
    """Copy of an array: one-dimensional, of the target's type and length."""

    target: npt.NDArray[np.generic]
    source: npt.NDArray[np.generic]

    @property
    def nbytes(self) -> int:
        """See `Copy.nbytes`."""
        return self.target.nbytes

    def pieces(self, size: int, stream: Stream) -> Iterator[int]:
        """See `Copy.pieces`."""
        step = max(1, size // self.target.itemsize)
        for low in range(0, self.target.size, step):
            piece = self.target[low : low + step]
            np.copyto(piece, self.source[low : low + step])  # Tensor.copy_ would take every core
            yield piece.nbytes


@dataclass(frozen=True)
class LinkCopy:
    """Copy of bytes between the host and a card."""

    target: torch.Tensor
    source: torch.Tensor

    @property
    def nbytes(self) -> int:
        """See `Copy.nbytes`."""
        return self.target.nbytes

    def pieces(self, size: int, stream: Stream) -> Iterator[int]:
        """See `Copy.pieces`."""
        for low in range(0, len(self.target), size):
            piece = self.target[low : low + size]
            stream.copy(piece, self.source[low : low + size])
            yield piece.nbytes


def copy_over(driver: Driver, target: torch.Tensor, source: torch.Tensor) -> Copy:
    """The copy of a tensor over the link to another of its type and size; with a card, host memory must be pinned."""
    if driver.on_host:
        return ArrayCopy(as_numpy(target), as_numpy(source))
    return LinkCopy(bytes_of(target), bytes_of(source))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in its own memory where it is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """A flat numpy view that shares the tensor's memory; bf16 appears as its 16 bits."""
    flat = tensor.reshape(-1)
    if flat.dtype is torch.bfloat16:
        flat = flat.view(torch.int16)
    return cast("npt.NDArray[np.generic]", flat.numpy())


@dataclass
class Transfer:
    """Copies to make over the link, and an action to take when they have arrived."""

    copies: Sequence[Copy]
    arrived: Callable[[], None] | None = None

    @property
    def bytes(self) -> int:
        """Bytes that are moved."""
        return sum(copy.nbytes for copy in self.copies)

    def make(self, stream: Stream) -> None:
        """Make all copies now, as fast as they go, and take no action."""
        for copy in self.copies:
            for _ in copy.pieces(max(1, copy.nbytes), stream):
                pass
        stream.finish()
