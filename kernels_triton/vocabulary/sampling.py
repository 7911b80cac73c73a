"""Greedy sampling and draws of the likely tokens: a token depends on seed and position, never on batch or device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operands import check_operand
from ..backend.operators import operator
from ..declarations import operation, public, work_of
from .operands import check_logits

_BLOCK = 4096
_ONE = 2.0**32  # weight of the largest logit
_NO_DRAWS = (None,) * 6


@public
class Draws(NamedTuple):
    """Parameters of each row's draw.

    temperatures (R,) fp64: 0 takes the largest logit; top_k (R,) int64: tokens are drawn from so many of the likeliest,
    from all if it is 0; top_p (R,) fp64: of these from the smallest set that reaches this share of their probability;
    min_p (R,) fp64: of these from those that are at least so likely, as a share of the likeliest; seeds (R,) int64: 64
    bits, of which a negative number is taken as one without a sign; positions (R,) int64: number of tokens that the
    request has generated. Seed and position determine the draw.
    """

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@operation
def sample(logits: torch.Tensor, draws: Draws | None = None, *, backend: str | None = None) -> torch.Tensor:
    """Sample the next token of every row.

        w[i] = floor(2^32 exp((l[i] - max l) / temperature))

    Tokens are ranked by logit, equal ones by index. A token is drawn from the beginning of the ranking: of the first
    top_k, the fewest with sum w >= top_p times the sum of these top_k, and of those the ones with
    w >= floor(2^32 min_p). It is where the running sum passes u times the sum of that beginning. u is the first number
    of numpy's Philox with the seed as key and the position as counter. Weights are integers, so that every backend and
    block size gives the same token; one within 2^-32 of a boundary may differ where exp does.

    Parameters
    ----------
    logits : (R, V) fp32, contiguous columns, finite, V <= 2^20
    draws : Draws, optional
        By default the largest logit of every row is taken, the first of equal ones.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors and torch for others.

    Returns
    -------
    (R,) int64

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, (on the CPU) a position or a top_k is negative, or the backend
        cannot compute here.

    Notes
    -----
    The order top_k, top_p, min_p is that of transformers' logits processors. Of equal logits at the boundary of top_k
    they keep all, this the first.

    Examples
    --------
    >>> sample(torch.tensor([[0.0, 2.0, 2.0]])).tolist()
    [1]
    """
    _check(logits, draws)
    chosen = choose_backend(backend, logits.detach())  # token ids have no gradient
    out: torch.Tensor = _sample(logits.detach(), *(_NO_DRAWS if draws is None else draws), str(chosen))
    return out


def _compute(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    columns = (temperatures, top_k, top_p, min_p, seeds, positions)
    given = [column for column in columns if column is not None]
    draws = Draws(*given) if len(given) == len(columns) else None
    if draws is not None:
        _check_counts(draws)
    if backend == Backend.TORCH:
        greedy = logits.argmax(dim=1)
        if draws is None:
            return greedy
        return torch.where(draws.temperatures > 0, _drawn(logits, draws), greedy)
    enter_mode(Backend(backend))
    from .jit_sampling import sample as kernel

    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, 1 << (size - 1).bit_length())
    if rows:
        operands = _NO_DRAWS if draws is None else tuple(draws)
        constants = {"DRAWN": draws is not None, "BLOCK": block, "num_warps": 8}
        kernel[(rows,)](logits, *operands, out, logits.stride(0), size, **constants)
    return out


_sample = operator("sample", _compute, lambda logits, *_rest: logits.new_empty(len(logits), dtype=torch.int64))


def _check(logits: torch.Tensor, draws: Draws | None) -> None:
    check_logits(logits)
    if draws is not None:
        for name, tensor in zip(Draws._fields, draws, strict=True):
            dtype = torch.int64 if name in ("top_k", "seeds", "positions") else torch.float64
            check_operand(f"draws.{name}", tensor, (len(logits),), (dtype,), logits)


def _check_counts(draws: Draws) -> None:
    for name, counts in (("top_k", draws.top_k), ("positions", draws.positions)):
        if counts.device.type == "cpu" and bool((counts < 0).any()):
            raise ValueError(f"draws.{name} must be at least 0, not {counts.tolist()}: count from 0.")


def _drawn(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw a token of every row by sorting its logits."""
    ranked, order = (logits + 0.0).sort(dim=1, descending=True, stable=True)
    temperatures = torch.where(draws.temperatures > 0, draws.temperatures, 1.0)[:, None]
    weights = (((ranked - ranked[:, :1]).double() / temperatures).exp() * _ONE).long()
    total = weights.cumsum(dim=1)
    size = logits.shape[1]
    kept = torch.where(draws.top_k > 0, draws.top_k.clamp(max=size), size)[:, None]
    need = (draws.top_p[:, None] * total.gather(1, kept - 1).double()).ceil().long().clamp(min=1)
    last = torch.searchsorted(total, need).clamp(max=size - 1)
    likely = (weights >= (draws.min_p[:, None].clamp(max=1) * _ONE).long()).sum(dim=1, keepdim=True)
    nucleus = total.gather(1, torch.minimum(last, likely - 1))
    pairs = zip(draws.seeds.tolist(), draws.positions.tolist(), strict=True)
    numbers = [uniform(seed, position) for seed, position in pairs]
    draw = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None]
    target = torch.minimum((draw * nucleus.double()).long(), nucleus - 1)
    return order.gather(1, torch.searchsorted(total, target, right=True))[:, 0]


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` of a request.

    Examples
    --------
    >>> uniform(0, 0) == uniform(0, 0) != uniform(0, 1)
    True
    """
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


@work_of(sample)
def sample_work(rows: int, vocabulary: int) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]) = (0, 4 R V + 8 R); logits are read once from memory.

    Examples
    --------
    >>> sample_work(rows=2, vocabulary=10)
    (0, 96)
    """
    return 0, 4 * rows * vocabulary + 8 * rows
