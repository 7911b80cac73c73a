"""What work costs: the only place where a task's seconds are computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from workbench.hardware import Device


class Rows(NamedTuple):
    """What a batch, or a part of one, puts on a stage; the counts of disjoint parts add up.

    Attributes
    ----------
    prefill, decode : float
        Tokens of each class.
    pairs : float
        Query-key pairs of the causal prefill attention.
    context : float
        KV entries that the decode tokens read, the new ones included.
    emits : float
        Tokens that the head samples.
    """

    prefill: float = 0
    decode: float = 0
    pairs: float = 0
    context: float = 0
    emits: float = 0

    @property
    def tokens(self) -> float:
        """All tokens, prefill and decode."""
        return self.prefill + self.decode

    def plus(self, other: Rows) -> Rows:
        """Component-wise sum."""
        return Rows(*(a + b for a, b in zip(self, other, strict=True)))


class Precision(NamedTuple):
    """Number formats in use: of the weights and activations, and of the KV cache ("fp32" or "bf16")."""

    weights: str
    kv: str


class Work(NamedTuple):
    """What one operation does: FLOP in `dtype`, and bytes between the device's memory and its cores."""

    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "bf16"


def seconds(work: Iterable[Work], device: Device) -> float:
    """Roofline time of operations that run one after the other [s]: sum of max(FLOP/rate, bytes/bandwidth).

    Operations without work cost nothing, not even the device's fixed time per operation.
    """
    total = 0.0
    for flops, size, dtype in work:
        if flops or size:
            total += max(flops / device.flop_rate(dtype), size / device.bandwidth) + device.overhead
    return total


def copy_seconds(size: float, rate: float, overhead: float = 0.0) -> float:
    """Time of one copy of `size` bytes over a link of `rate` B/s [s]."""
    return size / rate + overhead if size else 0.0


def expected_experts(experts: int, chosen: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens touch under uniform independent routing: E (1 - (1 - k/E)^T).

    Exact for independent uniform tokens; an upper bound for real, skewed routing (MoE-CAP; SPEC 6).
    """
    return float(experts * (1.0 - (1.0 - chosen / experts) ** tokens))
