"""What work costs: the only place where a task's seconds are computed."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from typing import NamedTuple

from workbench.hardware import Device
from workbench.profile import OpTime


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
    """Number formats in use: of the weights and activations, and of the KV cache ("fp32", "bf16" or "fp16")."""

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


def measured_seconds(time: OpTime, rows: Rows) -> float:
    """Time of one call of an operation that was measured on this computer, for rows of its class [s]."""
    tokens, points, prompts = rows.tokens, time.tokens, rows.emits - rows.decode
    if not tokens:
        return 0.0
    place = min(bisect(points, tokens), len(points) - 1)
    if place == 0:
        base = time.seconds[0]
    else:
        low, high = points[place - 1], points[place]
        share = (tokens - low) / (high - low)
        base = time.seconds[place - 1] + share * (time.seconds[place] - time.seconds[place - 1])
    return base + _beyond_tokens(time, rows, prompts) + (time.decoding if rows.decode else 0.0)


def least_seconds(time: OpTime, rows: Rows) -> float:
    """What no split of these rows into calls can beat: every token at the best rate of any call."""
    steepest_gain = (time.seconds[-1] - time.seconds[-2]) / (time.tokens[-1] - time.tokens[-2])
    per_token = min(steepest_gain, *(s / t for s, t in zip(time.seconds, time.tokens, strict=True)))
    return per_token * rows.tokens + _beyond_tokens(time, rows, rows.emits - rows.decode)


def _beyond_tokens(time: OpTime, rows: Rows, prompts: float) -> float:
    of_prefill = time.per_prompt * prompts + time.per_pair * rows.pairs
    return of_prefill + time.per_decode * rows.decode + time.per_context * rows.context


def copy_seconds(size: float, rate: float, overhead: float = 0.0) -> float:
    """Time of one copy of `size` bytes over a link of `rate` B/s [s]."""
    return size / rate + overhead if size else 0.0


def expected_experts(experts: int, chosen: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens touch under uniform independent routing: E (1 - (1 - k/E)^T).

    Exact for independent uniform tokens; an upper bound for real, skewed routing (MoE-CAP; SPEC 6).
    """
    return float(experts * (1.0 - (1.0 - chosen / experts) ** tokens))
