"""Stands in for `torch.cuda`: the engine's own `CudaDriver` runs on simulated queues, under every adversary.

Each function has the parameters of torch's own. What torch and the driver of a card do wrongly is not shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.device.memory import DeviceMemory, Pinned
from tests.device.races import Memory, Touch
from tests.device.streams import Adversary, Moment, QueuedStream, Queues
from tests.device.tensors import register
from workbench.engine.devices.cuda import CudaDriver, CudaStream

_ALREADY_REGISTERED = 712
_NOT_REGISTERED = 713
"""Errors of CUDA."""


class Stream(QueuedStream):
    """See `torch.cuda.Stream`."""

    def wait_event(self, event: Event) -> None:
        """See `torch.cuda.Stream.wait_event`."""
        self.wait(event.moment)


class Event:
    """See `torch.cuda.Event`: it may be recorded anew, and counts as passed until it is recorded."""

    def __init__(self, queues: Queues, timed: bool) -> None:
        self.moment = Moment()
        self._queues = queues
        self._timed = timed
        self._at = 0.0

    def record(self, stream: QueuedStream | None = None) -> None:
        """See `torch.cuda.Event.record`."""
        self.moment = (stream or self._queues.current).record()
        self._at = time.perf_counter()

    def query(self) -> bool:
        """See `torch.cuda.Event.query`."""
        return self.moment.passed

    def synchronize(self) -> None:
        """See `torch.cuda.Event.synchronize`."""
        self._queues.finish(self.moment)

    def elapsed_time(self, end_event: Event) -> float:
        """See `torch.cuda.Event.elapsed_time`; here the host's milliseconds between the two records.

        Raises
        ------
        RuntimeError
            If one of them has not passed, or keeps no time.
        """
        if not (self._timed and end_event._timed and self.query() and end_event.query()):
            raise RuntimeError("an event that has not passed, or keeps no time, tells none.")
        return 1e3 * (end_event._at - self._at)


class Rehearsal:
    """The part of `torch.cuda` that `CudaDriver` calls.

    Parameters
    ----------
    adversary : Adversary
    total : int
        Memory of the card [B].
    races : bool
        False if accesses are not checked.
    """

    def __init__(self, adversary: Adversary, *, total: int = 1 << 30, races: bool = True) -> None:
        register()
        self.queues = Queues(adversary, races=races)
        self.memory = DeviceMemory(self.queues, total)
        self.naming = threading.local()
        """Has the `name` of the next stream that a thread makes."""
        self._total = total

    def is_available(self) -> bool:
        """See `torch.cuda.is_available`."""
        return True

    def current_device(self) -> int:
        """See `torch.cuda.current_device`."""
        return 0

    def Stream(self, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:  # noqa: N802
        """See `torch.cuda.Stream`."""
        with self.queues.turn():
            made = Stream(self.queues, getattr(self.naming, "name", f"stream {len(self.queues.streams)}"))
            self.queues.streams.append(made)
            return made

    def Event(  # noqa: N802
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        """See `torch.cuda.Event`."""
        return Event(self.queues, enable_timing)

    def stream(self, stream: Stream) -> Stream:
        """See `torch.cuda.stream`."""
        return stream

    def cudart(self) -> SimpleNamespace:
        """See `torch.cuda.cudart`."""
        return SimpleNamespace(cudaHostRegister=self._pin, cudaHostUnregister=self._unpin)

    def _pin(self, address: int, size: int, flags: int) -> int:
        with self.queues.turn():
            for other in self.memory.pinned.values():
                if address < other.address + other.size and other.address < address + size:
                    return _ALREADY_REGISTERED
            self.memory.pinned[address] = Pinned(Memory(f"pinned memory of {size} bytes"), address, size)
        return 0

    def _unpin(self, address: int) -> int:
        with self.queues.turn():
            if address not in self.memory.pinned:
                return _NOT_REGISTERED
            memory, _, size = self.memory.pinned[address]
            if self.queues.error is None:  # a device that is lost copies nothing any more
                self.queues.touch_by_host("unpinning", [Touch(memory, True, 0, size)])
            del self.memory.pinned[address]
        return 0

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """See `torch.cuda.get_device_properties`."""
        return SimpleNamespace(name="rehearsal", total_memory=self._total)

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """See `torch.cuda.set_per_process_memory_fraction`."""
        self.memory.limit = fraction * self._total

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """See `torch.cuda.reset_peak_memory_stats`."""
        self.memory.peak = self.memory.used

    def max_memory_allocated(self, device: Any = None) -> int:
        """See `torch.cuda.max_memory_allocated`."""
        return self.memory.peak

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """See `torch.cuda.mem_get_info`."""
        return self._total - self.memory.used, self._total

    def synchronize(self, device: Any = None) -> None:
        """See `torch.cuda.synchronize`."""
        self.queues.finish_all()

    def empty_cache(self) -> None:
        """See `torch.cuda.empty_cache`."""


class RehearsedDriver(CudaDriver):
    """`CudaDriver` without a card, whose streams an adversary knows by name."""

    cuda: Rehearsal

    def stream(self, name: str) -> CudaStream:
        """See `Driver.stream`."""
        self.cuda.naming.name = name
        return super().stream(name)

    @property
    def waits(self) -> dict[str, int]:
        """How often each operation made the host wait."""
        return dict(self.cuda.memory.waits)

    def host_touches(self, label: str, *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Tell what the host does to pinned memory now, which is then checked against the copies.

        Raises
        ------
        RaceError
            If a copy of the same bytes may not be over.
        """
        memory = self.cuda.memory
        touches = [memory.touch_pinned(tensor, writes=False) for tensor in reads]
        touches += [memory.touch_pinned(tensor, writes=True) for tensor in writes]
        self.cuda.queues.touch_by_host(label, filter(None, touches))


def rehearsed(
    adversary: Adversary, *, total: int = 1 << 30, limit: float | None = None, races: bool = True
) -> RehearsedDriver:
    """The engine's driver of a card, on simulated queues; tensors on `sim` are made there from now on.

    Examples
    --------
    >>> driver = rehearsed(Adversary(hasty=frozenset({"h2d"})))
    >>> with driver.stream("gpu").issuing():
    ...     torch.ones(2, device=driver.device).tolist()
    [1.0, 1.0]
    """
    return RehearsedDriver(limit, cuda=Rehearsal(adversary, total=total, races=races), name="sim")
