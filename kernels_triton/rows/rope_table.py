"""Angles of rotary position embeddings, with the scalings of checkpoints for contexts longer than the trained ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..declarations import operation, public


@public
@dataclass(frozen=True)
class Linear:
    """Linear scaling: positions are divided by `factor`."""

    factor: float


@public
@dataclass(frozen=True)
class Yarn:
    """YaRN: frequencies of slow pairs are divided by `factor`, those of fast pairs are kept, with a ramp in between.

    A pair is fast if it makes at least `fast` turns within the `trained` tokens, slow if at most `slow` turns.
    `attention` is the factor of cos and sin, by default 0.1 ln(factor) + 1. Peng et al., YaRN, section 3.
    """

    factor: float
    trained: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    truncate: bool = True


@public
@dataclass(frozen=True)
class Llama3:
    """Llama 3: frequencies with waves longer than trained / low are divided by `factor`, with a ramp below.

    Those with waves shorter than trained / high are kept.
    """

    factor: float
    trained: int
    low: float = 1.0
    high: float = 4.0


@public
@dataclass(frozen=True)
class LongRope:
    """LongRoPE: the frequency of pair i is divided by factors[i]; cosines and sines have the factor `attention`.

    Ding et al., LongRoPE, 2024. A checkpoint has factors for contexts up to the trained ones, and others beyond.
    """

    factors: tuple[float, ...]
    attention: float = 1.0


Scaling: TypeAlias = Linear | Yarn | Llama3 | LongRope


@operation
def rope_table(
    dims: int, positions: int, *, theta: float = 10000.0, scaling: Scaling | None = None, device: str = "cpu"
) -> torch.Tensor:
    """Compute the cosines and sines of the angles of `rope`, once for all layers.

        angle[p, i] = p f[i],  f[i] = theta^(-2 i / R),  f scaled

    Angles are rounded to fp32 as in Hugging Face, so that greedy tokens agree.

    Parameters
    ----------
    dims : int
        R, the rotated dims of a head; even.
    positions : int
        P, one more than the largest position.
    theta : float
    scaling : Linear, Yarn, Llama3 or LongRope, optional
    device : str

    Returns
    -------
    (P, R) fp32
        Cosines of the R / 2 angles, then sines.

    Raises
    ------
    ValueError
        If `dims` is not even, a factor is no positive number, or LongRoPE's are not one for each pair.

    Examples
    --------
    >>> rope_table(4, 1)
    tensor([[1., 1., 0., 0.]])
    """
    if dims < 2 or dims % 2:
        raise ValueError(f"dims must be even and >= 2, not {dims}: pass the dims that are turned.")
    if scaling is not None and not min(_factors(scaling), default=0) > 0:
        raise ValueError(f"the factor of {scaling} must be positive: leave scaling out for none.")
    if isinstance(scaling, LongRope) and len(scaling.factors) != dims // 2:
        raise ValueError(f"LongRope needs {dims // 2} factors, one for each pair, not {len(scaling.factors)}.")
    angles = torch.arange(positions).float()[:, None] * frequencies(dims, theta, scaling)
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * _amplitude(scaling)).to(device)


def _factors(scaling: Scaling) -> tuple[float, ...]:
    return scaling.factors if isinstance(scaling, LongRope) else (scaling.factor,)


def frequencies(dims: int, theta: float, scaling: Scaling | None) -> torch.Tensor:
    """Compute the frequencies f (R / 2,) in fp32 [rad/token].

    Examples
    --------
    >>> frequencies(4, 10000.0, Linear(2.0))
    tensor([0.5000, 0.0050])
    """
    waves = theta ** (torch.arange(0, dims, 2).float() / dims)
    if isinstance(scaling, Linear):
        return 1 / waves / scaling.factor
    if isinstance(scaling, LongRope):
        return 1 / (torch.tensor(scaling.factors) * waves)
    if isinstance(scaling, Yarn):
        divided = _divided_share(scaling, dims, theta)
        return divided / (scaling.factor * waves) + (1 - divided) / waves
    if isinstance(scaling, Llama3):
        turns = scaling.trained / (2 * math.pi * waves)
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return (1 - kept) / waves / scaling.factor + kept / waves
    return 1 / waves


def _divided_share(scaling: Yarn, dims: int, theta: float) -> torch.Tensor:
    """Share of the divided frequency in each pair: 0 for fast pairs, 1 for slow ones, a ramp in between."""

    def pair_with(turns: float) -> float:
        return dims * math.log(scaling.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    fast = pair_with(scaling.fast)
    slow = pair_with(scaling.slow)
    if scaling.truncate:
        fast = math.floor(fast)
        slow = math.ceil(slow)
    fast = max(fast, 0)
    slow = min(slow, dims - 1)
    return ((torch.arange(dims // 2).float() - fast) / max(slow - fast, 0.001)).clamp(0, 1)


def _amplitude(scaling: Scaling | None) -> float:
    """Factor of cos and sin."""
    if isinstance(scaling, LongRope):
        return scaling.attention
    if not isinstance(scaling, Yarn):
        return 1.0
    if scaling.attention is not None:
        return scaling.attention
    return 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
