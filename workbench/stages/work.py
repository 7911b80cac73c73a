"""The cost of work. The seconds of every task are computed here and nowhere else."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.core.units import STORED_INT4, WEIGHT_BYTES
from workbench.hardware import Device, Interconnect
from workbench.hardware.profile import OpTime

Numbers = TypeVar("Numbers", float, npt.NDArray[np.float64])


class Rows(NamedTuple):
    """Counts of the rows that a stage computes for a batch; the counts of its parts add up.

    Attributes
    ----------
    prefill, decode : float
        Tokens of each class.
    pairs : float
        Query-key pairs of the causal prefill attention; a sliding window caps them.
    context : float
        KV entries that the decode tokens read, the new ones included; a sliding window caps them.
    emits : float
        At the head, the tokens that it samples; at a layer, the sequences that pass it.
    before : float
        KV entries of earlier chunks that prefills read.
    scored, scanned : float
        Query-key pairs of prefills, and KV entries of decodes, that an index scores, where it chooses what attention
        reads.
    """

    prefill: float = 0
    decode: float = 0
    pairs: float = 0
    context: float = 0
    emits: float = 0
    before: float = 0
    scored: float = 0
    scanned: float = 0

    @property
    def tokens(self) -> float:
        """All tokens, prefill and decode."""
        return self.prefill + self.decode

    def plus(self, other: Rows) -> Rows:
        """The component-wise sum."""
        return Rows(*(a + b for a, b in zip(self, other, strict=True)))

    def at(self, place: int) -> Rows:
        """Rows at a layer, at the embedding (-1) or at the head: these everywhere, because prompts are whole."""
        return self

    @property
    def cut(self) -> CutRows | None:
        """The rows of chunks that pass only some layers; None for whole prompts."""
        return None


class CutRows(NamedTuple):
    """Counts of rows for a batch whose prefills are chunks, which may pass only some of the layers.

    Attributes
    ----------
    passed, others, head : Rows
        Rows at a layer that the prefills pass, at any other layer, and at the head.
    layers : range
        Layers that the prefills pass.
    stack : int
        Number of layers of the model.
    """

    passed: Rows
    others: Rows
    head: Rows
    layers: range
    stack: int

    def at(self, place: int) -> Rows:
        """See `Rows.at`."""
        if place >= self.stack:
            return self.head
        return self.passed if max(place, 0) in self.layers else self.others

    @property
    def cut(self) -> CutRows:
        """See `Rows.cut`."""
        return self


class KindRows(NamedTuple):
    """Counts of rows for a model some of whose layers have a sliding window: `kinds` has a number per layer.

    Attributes
    ----------
    each : tuple of Rows or CutRows
        Rows at the layers of each kind.
    kinds : tuple of int
        Place in `each` of every layer's rows.
    """

    each: tuple[Rows | CutRows, ...]
    kinds: tuple[int, ...]

    def at(self, place: int) -> Rows:
        """See `Rows.at`."""
        layer = min(max(place, 0), len(self.kinds) - 1)
        return self.each[self.kinds[layer]].at(place)

    @property
    def cut(self) -> CutRows | None:
        """See `Rows.cut`."""
        return self.each[0].cut


PartRows = Rows | CutRows | KindRows
"""Counts of the rows of one part of a batch, layer by layer."""


class Precision(NamedTuple):
    """Number formats in use.

    Attributes
    ----------
    weights, kv : str
        Formats of the weights and activations, and of the KV cache ("fp32", "bf16" or "fp16").
    experts, others : str or None
        Formats in which the routed experts and the layers' other weights are stored, if smaller than `weights`.
    group : int or None
        Columns of routed experts that share a scale in fp32; None if the format's bytes are all.
    as_stored : bool
        True if weights have the formats that their model names for single operations.
    """

    weights: str
    kv: str
    experts: str | None = None
    others: str | None = None
    group: int | None = None
    as_stored: bool = True

    @property
    def expert_bytes(self) -> float:
        """Bytes per weight of the routed experts, with its share of a scale."""
        return WEIGHT_BYTES[self.experts or self.weights] + (4 / self.group if self.group else 0)

    @property
    def other_bytes(self) -> float:
        """Bytes per weight of the layers' other weights."""
        return WEIGHT_BYTES[self.others or self.weights]

    def keeps_int4(self, stored: str | None) -> bool:
        """True if routed experts stay in the INT4 of a checkpoint, whose format `ModelConfig.expert_dtype` names."""
        return STORED_INT4.get(stored or "") == (self.experts, self.group)


class Work(NamedTuple):
    """Work of one operation: FLOP in `dtype`, and bytes between the device's memory and its cores."""

    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "bf16"


def seconds(work: Work, device: Device) -> float:
    """Roofline time of an operation [s]: max(FLOP/rate, bytes/bandwidth) plus the device's fixed time per operation.

    An operation without work takes no time.
    """
    flops, size, dtype = work
    if not (flops or size):
        return 0.0
    computing = flops / device.flop_rate(dtype)
    moving = size / device.bandwidth
    return (computing if computing > moving else moving) + device.overhead


def measured_seconds(time: OpTime, rows: Rows, share: float = 1.0) -> float:
    """Time of one call of an operation that was measured on this computer, for rows of its class [s].

    Decodes of which only a share of their experts is computed count as that share of a token each: below one token,
    time is in proportion. The number of rows, not that of shares, decides which kernels such a call uses.
    """
    if rows.decode and time.decodes:
        base = _at(time.decodes, time.decode_seconds, rows.decode)
        if rows.prefill:
            base += _at(time.tokens, time.seconds, rows.tokens) - _at(time.tokens, time.seconds, rows.decode)
    else:
        base = _of_share(time, rows, share)
    return base + _beyond_tokens(time, rows, rows.emits - rows.decode) if rows.tokens else 0.0


def _of_share(time: OpTime, rows: Rows, share: float) -> float:
    """Time of the tokens of a call, of whose decodes a share of the experts is computed.

    A call of more than `few` rows never uses the kernels for few rows. Below the first point of such calls, the line
    through their first two points is extrapolated; the time is at least in proportion to the first point.
    """
    tokens = rows.prefill + share * rows.decode
    if not tokens:
        return 0.0
    if share < 1 and 0 < time.few < rows.tokens:
        first = bisect(time.tokens, time.few)
        points = time.tokens[first:]
        seconds = time.seconds[first:]
        if len(points) > 1 and tokens < points[0]:
            slope = _slopes(points, seconds)[0]
            return max(seconds[0] * tokens / points[0], seconds[0] - slope * (points[0] - tokens))
    return _at(time.tokens, time.seconds, tokens)


def _at(points: Sequence[float], seconds: Sequence[float], count: float) -> float:
    """Time of so many tokens, linear between the points and beyond the last."""
    place = min(bisect(points, count), len(points) - 1)
    if place == 0:
        return seconds[0] * min(1.0, count / min(1.0, points[0]))
    low = points[place - 1]
    high = points[place]
    share = (count - low) / (high - low)
    return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])


def least_seconds(time: OpTime, rows: Rows, share: float = 1.0) -> float:
    """Least time of these rows, however they are split into calls: every token at the best rate of any call [s].

    `share` is that of `measured_seconds`.
    """
    beyond = _beyond_tokens(time, rows, rows.emits - rows.decode)
    rate = _best_rate(time.tokens, time.seconds)
    if not time.decodes:
        return rate * (rows.prefill + share * rows.decode) + beyond
    beside = min(rate, *_slopes(time.tokens, time.seconds)) if time.tokens[0] <= 1 else 0.0  # flat before the first
    return beside * rows.prefill + _best_rate(time.decodes, time.decode_seconds) * rows.decode + beyond


def _best_rate(points: Sequence[float], seconds: Sequence[float]) -> float:
    """Least seconds per token of any call."""
    return min(*_slopes(points[-2:], seconds[-2:]), *(s / t for s, t in zip(seconds, points, strict=True)))


def _slopes(points: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Seconds that each further token takes between two points."""
    pairs = pairwise(zip(points, seconds, strict=True))
    return [(after - before) / (high - low) for (low, before), (high, after) in pairs]


def _beyond_tokens(time: OpTime, rows: Rows, prompts: float) -> float:
    of_prefill = time.per_prompt * prompts + time.per_pair * rows.pairs
    return of_prefill + time.per_context * rows.context


def copy_seconds(size: float, rate: float, overhead: float = 0.0) -> float:
    """Time of one copy of `size` bytes over a link of `rate` B/s [s]."""
    return size / rate + overhead if size else 0.0


def reduce_scatter_seconds(size: float, count: int, between: Interconnect) -> float:
    """Time in which n = `count` GPUs or sockets add up partial sums of `size` bytes; each keeps a share of the sum [s].

        t = (n - 1) (size / (n rate) + latency)

    Notes
    -----
    The shares travel around a ring. An all-reduce takes twice as long: the finished shares travel around it once more,
    until every GPU or socket has the whole sum.
    """
    return (count - 1) * (size / (count * between.rate) + between.latency) if size else 0.0


def touched_share(experts: Numbers, chosen: Numbers, tokens: Numbers) -> Numbers:
    """Share of the experts that `tokens` tokens touch under uniform independent routing: 1 - (1 - k/E)^T.

    Takes numbers or arrays. Exact for independent uniform tokens; an upper bound for real, skewed routing (MoE-CAP).
    """
    share: Numbers = 1.0 - (1.0 - chosen / experts) ** tokens
    return share
