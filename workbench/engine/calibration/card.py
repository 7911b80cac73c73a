"""Measures this computer with its card, for `Machine.local`."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import psutil
import torch

from workbench.engine.calibration.measure import (
    attention_rate,
    cpu_name,
    cpu_overhead,
    dispatch,
    gemm_rates,
    operation_overhead,
    seconds_of,
)
from workbench.engine.devices.cuda import CudaDriver
from workbench.engine.devices.driver import Stream
from workbench.engine.loading.stored import host_memory
from workbench.hardware import Device, Link, Machine, usable_cores
from workbench.hardware.profile import Cores
from workbench.kernels import copy_rate, matmul_rate

_CONTEXT = 8192
"""Tokens of a sequence whose keys and values no cache holds: 32 of them take 268 MB."""
_KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Sizes:
    """Bytes that are copied within the card's memory and over its link, rows of matrices that are multiplied, and the
    tokens that attention on the CPU reads of a sequence."""

    copied: int = 1 << 31
    moved: int = 1 << 29
    matrix: int = 8192
    context: int = _CONTEXT


def measure_card(driver: CudaDriver, sizes: Sizes | None = None) -> Machine:
    """Rates of this computer with its card; the driver is closed.

    gpu lane: copies within the card's memory and torch's products of large matrices. cpu lane: all cores but those
    that issue and copy; the decode-attention kernel's KV rate, and torch GEMM. link: copies from and to pinned memory.
    Fixed times per operation and per hand-over come from tiny operations and empty tasks.
    """
    sizes = sizes or Sizes()
    try:
        link, both = _link(driver, sizes.moved)
        per_op = operation_overhead(driver)
        with driver.stream("gpu").issuing():
            flops = tuple((name, matmul_rate(driver.device, kind, sizes.matrix)) for name, kind in _KINDS.items())
            memory = copy_rate(driver.device, sizes.copied)
    finally:
        driver.close()
    cores = Cores.beside_card(usable_cores())
    torch.set_num_threads(cores.cpu)
    reading = attention_rate(sizes.context)
    name = f"Numba and torch on {cores.cpu} core(s)"
    cpu = Device(name, float(psutil.virtual_memory().total), reading, gemm_rates(cores.cpu), cpu_overhead())
    return Machine(
        f"local: {driver.name} and {cpu_name()}",
        Device(driver.name, driver.memory, memory, flops, per_op),
        cpu,
        link,
        host=platform.node(),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        cores=cores,
        rates=(("link, both directions at once, GB/s each", both / 1e9),),
    )


def _link(driver: CudaDriver, size: int) -> tuple[Link, float]:
    """The link, and the rate of each direction while both are busy [B/s]."""
    host, other = (driver.pin(host_memory((size,), torch.uint8).fill_(1)) for _ in range(2))
    there, from_there = (driver.empty((size,), torch.uint8) for _ in range(2))
    down = driver.stream("h2d"), there, host
    up = driver.stream("d2h"), other, from_there
    h2d, d2h, both = (size / seconds_of(partial(_copy, copies)) for copies in ([down], [up], [down, up]))
    return Link(h2d, d2h, dispatch(driver)), both


def _copy(copies: Sequence[tuple[Stream, torch.Tensor, torch.Tensor]]) -> None:
    """Make copies at once, each on its stream, and wait for all."""
    for stream, target, source in copies:
        stream.copy(target, source)
    for stream, _, _ in copies:
        stream.finish()
