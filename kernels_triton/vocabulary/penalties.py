"""Penalties on the logits of tokens that a request has had already."""

from __future__ import annotations

import torch

from ..backend.operands import check_indices, check_operand, check_range
from ..backend.operators import operator
from ..declarations import operation
from .operands import check_logits


@operation
def penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    generated: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Make tokens less likely that a request has in its prompt or has generated.

        out[r, v] = (l / repetition[r] if l > 0 else l repetition[r]) - presence[r] [v was generated],  l = logits[r, v]

    for every token v that row r has had, once for each however often it was; all others keep their logits. It is
    computed by torch on any device.

    Parameters
    ----------
    logits : (R, V) fp32, contiguous columns, V <= 2^20
    rows, tokens : (N,) int64
        Each token that a row has had, in any order and any number of times, and its row. On a GPU they are not checked.
    generated : (N,) bool
        True for those that were generated, false for those of the prompt.
    repetition : (R,) fp64
        Positive factor; 1 changes nothing.
    presence : (R,) fp64
        Number that is subtracted; 0 changes nothing.

    Returns
    -------
    (R, V) fp32, computed in fp64 and rounded once

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, or (on the CPU) a row or a token is out of range.

    Notes
    -----
    The repetition penalty is Keskar et al., "CTRL", 2019, as in transformers and vLLM. The presence penalty is that of
    OpenAI's API, as in vLLM, which applies it after the repetition penalty.

    Examples
    --------
    >>> rows, tokens, one = torch.tensor([0, 0]), torch.tensor([0, 1]), torch.ones(1, dtype=torch.float64)
    >>> penalise(torch.tensor([[4.0, -1.0, 3.0]]), rows, tokens, torch.tensor([True, False]), 2 * one, one)
    tensor([[ 1., -2.,  3.]])
    """
    check_logits(logits)
    check_indices("rows", rows, (torch.int64,), logits)
    check_operand("tokens", tokens, (len(rows),), (torch.int64,), logits)
    check_operand("generated", generated, (len(rows),), (torch.bool,), logits)
    for name, penalty in (("repetition", repetition), ("presence", presence)):
        check_operand(name, penalty, (len(logits),), (torch.float64,), logits)
    out: torch.Tensor = _penalise(logits, rows, tokens, generated, repetition, presence)
    return out


def _compute(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    generated: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    if logits.device.type == "cpu":
        check_range("rows", rows, len(logits), "correct them")
        check_range("tokens", tokens, logits.shape[1], "correct them")
    had = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    had[rows, tokens] = True
    made = torch.zeros_like(had)
    made[rows[generated], tokens[generated]] = True
    wide = logits.double()
    factor = repetition[:, None]
    lowered = torch.where(wide > 0, wide / factor, wide * factor) - presence[:, None] * made
    return torch.where(had, lowered.float(), logits)


_penalise = operator(
    "penalise",
    _compute,
    lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
