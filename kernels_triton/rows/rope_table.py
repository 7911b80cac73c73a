"""Angles of rotary position embeddings, as checkpoints scale them for contexts longer than they were trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..declarations import operation, public


@public
@dataclass(frozen=True)
class Linear:
    """Positions are divided by `factor`."""

    factor: float


@public
@dataclass(frozen=True)
class Yarn:
    """Slow pairs are divided by `factor`, fast ones are not, those between in part; cos and sin grow with its log.

    A pair is fast if it turns `fast` times within the `trained` tokens, slow if at most `slow` times. `attention` is
    the factor of cos and sin, 0.1 ln(factor) + 1 unless given. Peng et al., YaRN, section 3.
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
    """Pairs with waves longer than trained / low are divided by `factor`, shorter than trained / high left alone."""

    factor: float
    trained: int
    low: float = 1.0
    high: float = 4.0


Scaling: TypeAlias = Linear | Yarn | Llama3


@operation
def rope_table(
    dims: int, positions: int, *, theta: float = 10000.0, scaling: Scaling | None = None, device: str = "cpu"
) -> torch.Tensor:
    """Cosines and sines of the angles by which `rope` turns pairs: made once, read by every layer.

        angle[p, i] = p f[i],  f[i] = theta^(-2 i / R),  f scaled

    Angles are rounded to fp32 as Hugging Face's are, so that greedy tokens agree.

    Parameters
    ----------
    dims : int
        R, the dims of a head that are turned; even.
    positions : int
        P, one more than the largest.
    theta : float
    scaling : Linear, Yarn or Llama3, optional
    device : str

    Returns
    -------
    (P, R) fp32
        Cosines of the R / 2 angles, then sines.

    Raises
    ------
    ValueError
        If `dims` is not even, or a factor is no positive number.

    Examples
    --------
    >>> rope_table(4, 1)
    tensor([[1., 1., 0., 0.]])
    """
    if dims < 2 or dims % 2:
        raise ValueError(f"dims must be even and >= 2, not {dims}: pass the dims that are turned.")
    if scaling is not None and not scaling.factor > 0:
        raise ValueError(f"the factor of {scaling} must be positive: leave scaling out for none.")
    angles = torch.arange(positions).float()[:, None] * frequencies(dims, theta, scaling)
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * _amplitude(scaling)).to(device)


def frequencies(dims: int, theta: float, scaling: Scaling | None) -> torch.Tensor:
    """f (R / 2,) fp32 [rad/token].

    Examples
    --------
    >>> frequencies(4, 10000.0, Linear(2.0))
    tensor([0.5000, 0.0050])
    """
    waves = theta ** (torch.arange(0, dims, 2).float() / dims)
    if isinstance(scaling, Linear):
        return 1 / waves / scaling.factor
    if isinstance(scaling, Yarn):
        slow = _share_of_slow(scaling, dims, theta)
        return slow / (scaling.factor * waves) + (1 - slow) / waves
    if isinstance(scaling, Llama3):
        turns = scaling.trained / (2 * math.pi * waves)
        fast = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return (1 - fast) / waves / scaling.factor + fast / waves
    return 1 / waves


def _share_of_slow(scaling: Yarn, dims: int, theta: float) -> torch.Tensor:
    """1 for slow pairs, 0 for fast ones, a ramp between."""

    def pair_that_turns(times: float) -> float:
        return dims * math.log(scaling.trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.fast), pair_that_turns(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    return ((torch.arange(dims // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)


def _amplitude(scaling: Scaling | None) -> float:
    if not isinstance(scaling, Yarn):
        return 1.0
    if scaling.attention is not None:
        return scaling.attention
    return 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
