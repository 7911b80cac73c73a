"""An NVIDIA card as the device of the gpu lane, by `torch.cuda`."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from workbench.core.errors import EngineError
from workbench.core.units import format_bytes
from workbench.kernels import empty_in_huge_pages

_PAGE = 4096
"""Bytes of a page, the unit in which memory is locked."""


class CudaEvent:
    """See `Event`. A waiting thread sleeps: one that spins would take a core from attention on the host."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._event = cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        """See `Event.wait`."""
        self._event.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        """See `Event.seconds_since`."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaStream:
    """See `Stream`."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._cuda = driver.cuda
        self._stream = self._cuda.Stream(driver.device)
        self._held: list[object] = []

    def issuing(self) -> AbstractContextManager[object]:
        """See `Stream.issuing`."""
        entered: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return entered

    def record(self) -> CudaEvent:
        """See `Stream.record`."""
        return CudaEvent(self._cuda, self._stream)

    def keep(self, held: object) -> None:
        """See `Stream.keep`."""
        self._held.append(held)

    def release(self) -> list[object]:
        """See `Stream.release`."""
        held = self._held
        self._held = []
        return held

    def finish(self) -> None:
        """See `Stream.finish`."""
        held = self.release()  # what is kept meanwhile waits for the next time
        self.record().wait()
        held.clear()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Stream.copy`.

        Raises
        ------
        EngineError
            If memory of the host is not pinned: torch would copy it too, and make the caller wait.
        """
        for tensor in (target, source):
            if tensor.device.type == "cpu" and not self._driver.is_pinned(tensor):
                raise EngineError("a copy over the link begins or ends in memory that is not pinned; this is a bug.")
        with self.issuing():
            target.copy_(source, non_blocking=True)


class CudaDriver:
    """See `Driver`.

    Parameters
    ----------
    limit : float, optional
        Bytes that torch may take of the card's memory, by default all that is there.
    cuda : module
        `torch.cuda`, or what stands in for it in a test.
    name : str
        Name by which torch knows the device.

    Raises
    ------
    EngineError
        If torch finds no card, or the limit is more than it has.
    """

    on_host = False

    def __init__(self, limit: float | None = None, *, cuda: Any = torch.cuda, name: str = "cuda") -> None:
        if not cuda.is_available():
            raise EngineError("torch finds no GPU here; give device='cpu', or install torch for your card.")
        self.cuda = cuda
        self.device = torch.device(name, cuda.current_device())
        self._streams: dict[str, CudaStream] = {}
        self._locked: dict[int, torch.Tensor] = {}
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._lock = threading.Lock()
        about = cuda.get_device_properties(self.device)
        self.name = str(about.name)
        self.memory = float(about.total_memory)
        share = 1.0 if limit is None else limit / self.memory
        if share > 1:
            raise EngineError(
                f"the scenario's GPU has {format_bytes(limit or 0)} and this card {format_bytes(self.memory)}; give "
                "the machine limit(gpu_memory=...)."
            )
        cuda.set_per_process_memory_fraction(share, self.device)
        cuda.reset_peak_memory_stats(self.device)

    def stream(self, name: str) -> CudaStream:
        """See `Driver.stream`."""
        with self._lock:
            if name not in self._streams:
                self._streams[name] = CudaStream(self)
            return self._streams[name]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Driver.empty`. Its stream has no other work, so that waiting for it takes no time."""
        stream = self.stream("allocations")
        with stream.issuing():
            found = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        stream.record().wait()
        return found

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Driver.pin`.

        Raises
        ------
        EngineError
            If the system does not let so much memory be locked.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() % _PAGE or storage.nbytes() < _PAGE:
            own = torch.from_numpy(empty_in_huge_pages(max(tensor.nbytes, _PAGE), np.uint8))
            copied = own[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            return self.pin(copied.copy_(tensor))
        with self._lock:
            if storage.data_ptr() not in self._locked:
                answer = int(self.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
                if answer:
                    raise EngineError(
                        f"CUDA could not lock {format_bytes(storage.nbytes())} of host memory (error {answer}); keep "
                        "less on the host, or raise the limit of locked memory (ulimit -l)."
                    )
                self._locked[storage.data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """See `Driver.is_pinned`."""
        return tensor.untyped_storage().data_ptr() in self._locked

    def pinned(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Driver.pinned`."""
        size = math.prod(shape) * dtype.itemsize
        held = self._kept.get(key)
        if held is None or len(held) < size:
            room = max(size, _PAGE, 0 if held is None else 2 * len(held))
            fresh = self.pin(torch.from_numpy(empty_in_huge_pages(room, np.uint8)))
            self._kept[key] = fresh
            if held is not None:
                self._unlock(held)
            held = fresh
        return held[:size].view(dtype).view(tuple(shape))

    def _unlock(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            self.cuda.cudart().cudaHostUnregister(address)
            del self._locked[address]

    @property
    def peak(self) -> int:
        """The most bytes of the card's memory that tensors took at once."""
        return int(self.cuda.max_memory_allocated(self.device))

    @property
    def occupied(self) -> int:
        """Bytes of the card's memory that are not free, as its driver counts them: also those of CUDA and of others."""
        free, total = self.cuda.mem_get_info(self.device)
        return int(total - free)

    def close(self) -> None:
        """See `Driver.close`."""
        try:
            self.cuda.synchronize(self.device)
        finally:
            gc.collect()  # what ended in a cycle holds the card's memory, and the next run may need all of it
            self._kept.clear()
            self._streams.clear()
            for tensor in list(self._locked.values()):
                self._unlock(tensor)
            self.cuda.set_per_process_memory_fraction(1.0, self.device)
            if self.cuda is torch.cuda:
                torch._C._cuda_clearCublasWorkspaces()  # one for each stream that multiplied; empty_cache keeps them
            self.cuda.empty_cache()
