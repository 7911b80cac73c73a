"""Coverage is the share of a layer's experts that a batch touches: by uniform or skewed routing, a table or a trace."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from workbench.core.catalogue import data_path
from workbench.models import ModelConfig
from workbench.perfmodels.domain import Array, Number, at_least, within
from workbench.stages import touched_share

Coverage = Callable[[ArrayLike], Number]
"""Expected share of a layer's experts, 0 to 1, as a function of the tokens in the batch."""


def uniform_coverage(tokens: ArrayLike, *, experts: ArrayLike, top_k: ArrayLike) -> Number:
    """Expected share of the experts that a batch touches when every choice is equally likely [1].

        c(B) = 1 - (1 - k / E)^B

    Parameters
    ----------
    tokens : array_like
        B [tokens], fractions allowed.
    experts, top_k : array_like
        E and k.

    Raises
    ------
    ValueError
        If B < 0, E < 1, or k is not between 0 and E.

    Notes
    -----
    Exact for independent tokens; the upper bound for any skewed routing. Shape: that of the arguments, broadcast.
    """
    tokens, experts, top_k = _routing(tokens, experts, top_k)
    return touched_share(experts, top_k, tokens)


def skewed_coverage(tokens: ArrayLike, *, experts: int, top_k: int, sigma: float = 1.42) -> Number:
    """Expected share of the experts that a batch touches when some are more popular than others [1].

        c(B) = mean over i of 1 - (1 - p_i)^B,   p_i = 1 - exp(-lambda z_i),   sum of p_i = k

    Parameters
    ----------
    tokens : array_like
        B [tokens].
    experts, top_k : int
        E and k.
    sigma : float
        Spread of the popularities z_i, which are the E midpoint quantiles of a log-normal distribution; 0 is uniform
        routing. 1.42 was fitted to Layered Prefill's Table 1 (128 experts, top 8; rmse 0.02).

    Raises
    ------
    ValueError
        If B < 0, E < 1, k is not between 0 and E, or sigma is not between 0 and 5.

    Notes
    -----
    Assumes independent tokens. In text, neighbouring tokens are alike, which `measured_coverage` includes.
    """
    tokens, _, _ = _routing(tokens, experts, top_k)
    within("sigma", sigma, 0, 5, mend="0 is uniform routing, 1.42 fits Qwen3")
    chosen = _inclusion(experts, top_k, float(sigma))
    share: Number = 1.0 - np.mean((1.0 - chosen) ** np.asarray(tokens)[..., None], axis=-1)
    return share


def measured_coverage(tokens: ArrayLike) -> Number:
    """Share of Qwen3-30B-A3B's experts that a batch of ShareGPT touches [1].

    Interpolated in log2(B) between the measured batch sizes 1 to 512; proportional to B below 1, constant above 512.

    Raises
    ------
    ValueError
        If B < 0.

    Notes
    -----
    Layered Prefill, Table 1; its last entry is a lower bound.
    """
    tokens = at_least("tokens", tokens, 0, mend="give the tokens of one iteration")
    batch, share = _table()
    return np.minimum(tokens, 1.0) * np.interp(np.log2(np.maximum(tokens, 1.0)), np.log2(batch), share)


def traced_experts(trace: ArrayLike, *, tokens: int, experts: int) -> Array:
    """Distinct experts that batches of consecutive tokens touched, per layer [experts].

    Parameters
    ----------
    trace : array_like of int, shape (layers, T, k)
        Expert that each token was routed to, 0 to E - 1.
    tokens : int
        Tokens per batch. T is cut into whole batches; the rest is left out.
    experts : int
        E.

    Returns
    -------
    ndarray, shape (layers,)
        Mean over the batches.

    Raises
    ------
    ValueError
        If the trace has another shape, an expert outside 0 to E - 1, or fewer tokens than one batch.

    Notes
    -----
    The indicator of MoE-CAP's Eq. 5, summed over the experts.
    """
    chosen = np.asarray(trace)
    if chosen.ndim != 3 or not np.issubdtype(chosen.dtype, np.integer):
        raise ValueError(
            f"trace must hold integers of shape (layers, tokens, k), not {chosen.dtype} of shape {chosen.shape}; "
            "stack the routers' choices."
        )
    if chosen.size and (chosen.min() < 0 or chosen.max() >= experts):
        raise ValueError(f"trace names experts {chosen.min()} to {chosen.max()} of {experts}; give the right number.")
    layers, length, _ = chosen.shape
    batches = length // tokens if tokens > 0 else 0
    if not batches:
        raise ValueError(f"trace of {length} tokens has no batch of {tokens}; give 1 to {length} tokens.")
    rows = chosen[:, : batches * tokens].reshape(layers, batches, -1)
    seen = np.zeros((layers, batches, experts), dtype=bool)
    np.put_along_axis(seen, rows, True, axis=2)
    distinct: Array = seen.sum(axis=2).mean(axis=1)
    return distinct


def uniform(experts: int, top_k: int) -> Coverage:
    """`uniform_coverage` of one model, as a function of the tokens alone."""
    return partial(uniform_coverage, experts=experts, top_k=top_k)


def skewed(experts: int, top_k: int, sigma: float = 1.42) -> Coverage:
    """`skewed_coverage` of one model, as a function of the tokens alone."""
    return partial(skewed_coverage, experts=experts, top_k=top_k, sigma=sigma)


def routed(model: ModelConfig, coverage: Coverage) -> ModelConfig:
    """The model with another routing, which every reader prices: its coverage at powers of two up to 2^17 tokens.

    ``routed(model, skewed(model.num_local_experts, model.num_experts_per_tok))`` is the log-normal routing. A model
    without a routing is routed uniformly, which is the upper bound. Measured times of operations do not change with it.
    """
    tokens = 2.0 ** np.arange(18)
    shares = np.asarray(coverage(tokens), dtype=np.float64)
    return replace(model, coverage=tuple(zip(tokens.tolist(), shares.tolist(), strict=True)))


def _routing(tokens: ArrayLike, experts: ArrayLike, top_k: ArrayLike) -> tuple[Array, Array, Array]:
    counts = at_least("experts", experts, 1, mend="give the routed experts of one layer")
    chosen = at_least("top_k", top_k, 0, mend="give the experts per token")
    if np.any(chosen > counts):
        raise ValueError(
            f"top_k must be at most the number of experts, not {top_k!r} of {experts!r}; swap or correct them."
        )
    return at_least("tokens", tokens, 0, mend="give the tokens of one iteration"), counts, chosen


@lru_cache(maxsize=64)
def _inclusion(experts: int, top_k: int, sigma: float) -> Array:
    """Probability that one token's choice includes expert i, shape (experts,): bisection on lambda."""
    if top_k == experts:
        return np.ones(experts)
    normal = NormalDist()
    popularity = np.exp([sigma * normal.inv_cdf((i + 0.5) / experts) for i in range(experts)])
    low = 0.0
    high = 1.0
    while np.sum(-np.expm1(-high * popularity)) < top_k:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if np.sum(-np.expm1(-middle * popularity)) < top_k:
            low = middle
        else:
            high = middle
    chosen: Array = -np.expm1(-high * popularity)
    return chosen


@lru_cache(maxsize=1)
def _table() -> tuple[Array, Array]:
    published = tomllib.loads(data_path("catalogue/published/layered_prefill.toml").read_text(encoding="utf-8"))
    table = published["coverage"]
    return np.array(table["tokens"], dtype=np.float64), np.array(table["percent"], dtype=np.float64) / 100
