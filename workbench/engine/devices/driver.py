"""The door to the device of the gpu lane: streams, events, and host memory that the link reads.

All else is ordinary code: tensors are made with ``device=driver.device``, and kernels called within `Stream.issuing`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

import torch


class Event(Protocol):
    """A moment in a stream: the end of everything issued before."""

    def wait(self) -> None:
        """Block the calling thread until it has passed, without holding the GIL."""

    def seconds_since(self, earlier: Self) -> float:
        """Time between an earlier moment of the stream and this one, which have both passed [s]."""


class Stream(Protocol):
    """Work that the device does in the order in which it is issued."""

    def issuing(self) -> AbstractContextManager[object]:
        """Have what this thread computes on device tensors issued to this stream, until the block ends."""

    def record(self) -> Event:
        """The end of everything issued so far."""

    def keep(self, held: object) -> None:
        """Hold tensors until `finish` or `release`: memory that is freed may be given to another stream at once."""

    def release(self) -> list[object]:
        """Give up what was kept so far; the caller holds it until an event that was recorded by now has passed."""

    def finish(self) -> None:
        """Wait for everything issued so far, and let go of what was kept."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy one row of bytes to another of the same length; rows in host memory must be pinned.

        Neither may be touched nor freed before an event that is recorded behind the copy has passed.
        """


class Driver(Protocol):
    """A device, as the engine uses it."""

    device: torch.device
    name: str

    @property
    def on_host(self) -> bool:
        """True if the device's memory is the host's."""

    def stream(self, name: str) -> Stream:
        """The stream of this name, made at its first use."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device that every stream may write at once."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in memory that copies may read: its own if it has whole pages, else a copy. Kept until `close`."""

    def pinned(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the pinned memory of this key, which the next call with it gives again."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True if copies may read and write the host memory of a tensor."""

    def close(self) -> None:
        """Wait for all work and give memory back."""
