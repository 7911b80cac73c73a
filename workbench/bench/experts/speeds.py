"""How fast expert kernels were, by tokens per expert: rates, shares of the memory's rate, who overtakes whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


class Run(NamedTuple):
    """One timed call: seconds per expert [s], and the rate at which memory was read just before [B/s]."""

    seconds: float
    read: float


@dataclass(frozen=True)
class ExpertSpeeds:
    """Runs of several contenders on experts of one size, interleaved.

    Attributes
    ----------
    model_dim, expert_dim, threads : int
        M and F of the experts, and the threads that computed.
    weight_bytes : mapping of contender to int
        Size of one expert in the contender's format [B].
    runs : mapping of (contender, tokens per expert) to tuple of Run
        In the order of the rounds.
    multiply : float
        Multiply-adds of fp32 vectors that these threads reach [FLOP/s].
    dropped, disturbed : int
        Rounds that are not here, and rounds that are, in which other programs took a noticeable share of the cores.
    """

    model_dim: int
    expert_dim: int
    threads: int
    weight_bytes: Mapping[str, int]
    runs: Mapping[tuple[str, int], tuple[Run, ...]]
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
        """Who computed, in the order given."""
        return tuple(self.weight_bytes)

    def tokens(self, contender: str) -> tuple[int, ...]:
        """Tokens per expert at which a contender was measured, rising."""
        return tuple(sorted(tokens for name, tokens in self.runs if name == contender))

    @property
    def read(self) -> float:
        """Median rate of reading memory in order [B/s]."""
        return median(run.read for runs in self.runs.values() for run in runs)

    def flops(self, tokens: int) -> int:
        """Work of one expert [FLOP]: 6 M F per token."""
        return 6 * self.model_dim * self.expert_dim * tokens

    def seconds(self, contender: str, tokens: int) -> float:
        """Median time per expert [s]."""
        return median(run.seconds for run in self.runs[contender, tokens])

    def flop_rate(self, contender: str, tokens: int) -> float:
        """Median rate [FLOP/s]."""
        return self.flops(tokens) / self.seconds(contender, tokens)

    def memory_limit(self, contender: str, tokens: int) -> float:
        """Rate at which an expert is done when its weights have been read once [FLOP/s]."""
        return self.flops(tokens) * self.read / self.weight_bytes[contender]

    def memory_share(self, contender: str, tokens: int = 1) -> float:
        """Rate of reading the weights over the rate measured just before each run, median [1]."""
        size = self.weight_bytes[contender]
        return median(size / run.seconds / run.read for run in self.runs[contender, tokens])

    def overtakes(self, contender: str, other: str) -> int | None:
        """Fewest tokens per expert from which on a contender is never slower than another; None if it is at the end."""
        shared = sorted({*self.tokens(contender)} & {*self.tokens(other)}, reverse=True)
        first = None
        for tokens in shared:
            if self.seconds(contender, tokens) > self.seconds(other, tokens):
                break
            first = tokens
        return first
