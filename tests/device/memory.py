"""Memory of the simulated device, and host memory that its copies may use.

Memory is poisoned when it is allocated and when it is freed. A free is a write in the order of the stream that the
memory belongs to, which is what CUDA's caching allocator makes of it.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import NamedTuple

import torch

from tests.device.races import Memory, Touch
from tests.device.streams import QueuedStream, Queues


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no computation survives: NaN, also as the bytes of one, or an index that is nowhere."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.logical_not_()
    elif tensor.dtype is torch.uint8:
        tensor.fill_(255)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min // 2 + 1)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor within its storage."""
    first = tensor.storage_offset()
    if not tensor.numel():
        return first * tensor.itemsize, first * tensor.itemsize
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


class Pinned(NamedTuple):
    """Host memory that copies may read and write while the host goes on."""

    memory: Memory
    address: int
    size: int


class DeviceMemory:
    """Memory of a device with a limit, and the queues that its tensors are computed in.

    Attributes
    ----------
    waits : Counter of str
        Operations that made the host wait.
    pinned : dict of int
        Pinned host memory by address.
    """

    now: DeviceMemory
    """The device that tensors on `sim` are made on: the one made last."""

    def __init__(self, queues: Queues, limit: float) -> None:
        self.queues = queues
        self.limit = limit
        self.waits: Counter[str] = Counter()
        self.pinned: dict[int, Pinned] = {}
        self.peak = 0
        self._used = 0
        DeviceMemory.now = self

    @property
    def used(self) -> int:
        """Bytes that tensors take."""
        with self.queues.turn():
            return self._used

    def take(self, size: int) -> None:
        """Take bytes.

        Raises
        ------
        OutOfMemoryError
            If there are not so many.
        """
        if self._used + size > self.limit:
            raise torch.OutOfMemoryError(f"{size} bytes are wanted where {self._used} of {self.limit:.0f} are taken.")
        self._used += size
        self.peak = max(self.peak, self._used)

    def give(self, size: int) -> None:
        """Give bytes back."""
        self._used -= size

    def finish(self, name: str) -> None:
        """Have the host wait for the current stream, because of an operation."""
        self.waits[name] += 1
        self.queues.finish(self.queues.current.record())

    def touch_pinned(self, tensor: torch.Tensor, *, writes: bool) -> Touch | None:
        """What a copy or the host does to pinned memory; None if the tensor does not lie in any."""
        if not tensor.numel():
            return None
        begin, end = extent(tensor)
        storage = tensor.untyped_storage().data_ptr()
        for memory, address, size in self.pinned.values():
            if address <= storage + begin and storage + end <= address + size:
                return Touch(memory, writes, storage + begin - address, storage + end - address)
        return None


class Allocation:
    """Memory on the device, which belongs to the stream that was current.

    It may have been another tensor's before, and be another's after, whose accesses are in the stream's queue. So its
    beginning and its end are writes there, which other streams must be in order with.
    """

    def __init__(self, device: DeviceMemory, host: torch.Tensor) -> None:
        self.device = device
        self.host = host
        self.home = device.queues.current
        self.users: list[QueuedStream] = []
        self.size = host.untyped_storage().nbytes()
        self.memory = Memory(f"device memory of {tuple(host.shape)}")
        with device.queues.turn():
            device.take(self.size)
            poison(host)
            self._overwrite("what was there before")

    def end(self) -> None:
        """Free it, after the work so far of its users."""
        self.device.give(self.size)
        for user in self.users:
            self.home.wait(user.record())
        self._overwrite("what comes there next")

    def _overwrite(self, label: str) -> None:
        self.home.put(label, partial(poison, self.host), [Touch(self.memory, True, 0, self.size)])


class Block:
    """An allocation that ends when the last tensor that holds it is gone."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation

    def __del__(self) -> None:
        self.allocation.device.queues.freed.append(self.allocation.end)  # garbage is collected at any moment
