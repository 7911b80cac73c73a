"""Measured ceilings of a GPU and of its link to the host: copies, matrix products and transfers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from ..declarations import public


def timed(work: Callable[[], object], device: torch.device, *, seconds: float = 0.3, least: int = 3) -> list[float]:
    """Time several runs after a warm-up [s each], on a GPU by CUDA events.

    256 MB are overwritten before each run on a GPU, so that no run finds its operands in the cache.

    Examples
    --------
    >>> len(timed(lambda: None, torch.device("cpu"), seconds=0.0))
    3
    """
    work()
    if device.type != "cuda":
        return [_wall(work) for _ in range(least)]
    cold = torch.empty(1 << 28, dtype=torch.int8, device=device)
    torch.cuda.synchronize(device)
    runs: list[float] = []
    until = time.perf_counter() + seconds
    while len(runs) < least or time.perf_counter() < until:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        cold.zero_()
        begin.record()
        work()
        end.record()
        end.synchronize()
        runs.append(begin.elapsed_time(end) / 1e3)
    return runs


def _wall(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@public
def copy_rate(device: torch.device, size: int = 1 << 31) -> float:
    """Measure a copy of `size` bytes within the device's memory: bytes read and written per second.

    Examples
    --------
    >>> copy_rate(torch.device("cpu"), 1 << 20) > 0
    True
    """
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(timed(lambda: target.copy_(source), device))


@public
def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """Measure torch's product of two square matrices: flops per second.

    Examples
    --------
    >>> matmul_rate(torch.device("cpu"), torch.float32, 64) > 0
    True
    """
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / median(timed(lambda: a @ b, device))


@public
def link_rates(device: torch.device, size: int = 1 << 29) -> dict[str, float]:
    """Measure bytes per second between host and device, by direction and kind of host memory.

    `both` is the rate of each direction while both are busy.

    Examples
    --------
    >>> sorted(link_rates(torch.device("cpu"), 1 << 20))
    ['both', 'd2h', 'd2h pageable', 'h2d', 'h2d pageable']
    """
    target, source = torch.ones(2, size, dtype=torch.int8, device=device)
    rates = {}
    for kind, pinned in (("", True), (" pageable", False)):
        host = _host(size, device, pinned)
        rates[f"h2d{kind}"] = size / median(_transfers(partial(target.copy_, host, non_blocking=True), device))
        rates[f"d2h{kind}"] = size / median(_transfers(partial(host.copy_, target, non_blocking=True), device))
    host_source = _host(size, device, True)
    host_target = _host(size, device, True)
    both_ways = partial(_both_ways, target, host_source, host_target, source)
    rates["both"] = size / median(_transfers(both_ways, device))
    return rates


def _host(size: int, device: torch.device, pinned: bool) -> torch.Tensor:
    return torch.ones(size, dtype=torch.int8, pin_memory=pinned and device.type == "cuda")


def _transfers(work: Callable[[], object], device: torch.device, runs: int = 3) -> list[float]:
    """Wall time of each of several runs until the device has finished [s]; a warm-up is not counted."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return [_wall(finished) for _ in range(runs + 1)][1:]


def _both_ways(
    target: torch.Tensor, host_source: torch.Tensor, host_target: torch.Tensor, source: torch.Tensor
) -> None:
    """Copy from and to the host at once, each on a stream of its own."""
    copies = ((target, host_source), (host_target, source))
    if target.device.type != "cuda":
        for written, read in copies:
            written.copy_(read)
        return
    streams = [torch.cuda.Stream(target.device) for _ in copies]
    for stream, (written, read) in zip(streams, copies, strict=True):
        with torch.cuda.stream(stream):
            written.copy_(read, non_blocking=True)
