"""Speeds of a layer's routed experts by tokens and implementation, with the roofline of the tokens."""

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
    """Shape of a layer of routed experts: M, F, E and k."""

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
        """Experts read, if all are, per expert that a token computes with [1]: E / k."""
        return self.experts / self.chosen

    def flops(self, tokens: float) -> float:
        """Work [FLOP]: 6 M F k per token."""
        return 6 * self.model_dim * self.expert_dim * self.chosen * tokens

    def bytes(self, tokens: float, touched: float | None = None) -> float:
        """Bytes that have to move in bf16 [B]: the weights of the touched experts once, activations in and out.

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
        """Tokens from which on arithmetic takes longer than reading all weights; activations are not counted.

            T = multiply / read * E / k

        Examples
        --------
        >>> MoeShape("any", 64, 32, experts=8, chosen=2).ridge(read=1e9, multiply=50e9)
        200.0
        """
        return multiply / read * (BF16 / 2) * self.sparsity


@dataclass(frozen=True)
class MoeRun:
    """Calls of one implementation: tokens, the number of different experts they chose, and seconds of each call [s]."""

    contender: str
    tokens: int
    touched: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class MoeSpeeds:
    """Repetitions of several implementations on one layer, interleaved.

    Attributes
    ----------
    shape : MoeShape
    where : str
        Number of threads, or name of the GPU.
    read, multiply : float
        Measured rates of reading memory [B/s] and of arithmetic in a large product in bf16 [FLOP/s].
    runs : tuple of MoeRun
        Runs of our kernel first; seconds in the order of the repetitions.
    dropped, disturbed : int
        Repetitions in which other programs took a noticeable share of the cores: left out, and kept nevertheless.
    recorded : str
        Date and machine of speeds read from a record; empty for new ones.
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
        """Names of the implementations that are set side by side."""
        return tuple(dict.fromkeys(run.contender for run in self.runs))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Numbers of tokens, in rising order."""
        return tuple(sorted({run.tokens for run in self.runs}))

    def run(self, implementation: str, tokens: int) -> MoeRun:
        """The calls of one implementation."""
        return next(run for run in self.runs if (run.contender, run.tokens) == (implementation, tokens))

    def seconds(self, implementation: str, tokens: int) -> float:
        """Median time of a call [s]."""
        return median(self.run(implementation, tokens).seconds)

    def flop_rate(self, implementation: str, tokens: int) -> float:
        """Median rate [FLOP/s]."""
        return self.shape.flops(tokens) / self.seconds(implementation, tokens)

    def roof(self, tokens: int) -> float:
        """Roofline for the experts that the tokens chose [FLOP/s]."""
        touched = next(run.touched for run in self.runs if run.tokens == tokens)
        return self.shape.roof(tokens, self.read, self.multiply, touched)

    def memory_share(self, implementation: str, tokens: int) -> float:
        """Rate of moving the necessary bytes over the measured rate of memory [1]."""
        run = self.run(implementation, tokens)
        return self.shape.bytes(tokens, run.touched) / self.seconds(implementation, tokens) / self.read

    def faster(self, implementation: str, tokens: int, others: Sequence[str]) -> list[float]:
        """Speed relative to the fastest of the others, repetition by repetition [1].

        The fastest is the one with the least median. The least time of each repetition would favour the others: even
        equally fast ones would win by chance.
        """
        baseline = min(others, key=lambda name: self.seconds(name, tokens))
        both = zip(self.run(implementation, tokens).seconds, self.run(baseline, tokens).seconds, strict=True)
        return [theirs / own for own, theirs in both]


def recorded_speeds(path: Path) -> list[MoeSpeeds]:
    """Read the speeds that `bench moe --json` wrote, marked as recorded."""
    record = json.loads(path.read_text(encoding="utf-8"))
    said = f"{record['date'][:10]} on {record['machine']}"
    return [replace(from_plain(MoeSpeeds, row), recorded=said) for row in record["rows"]]
