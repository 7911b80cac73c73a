"""Greedy and nucleus sampling. A request's tokens depend on its own seed and position, never on the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from workbench.core.errors import EngineError
from workbench.kernels import Draws, sample
from workbench.workload import Sampling


def choose_all(
    logits: torch.Tensor,
    sampling: Sequence[Sampling],
    positions: Sequence[int],
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """Choose the next token of every row of logits.

    Parameters
    ----------
    logits : Tensor (B, V) float32
    sampling : sequence of Sampling
        Temperature 0 takes the largest logit; else tokens are drawn from the smallest set whose probability
        reaches `top_p`.
    positions : sequence of int
        Number of tokens that each request has generated; with the seed it fixes the draw.
    check : callable
        Called before each draw.

    Raises
    ------
    EngineError
        If a logit is NaN or infinite.
    """
    if not torch.isfinite(logits).all():
        raise EngineError("the logits are not finite; check the weights, or keep them in another precision.")
    chosen: list[int] = sample(logits).tolist()
    for row, (how, position) in enumerate(zip(sampling, positions, strict=True)):
        if how.temperature:
            check()
            chosen[row] = int(sample(logits[row : row + 1], _draw(how, position)))
    return chosen


def _draw(how: Sampling, position: int) -> Draws:
    """Parameters of one row's draw; the seed's 64 bits are taken as a number with a sign."""
    temperature = torch.tensor([how.temperature], dtype=torch.float64)
    top_p = torch.tensor([how.top_p], dtype=torch.float64)
    seed = np.array([how.seed], np.uint64).view(np.int64)
    return Draws(temperature, top_p, torch.from_numpy(seed), torch.tensor([position]))
