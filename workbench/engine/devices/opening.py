"""The choice of the device that computes the gpu lane, and its error where memory is out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.core.errors import CapacityError
from workbench.core.units import format_bytes
from workbench.engine.devices.cuda import CudaDriver
from workbench.engine.devices.driver import Driver
from workbench.engine.devices.host import HostDriver
from workbench.hardware import Machine
from workbench.serving.capacity import ledger
from workbench.serving.prepared import Prepared


def open_driver(machine: Machine, *, on_card: bool) -> Driver:
    """The card, of whose memory torch may take what the machine's GPU has, or the host.

    Raises
    ------
    EngineError
        If torch finds no card, or it has less memory.
    """
    return CudaDriver(machine.gpu.memory) if on_card else HostDriver()


@contextmanager
def ledger_told(prepared: Prepared) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that names the ledger's largest entries."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        counted = ledger(prepared).gpu
        most = sorted(counted.entries, key=lambda entry: -entry.bytes)[:3]
        raise CapacityError(
            f"the card has {format_bytes(counted.capacity)} for this run and {format_bytes(counted.total)} are counted "
            f"({', '.join(f'{entry.name} {format_bytes(entry.bytes)}' for entry in most)}); torch, which leaves gaps "
            "between tensors, needed more. Give the machine a larger limit(gpu_memory=...), or Memory a smaller "
            "kv_capacity."
        ) from error
