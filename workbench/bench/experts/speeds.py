"""Speeds of expert kernels by tokens per expert: rates, shares of the memory's rate, and crossings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


class ExpertRun(NamedTuple):
    """One timed call: seconds per expert [s], and the rate at which memory was read just before [B/s]."""

    seconds: float
    read: float


@dataclass(frozen=True)
class ExpertSpeeds:
    """Runs of several implementations on experts of one size, interleaved.

    Attributes
    ----------
    model_dim, expert_dim, threads : int
        M and F of the experts, and the number of threads.
    weight_bytes : mapping of implementation to int
        Size of one expert in the implementation's format [B].
    runs : mapping of (implementation, tokens per expert) to tuple of ExpertRun
        Runs in the order of the rounds.
    multiply : float
        Rate of fp32 vector multiply-adds that these threads reach [FLOP/s].
    dropped, disturbed : int
        Rounds in which other programs took a noticeable share of the cores: left out, and kept nevertheless.
    """

    model_dim: int
    expert_dim: int
    threads: int
    weight_bytes: Mapping[str, int]
    runs: Mapping[tuple[str, int], tuple[ExpertRun, ...]]
    multiply: float
    dropped: int = 0
    disturbed: int = 0

    def __str__(self) -> str:
        rounds = len(next(iter(self.runs.values())))
        noise = f", {self.disturbed} of them disturbed by other programs" if self.disturbed else ""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"experts {self.model_dim} x {self.expert_dim}, {threads}, {rounds} rounds{noise}"

    @property
    def contenders(self) -> tuple[str, ...]:
        """Names of the implementations that are set side by side, in the order of `weight_bytes`."""
        return tuple(self.weight_bytes)

    def tokens(self, implementation: str) -> tuple[int, ...]:
        """Tokens per expert at which an implementation was measured, in rising order."""
        return tuple(sorted(tokens for name, tokens in self.runs if name == implementation))

    @property
    def read(self) -> float:
        """Median rate of reading memory in order [B/s]."""
        return median(run.read for runs in self.runs.values() for run in runs)

    def flops(self, tokens: int) -> int:
        """Work of one expert [FLOP]: 6 M F per token."""
        return 6 * self.model_dim * self.expert_dim * tokens

    def seconds(self, implementation: str, tokens: int) -> float:
        """Median time per expert [s]."""
        return median(run.seconds for run in self.runs[implementation, tokens])

    def flop_rate(self, implementation: str, tokens: int) -> float:
        """Median rate [FLOP/s]."""
        return self.flops(tokens) / self.seconds(implementation, tokens)

    def memory_limit(self, implementation: str, tokens: int) -> float:
        """Rate of an expert whose time is one reading of its weights [FLOP/s]."""
        return self.flops(tokens) * self.read / self.weight_bytes[implementation]

    def memory_share(self, implementation: str, tokens: int = 1) -> float:
        """Median of the rate of reading weights over the memory's rate just before each run [1]."""
        size = self.weight_bytes[implementation]
        return median(size / run.seconds / run.read for run in self.runs[implementation, tokens])

    def overtakes(self, implementation: str, other: str) -> int | None:
        """Fewest tokens per expert from which on one is never slower than another; None if slower at the last."""
        shared = sorted({*self.tokens(implementation)} & {*self.tokens(other)}, reverse=True)
        first = None
        for tokens in shared:
            if self.seconds(implementation, tokens) > self.seconds(other, tokens):
                break
            first = tokens
        return first
