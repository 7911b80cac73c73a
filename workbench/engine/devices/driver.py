"""What the engine asks of the device of its gpu lane: streams, events, and host memory that the link reads.

All else is ordinary code: tensors are made with ``device=driver.torch``, and kernels are called inside ``with stream:``.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Event(Protocol):
    """A moment in a stream: the end of everything issued before."""

    def wait(self) -> None:
        """Block the calling thread until it has passed, without holding the GIL."""


class Stream(Protocol):
    """Work that the device does in the order in which it is issued."""

    def issuing(self) -> AbstractContextManager[object]:
        """Have what this thread computes on device tensors issued to this stream, until the block ends."""

    def record(self) -> Event:
        """The end of everything issued so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy one row of bytes to another of the same length; rows in host memory must be pinned.

        Neither may be touched nor freed before an event that is recorded behind the copy has passed.
        """


class Driver(Protocol):
    """A device, as the engine uses it."""

    torch: torch.device

    @property
    def on_host(self) -> bool:
        """True if the device's memory is the host's."""

    def stream(self, name: str) -> Stream:
        """The stream of this name, made at its first use. Copies of a link direction have the name of its lane."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory that copies may read: its own if that is whole pages, else a copy. Kept until `close`."""

    def pinned(self, key: Hashable, size: int) -> torch.Tensor:
        """The first `size` bytes of the pinned memory of this key, which grows and keeps nothing when it does."""

    def close(self) -> None:
        """Wait for all work and give memory back."""
