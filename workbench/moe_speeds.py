"""How fast the routed experts of a layer were, by tokens: who computed, beside the roofline of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from workbench.cost import touched_share

BF16 = 2
"""Bytes of a weight and of an activation [B]."""


@dataclass(frozen=True)
class MoeShape:
    """A layer of routed experts: M, F, E and k."""

    name: str
    model_dim: int
    expert_dim: int
    experts: int
    chosen: int

    def __str__(self) -> str:
        return f"{self.name}, {self.experts} experts of {self.model_dim} x {self.expert_dim}, top {self.chosen}"

    @property
    def sparsity(self) -> float:
        """E / k: how many experts are read, once all are, for each that a token computes with."""
        return self.experts / self.chosen

    def flops(self, tokens: float) -> float:
        """Work [FLOP]: 6 M F k per token."""
        return 6 * self.model_dim * self.expert_dim * self.chosen * tokens

    def bytes(self, tokens: float, touched: float | None = None) -> float:
        """Bytes that have to move in bf16 [B]: the experts touched once, activations in and out.

        bytes = 2 (3 M F E_touched + 2 M T),  E_touched = E (1 - (1 - k / E)^T) unless given
        """
        if touched is None:
            touched = self.experts * float(touched_share(self.experts, self.chosen, tokens))
        return BF16 * (3 * self.model_dim * self.expert_dim * touched + 2 * self.model_dim * tokens)

    def roof(self, tokens: float, read: float, multiply: float, touched: float | None = None) -> float:
        """Most that memory at `read` [B/s] and arithmetic at `multiply` [FLOP/s] allow [FLOP/s]."""
        return min(multiply, self.flops(tokens) / self.bytes(tokens, touched) * read)

    def ridge(self, read: float, multiply: float) -> float:
        """Tokens from which arithmetic takes longer than reading all weights [tokens]; activations are not counted.

            T = multiply / read * E / k

        Examples
        --------
        >>> MoeShape("any", 64, 32, experts=8, chosen=2).ridge(read=1e9, multiply=50e9)
        200.0
        """
        return multiply / read * (BF16 / 2) * self.sparsity


@dataclass(frozen=True)
class MoeSpeeds:
    """Repetitions of several contenders on one layer, interleaved.

    Attributes
    ----------
    shape : MoeShape
    where : str
        Threads, or the GPU.
    read, multiply : float
        Measured rates of reading memory [B/s] and of a large product in bf16 [FLOP/s].
    touched : mapping of tokens to int
        Different experts that these tokens chose.
    runs : mapping of (contender, tokens) to tuple of float
        Seconds per call, in the order of the repetitions [s].
    dropped, disturbed : int
        Repetitions that are not here, and those that are, in which other programs took a noticeable share of the cores.
    """

    shape: MoeShape
    where: str
    read: float
    multiply: float
    touched: Mapping[int, int]
    runs: Mapping[tuple[str, int], tuple[float, ...]]
    dropped: int = 0
    disturbed: int = 0

    def __str__(self) -> str:
        noise = f", {self.disturbed} repetitions disturbed by other programs" if self.disturbed else ""
        return f"{self.shape}; {self.where}{noise}"

    @property
    def contenders(self) -> tuple[str, ...]:
        """Who computed, ours first."""
        return tuple(dict.fromkeys(name for name, _ in self.runs))

    def tokens(self, contender: str) -> tuple[int, ...]:
        """Numbers of tokens that a contender had, rising."""
        return tuple(sorted(tokens for name, tokens in self.runs if name == contender))

    def seconds(self, contender: str, tokens: int) -> float:
        """Median time of a call [s]."""
        return median(self.runs[contender, tokens])

    def flop_rate(self, contender: str, tokens: int) -> float:
        """Median rate [FLOP/s]."""
        return self.shape.flops(tokens) / self.seconds(contender, tokens)

    def roof(self, tokens: int) -> float:
        """The roofline for the experts that were really touched [FLOP/s]."""
        return self.shape.roof(tokens, self.read, self.multiply, self.touched[tokens])

    def faster(self, contender: str, tokens: int, others: tuple[str, ...]) -> list[float]:
        """Times as fast as the best of others, repetition by repetition [1]."""
        rivals = zip(*(self.runs[name, tokens] for name in others), strict=True)
        return [min(them) / own for own, them in zip(self.runs[contender, tokens], rivals, strict=True)]
