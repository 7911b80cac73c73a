"""Greedy and nucleus sampling. A request's tokens depend on its own seed and position, never on the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from workbench.core.errors import EngineError
from workbench.workload import Sampling


def choose_all(
    logits: torch.Tensor,
    sampling: Sequence[Sampling],
    positions: Sequence[int],
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """Choose the next token of every row of logits (B, V); `check` is called before each draw. See `choose`."""
    _check_finite(logits)
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    for row, (how, position) in enumerate(zip(sampling, positions, strict=True)):
        if how.temperature:
            check()
            chosen[row] = choose(logits[row], how, position)
    return chosen


def choose(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Choose the next token.

    Parameters
    ----------
    logits : Tensor (V,) float32
    sampling : Sampling
        Temperature 0 takes the largest logit; else tokens are drawn from the smallest set whose probability
        reaches `top_p`.
    position : int
        Number of tokens that the request has generated; with the seed it fixes the draw.

    Raises
    ------
    EngineError
        If a logit is NaN or infinite.
    """
    _check_finite(logits)
    if not sampling.temperature:
        return int(logits.argmax())
    wide = logits.double().numpy()
    with np.errstate(over="ignore"):  # with a tiny temperature only the largest logit counts
        probability = np.exp((wide - wide.max()) / sampling.temperature)
    probability /= probability.sum()
    order = np.argsort(-probability, kind="stable")
    mass = np.cumsum(probability[order])
    kept = int(np.searchsorted(mass, sampling.top_p)) + 1
    draw = (
        np.random.Generator(np.random.Philox(key=sampling.seed, counter=position)).random()
        * mass[min(kept, len(mass)) - 1]
    )
    return int(order[np.searchsorted(mass, draw, side="right")])


def _check_finite(logits: torch.Tensor) -> None:
    if not torch.isfinite(logits).all():
        raise EngineError("the logits are not finite; check the weights, or keep them in another precision.")
