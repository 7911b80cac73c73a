"""Rates of a GPU and of its link to the host, for the record of `calibrate`."""

from __future__ import annotations

import torch

from workbench.kernels import copy_rate, link_rates, matmul_rate


def card_rates() -> tuple[tuple[str, float], ...]:
    """Measured ceilings of the GPU at hand, by name; nothing where there is none. Takes a few seconds."""
    if not torch.cuda.is_available():
        return ()
    return ceilings(torch.device("cuda", torch.cuda.current_device()), copied=1 << 31, moved=1 << 29, matrix=8192)


def ceilings(device: torch.device, *, copied: int, moved: int, matrix: int) -> tuple[tuple[str, float], ...]:
    """The same of any device, with so many bytes copied and moved and matrices of this size.

    Examples
    --------
    >>> names = [name for name, _ in ceilings(torch.device("cpu"), copied=1 << 16, moved=1 << 16, matrix=32)]
    >>> names[:3]
    ['GPU memory copied, GB/s', 'GPU bf16 product, TFLOP/s', 'GPU link h2d, GB/s']
    """
    product = matmul_rate(device, torch.bfloat16, matrix)
    link = ((f"GPU link {name}, GB/s", rate / 1e9) for name, rate in link_rates(device, moved).items())
    return (
        ("GPU memory copied, GB/s", copy_rate(device, copied) / 1e9),
        ("GPU bf16 product, TFLOP/s", product / 1e12),
        *link,
    )
