"""The choice of the next tokens. A request's tokens depend on its own seed, position and tokens, never on the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from workbench.core.errors import EngineError
from workbench.core.result import TokenLogprobs
from workbench.kernels import Draws, logprobs, penalise, sample
from workbench.workload import Request, Sampling


def choose_all(
    logits: torch.Tensor,
    requests: Sequence[Request],
    tokens: Sequence[Sequence[int]],
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """Choose the next token of every row of logits.

    Parameters
    ----------
    logits : Tensor (B, V) float32, on any device
    requests : sequence of Request
        The request of each row; its `Sampling` says how the token is chosen.
    tokens : sequence of sequences of int
        The tokens of each request so far: its prompt, and those that it has generated. Their number fixes the draw,
        with the seed.
    check : callable
        Called before each draw.

    Raises
    ------
    EngineError
        If a logit is NaN or infinite.
    """
    if not len(logits):
        return []
    bounds = torch.aminmax(logits)  # of a NaN, both are NaN
    low, high, *numbers = torch.hstack((*bounds, sample(logits))).tolist()  # in fp32; one wait for a card
    chosen = list(map(int, numbers))
    if not math.isfinite(high - low):
        raise EngineError("the logits are not finite; check the weights, or keep them in another precision.")
    for row, (request, line) in enumerate(zip(requests, tokens, strict=True)):
        how = request.sampling
        if how.temperature or how.penalised:
            check()
            made = len(line) - len(request.prompt)
            own = logits[row : row + 1].cpu()
            own = _penalised(own, how, line, made) if how.penalised else own
            chosen[row] = int(sample(own, _draw(how, made) if how.temperature else None))
    return chosen


def _penalised(logits: torch.Tensor, how: Sampling, tokens: Sequence[int], made: int) -> torch.Tensor:
    """One row of logits behind the penalties; the last `made` of its tokens were generated."""
    ids = torch.tensor(tokens)
    generated = torch.zeros(len(tokens), dtype=torch.bool)
    generated[len(tokens) - made :] = True
    penalties = (torch.tensor([one], dtype=torch.float64) for one in (how.repetition_penalty, how.presence_penalty))
    return penalise(logits, torch.zeros_like(ids), ids, generated, *penalties)


def _draw(how: Sampling, position: int) -> Draws:
    """Parameters of one row's draw; the seed's 64 bits are taken as a number with a sign."""
    temperature, top_p, min_p = torch.tensor([[how.temperature], [how.top_p], [how.min_p]], dtype=torch.float64)
    seed = np.array([how.seed], np.uint64).view(np.int64)
    return Draws(temperature, torch.tensor([how.top_k]), top_p, min_p, torch.from_numpy(seed), torch.tensor([position]))


def logprobs_of(logits: torch.Tensor, token: int, best: int) -> TokenLogprobs:
    """Log probabilities of a chosen token and of the `best` most likely ones, from one row of the model's own logits.

    Parameters
    ----------
    logits : Tensor (V,) float32
    """
    found = logprobs(logits[None].cpu(), torch.tensor([token]), best)
    pairs = zip(found.ids[0].tolist(), found.best[0].tolist(), strict=True)
    return TokenLogprobs(float(found.chosen[0]), tuple(pairs))
