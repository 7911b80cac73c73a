"""How fast the routed experts of a layer were, by tokens: who computed, beside the roofline of the tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from workbench.core.records import from_plain
from workbench.models import ModelConfig
from workbench.stages import touched_share

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

    @classmethod
    def of(cls, model: ModelConfig) -> MoeShape:
        """The routed experts of a model's layers."""
        sizes = (model.hidden_size, model.expert_width, model.num_local_experts, model.num_experts_per_tok)
        return cls(model.name, *sizes)

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

    def between_bytes(self, tokens: float, *, fused: bool) -> float:
        """Bytes written between the products of one layer and read again [B].

        fused: the activated rows and the answers, 4 T k (F + M). Otherwise also the gathered rows, gates and ups before
        the activation, and the answers once more with their weights: 4 T k (3 F + 3 M).
        """
        each = 2 * BF16 * self.chosen * tokens * (self.expert_dim + self.model_dim)
        return each if fused else 3 * each

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
class MoeRun:
    """Calls of one contender with so many tokens, which chose `touched` different experts; seconds of each [s]."""

    contender: str
    tokens: int
    touched: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class MoeSpeeds:
    """Repetitions of several contenders on one layer, interleaved.

    Attributes
    ----------
    shape : MoeShape
    where : str
        Threads, or the GPU.
    read, multiply : float
        Measured rates of reading memory [B/s] and of arithmetic, as a large product in bf16 has [FLOP/s].
    runs : tuple of MoeRun
        Ours first; seconds in the order of the repetitions.
    dropped, disturbed : int
        Repetitions that are not here, and those that are, in which other programs took a noticeable share of the cores.
    recorded : str
        When and where, if not now and here.
    """

    shape: MoeShape
    where: str
    read: float
    multiply: float
    runs: tuple[MoeRun, ...]
    dropped: int = 0
    disturbed: int = 0
    recorded: str = ""

    def __str__(self) -> str:
        noise = f", {self.disturbed} repetitions disturbed by other programs" if self.disturbed else ""
        return f"{self.shape}; {self.where}{noise}" + (f"; recorded {self.recorded}" if self.recorded else "")

    @property
    def contenders(self) -> tuple[str, ...]:
        """Who computed."""
        return tuple(dict.fromkeys(run.contender for run in self.runs))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Numbers of tokens, rising."""
        return tuple(sorted({run.tokens for run in self.runs}))

    def run(self, contender: str, tokens: int) -> MoeRun:
        """The calls of one contender."""
        return next(run for run in self.runs if (run.contender, run.tokens) == (contender, tokens))

    def seconds(self, contender: str, tokens: int) -> float:
        """Median time of a call [s]."""
        return median(self.run(contender, tokens).seconds)

    def flop_rate(self, contender: str, tokens: int) -> float:
        """Median rate [FLOP/s]."""
        return self.shape.flops(tokens) / self.seconds(contender, tokens)

    def roof(self, tokens: int) -> float:
        """The roofline for the experts that were really touched [FLOP/s]."""
        touched = next(run.touched for run in self.runs if run.tokens == tokens)
        return self.shape.roof(tokens, self.read, self.multiply, touched)

    def memory_share(self, contender: str, tokens: int) -> float:
        """Rate at which what has to move was moved, over the measured rate of memory [1]."""
        run = self.run(contender, tokens)
        return self.shape.bytes(tokens, run.touched) / self.seconds(contender, tokens) / self.read

    def faster(self, contender: str, tokens: int, others: Sequence[str]) -> list[float]:
        """Times as fast as the one of the others that is fastest in the median, repetition by repetition [1].

        The best of each repetition would be the luckier of several, which equals of ours would lose to.
        """
        rival = min(others, key=lambda name: self.seconds(name, tokens))
        both = zip(self.run(contender, tokens).seconds, self.run(rival, tokens).seconds, strict=True)
        return [theirs / own for own, theirs in both]


def recorded_speeds(path: Path) -> list[MoeSpeeds]:
    """What `bench moe --json` wrote, marked as recorded."""
    record = json.loads(path.read_text(encoding="utf-8"))
    said = f"{record['date'][:10]} on {record['machine']}"
    return [replace(from_plain(MoeSpeeds, row), recorded=said) for row in record["rows"]]
