"""The host as the device of the gpu lane: what is issued is done when the call returns."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class HostEvent:
    """See `Event`: it has passed when it is recorded."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """See `Event.wait`."""

    def seconds_since(self, earlier: HostEvent) -> float:
        """See `Event.seconds_since`."""
        return self._at - earlier._at


class HostStream:
    """See `Stream`."""

    def issuing(self) -> AbstractContextManager[object]:
        """See `Stream.issuing`."""
        return nullcontext()

    def record(self) -> HostEvent:
        """See `Stream.record`."""
        return HostEvent()

    def keep(self, held: object) -> None:
        """See `Stream.keep`."""

    def release(self) -> list[object]:
        """See `Stream.release`."""
        return []

    def finish(self) -> None:
        """See `Stream.finish`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Stream.copy`."""
        target.copy_(source)


class HostDriver:
    """See `Driver`."""

    device = torch.device("cpu")
    name = "CPU"
    on_host = True

    def stream(self, name: str) -> HostStream:
        """See `Driver.stream`."""
        return HostStream()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Driver.empty`."""
        return torch.empty(tuple(shape), dtype=dtype)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Driver.pin`."""
        return tensor

    def pinned(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Driver.pinned`."""
        return torch.empty(tuple(shape), dtype=dtype)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """See `Driver.is_pinned`."""
        return True

    def close(self) -> None:
        """See `Driver.close`."""
