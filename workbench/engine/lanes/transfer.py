"""Transfers over the link, which a mover makes in packets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from workbench.engine.devices.driver import Driver, Event, Stream

_IN_FLIGHT = 2
"""Packets that a link direction is given at once, so that it never waits for the host."""


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


@dataclass(frozen=True)
class LinkCopy:
    """Copy of bytes between the host and a card, by a stream of the link."""

    target: torch.Tensor
    source: torch.Tensor
    stream: Stream

    @property
    def nbytes(self) -> int:
        """See `Copy.nbytes`."""
        return self.target.nbytes

    def pieces(self, size: int) -> Iterator[int]:
        """See `Copy.pieces`."""
        flying = deque[tuple[Event, int]]()
        for low in range(0, len(self.target), size):
            piece = self.target[low : low + size]
            self.stream.copy(piece, self.source[low : low + size])
            flying.append((self.stream.record(), piece.nbytes))
            if len(flying) > _IN_FLIGHT:
                yield _landed(*flying.popleft())
        while flying:
            yield _landed(*flying.popleft())


def _landed(event: Event, size: int) -> int:
    """Wait for a packet: its bytes."""
    event.wait()
    return size


def copy_over(driver: Driver, lane: str, target: torch.Tensor, source: torch.Tensor) -> Copy:
    """The copy of a tensor to another of its type and size by a link lane; host memory must be pinned."""
    if driver.on_host:
        return ArrayCopy(as_numpy(target), as_numpy(source))
    return LinkCopy(bytes_of(target), bytes_of(source), driver.stream(lane))


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

    def make(self) -> None:
        """Make all copies now, as fast as they go, and take no action."""
        for copy in self.copies:
            for _ in copy.pieces(max(1, copy.nbytes)):
                pass
