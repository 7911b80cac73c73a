"""MoE-Lens, Equations 1 and 2 and Table 2: GEMM work per byte of weights, and the tokens that saturate a GPU.

Bytes, FLOP, seconds and tokens; the bandwidth of the link is always an argument, because the paper works with 32, 20
and 19.5 GB/s in different places.
"""

from __future__ import annotations

import enum

import numpy as np

from workbench.perfmodels.domain import Number, at_least, plain, positive

_TABLE_SEQUENCE = 256  # tokens of a sequence in the first half of MoE-Lens' Table 2


class IntensityForm(enum.Enum):
    """The reading of Equation 1: as printed, or mended."""

    EXACT = "exact"
    """From the products of dimensions: 3m beside 2 + 2/s."""
    PRINTED = "printed"
    """The normalised form as printed: 6m beside 2 + 2/s, which counts the experts twice."""
    APPROXIMATE = "approximate"
    """k/E: experts only."""


class Units(enum.Enum):
    """Units of Table 2."""

    DECIMAL = "decimal"
    """1 TFLOP = 1e12 FLOP, 1 GB = 1e9 B; sizes in bytes."""
    PAPER = "paper"
    """The table's own mixture: 1 TFLOP = 1024 GFLOP, and sizes in MiB / 1000, truncated. For that table only."""


def intensity(
    tokens: Number,
    *,
    experts: Number,
    chosen: Number,
    expert_ratio: Number,
    group_size: Number,
    form: IntensityForm = IntensityForm.EXACT,
) -> Number:
    """GEMM work per byte of weights read [FLOP/B].

        I(n) = n (3 m k + 2 + 2/s) / (3 m E + 2 + 2/s)

    Parameters
    ----------
    tokens : number or array
        n, tokens that share one pass of weights.
    experts, chosen : number or array
        E and k, routed experts in a layer and per token.
    expert_ratio : number or array
        m = hi/h, width of an expert over that of the model.
    group_size : number or array
        s, query heads per KV head.
    form : IntensityForm
        EXACT; PRINTED has the slip of the paper's normalised form; APPROXIMATE is n k / E.

    Raises
    ------
    ValueError
        If an argument is not positive, tokens are negative, or more experts are chosen than there are.

    Notes
    -----
    MoE-Lens, Eq. 1. Weights of 2 bytes, all experts read. FLOP of attention scores, KV traffic, embedding
    and head are left out, and the query heads together are as wide as the model.
    """
    n = at_least("tokens", tokens, 0, "give tokens")
    k = positive("chosen", chosen, "give experts")
    e = at_least("experts", experts, 1, "give experts")
    if np.any(k > e):
        raise ValueError("chosen is above experts; give at most as many experts per token as the layer has.")
    expert = (6 if form is IntensityForm.PRINTED else 3) * positive("expert_ratio", expert_ratio, "give hi/h")
    attention = 2 + 2 / positive("group_size", group_size, "give query heads per KV head")
    if form is IntensityForm.APPROXIMATE:
        return plain(n * k / e)
    return plain(n * (expert * k + attention) / (expert * e + attention))


def tokens_to_saturate(
    flop_rate: Number, bandwidth: Number, intensity_per_token: Number, *, units: Units = Units.DECIMAL
) -> Number:
    """Tokens per pass from which the GPU, and not the link, limits [tokens].

        n = (C_GPU / B) / I(1)

    Parameters
    ----------
    flop_rate : number or array
        C_GPU, GEMM rate of the GPU [FLOP/s].
    bandwidth : number or array
        B, host-to-device link [B/s].
    intensity_per_token : number or array
        I(1) as `intensity` gives it for one token [FLOP/B]; Table 2 takes k/E.
    units : Units
        PAPER for the figures of Table 2 only, which are 1024/1000 times too large.

    Raises
    ------
    ValueError
        If an argument is not positive.

    Notes
    -----
    MoE-Lens, Eq. 2. The link runs at its full rate all the time.
    """
    rate = positive("flop_rate", flop_rate, "give FLOP/s")
    link = positive("bandwidth", bandwidth, "give B/s")
    tokens = rate / link / positive("intensity_per_token", intensity_per_token, "give FLOP/B")
    return plain(tokens * (1.024 if units is Units.PAPER else 1.0))


def kv_to_saturate(
    tokens: Number, sequence_len: Number, kv_bytes_per_token: Number, *, units: Units = Units.DECIMAL
) -> Number:
    """KV cache of n sequences, each of full length [B].

        C_KV = n l kv_tok

    Parameters
    ----------
    tokens : number or array
        n: in pure decode each of the tokens in a pass belongs to a sequence of its own.
    sequence_len : number or array
        l, prompt and output together [tokens].
    kv_bytes_per_token : number or array
        kv_tok, over all layers [B].
    units : Units
        PAPER gives the numbers of Table 2: floor(MiB / 1000) at 256 tokens, and that doubled at 512.

    Raises
    ------
    ValueError
        If an argument is not positive, tokens are negative, or PAPER is asked for a length that is no multiple of 256.

    Notes
    -----
    MoE-Lens, Table 2. Every sequence is charged its final length throughout.
    """
    n = at_least("tokens", tokens, 0, "give tokens")
    length = positive("sequence_len", sequence_len, "give tokens")
    size = positive("kv_bytes_per_token", kv_bytes_per_token, "give B")
    if units is Units.DECIMAL:
        return plain(n * length * size)
    if np.any(length % _TABLE_SEQUENCE):
        raise ValueError("Units.PAPER reproduces Table 2 at multiples of 256 tokens only; use Units.DECIMAL.")
    return plain(np.floor(n * _TABLE_SEQUENCE * size / 2**20 / 1000) * (length / _TABLE_SEQUENCE))
