"""Log probabilities of chosen tokens, and of the most likely ones."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backend.operands import check_operand, check_range
from ..backend.operators import operator
from ..declarations import operation, public
from .operands import check_logits


@public
class Logprobs(NamedTuple):
    """Log probabilities of one token of each row, and the most likely tokens of the row.

    chosen (R,) fp32; ids (R, n) int64 and best (R, n) fp32, the most likely token first, equal ones in any order.
    """

    chosen: torch.Tensor
    ids: torch.Tensor
    best: torch.Tensor


@operation
def logprobs(logits: torch.Tensor, tokens: torch.Tensor, best: int = 0) -> Logprobs:
    """Compute the log probability of one token of every row, and those of the most likely tokens.

        log p[r, v] = logits[r, v] - log sum over u of exp logits[r, u]

    It is computed by torch on any device.

    Parameters
    ----------
    logits : (R, V) fp32, contiguous columns, V <= 2^20
    tokens : (R,) int64
        On a GPU they are not checked.
    best : int
        Number n of the most likely tokens; V if it is more.

    Returns
    -------
    Logprobs
        Computed in fp64 and rounded once.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, `best` is negative, or (on the CPU) a token is out of range.

    Examples
    --------
    >>> found = logprobs(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([1]), best=1)
    >>> found.chosen.exp().tolist(), found.ids.tolist(), found.best.exp().tolist()
    ([0.25], [[0]], [[0.5]])
    """
    check_logits(logits)
    check_operand("tokens", tokens, (len(logits),), (torch.int64,), logits)
    if best < 0:
        raise ValueError(f"best must be at least 0, not {best}: give the number of tokens.")
    return Logprobs(*_logprobs(logits, tokens, min(best, logits.shape[1])))


def _compute(logits: torch.Tensor, tokens: torch.Tensor, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if logits.device.type == "cpu":
        check_range("tokens", tokens, logits.shape[1], "correct them")
    every = logits.double().log_softmax(dim=1)
    ids = logits.topk(best, dim=1).indices
    return every.gather(1, tokens[:, None])[:, 0].float(), ids, every.gather(1, ids).float()


def _shaped(logits: torch.Tensor, tokens: torch.Tensor, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (len(logits), best)
    return logits.new_empty(len(logits)), tokens.new_empty(shape), logits.new_empty(shape)


_logprobs = operator("logprobs", _compute, _shaped)
