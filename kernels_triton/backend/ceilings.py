"""What a GPU and its link to the host can do at most: copies, matrix products, and transfers, each measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from ..declarations import public


def timed(work: Callable[[], object], device: torch.device, *, seconds: float = 0.3, least: int = 3) -> list[float]:
    """Seconds of each of several runs, after one that does not count; by CUDA events where there is a GPU.

    Before each run 256 MB are overwritten, so that no run finds its operands in the cache.

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
    runs, until = list[float](), time.perf_counter() + seconds
    while len(runs) < least or time.perf_counter() < until:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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
    """Bytes per second read and written by a copy of `size` bytes within the device's memory.

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
    """Flops per second of torch's product of two square matrices.

    Examples
    --------
    >>> matmul_rate(torch.device("cpu"), torch.float32, 64) > 0
    True
    """
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / median(timed(lambda: a @ b, device))


@public
def link_rates(device: torch.device, size: int = 1 << 29) -> dict[str, float]:
    """Bytes per second between host and device, by direction and kind of host memory; `both` is each way at once.

    Examples
    --------
    >>> sorted(link_rates(torch.device("cpu"), 1 << 20))
    ['both', 'd2h', 'd2h pageable', 'h2d', 'h2d pageable']
    """
    there, back = torch.ones(2, size, dtype=torch.int8, device=device)
    rates = {}
    for kind, pinned in (("", True), (" pageable", False)):
        host = _host(size, device, pinned)
        rates[f"h2d{kind}"] = size / median(_moved(lambda host=host: there.copy_(host, non_blocking=True), device))  # type: ignore[misc]
        rates[f"d2h{kind}"] = size / median(_moved(lambda host=host: host.copy_(there, non_blocking=True), device))  # type: ignore[misc]
    one, other = _host(size, device, True), _host(size, device, True)
    rates["both"] = size / median(_moved(lambda: _both_ways(there, one, other, back), device))
    return rates


def _host(size: int, device: torch.device, pinned: bool) -> torch.Tensor:
    return torch.ones(size, dtype=torch.int8, pin_memory=pinned and device.type == "cuda")


def _moved(work: Callable[[], object], device: torch.device, least: int = 3) -> list[float]:
    """Wall seconds until the device has done it; the first run does not count."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return [_wall(finished) for _ in range(least + 1)][1:]


def _both_ways(there: torch.Tensor, one: torch.Tensor, other: torch.Tensor, back: torch.Tensor) -> None:
    if there.device.type != "cuda":
        there.copy_(one)
        other.copy_(back)
        return
    streams = torch.cuda.Stream(there.device), torch.cuda.Stream(there.device)
    for stream, target, source in ((streams[0], there, one), (streams[1], other, back)):
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
