"""One case of the gpu benchmark: operands of a size, our kernel, its reference, baselines and declared work."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

EXACT = 0.0
"""Relative Frobenius error of values that are only moved."""
ROUNDED = 4e-3
"""Relative Frobenius error of values that are rounded to bf16 once."""
TWICE = 8e-3
"""Relative Frobenius error of values that pass two products in bf16."""


class Size(enum.Enum):
    """Size of the operands: TINY is interpreted, CHECK is compared with float64 on the CPU, FULL is timed."""

    TINY = 0
    CHECK = 1
    FULL = 2

    def of(self, tiny: int, check: int, full: int) -> int:
        """The number for this size."""
        return (tiny, check, full)[self.value]


@dataclass(frozen=True)
class Call:
    """One call of a kernel on given operands.

    Attributes
    ----------
    ours : callable
        Our kernel; takes the backend.
    exact : callable
        Reference answer in float64, on the CPU.
    flops, bytes : int
        Declared work.
    limit : float
        Relative Frobenius error that is allowed.
    peers : mapping
        Baselines that compute the same, by name.
    """

    ours: Callable[[str | None], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    flops: int
    bytes: int
    limit: float
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A named case, which makes its operands on a device."""

    name: str
    make: Callable[[Size, torch.device], Call]


def normal(device: torch.device, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed bf16."""
    return (torch.randn(shape, device=device) * scale).bfloat16()


def host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of tensors on the CPU."""
    return [tensor.cpu() for tensor in tensors]
