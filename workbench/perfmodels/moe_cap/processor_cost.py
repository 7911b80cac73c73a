"""Purchase and running costs of processors, and their bandwidth if they hold only a share of a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from workbench.perfmodels.domain import Number, at_least, positive

_SECONDS_PER_YEAR = 365.25 * 24 * 3600
_JOULES_PER_KWH = 3.6e6


def offloaded_bandwidth(weights: ArrayLike, *, memory: ArrayLike, bandwidth: ArrayLike, link: ArrayLike) -> Number:
    """Bandwidth at which a processor reads weights that do not all fit its memory [B/s].

        B_eff = 1 / max(1 / B, (1 - r) / B_link),   r = min(1, memory / weights)

    Parameters
    ----------
    weights, memory : array_like
        Size of the model, and memory of the processor [B].
    bandwidth, link : array_like
        B of the processor's memory, B_link from the host [B/s].

    Raises
    ------
    ValueError
        If one of them is not positive.

    Notes
    -----
    MoE-CAP's Figure 2 marks such processors without a formula. Here reads are spread evenly over resident and offloaded
    weights, the link works while the processor reads, and weights that arrive are read once more from its memory.
    """
    weights = positive("weights", weights, "give the model's bytes")
    memory = positive("memory", memory, "give the processor's capacity in bytes")
    bandwidth = positive("bandwidth", bandwidth, "give bytes per second")
    link = positive("link", link, "give bytes per second, or leave a processor without a link out")
    missing = 1.0 - np.minimum(1.0, memory / weights)
    return 1.0 / np.maximum(1.0 / bandwidth, missing / link)


def purchase_rate(price: ArrayLike, *, years: ArrayLike) -> Number:
    """Purchase price spread evenly over a lifetime of continuous use [USD/s]: price / (years in seconds).

    Raises
    ------
    ValueError
        If the price is negative or the lifetime not positive.
    """
    price = at_least("price", price, 0, mend="give US dollars, or leave processors of unknown price out")
    return price / (positive("years", years, "give the lifetime in years") * _SECONDS_PER_YEAR)


def energy_rate(power: ArrayLike, *, per_kwh: ArrayLike) -> Number:
    """Price of drawing a power without pause [USD/s]: power [W] x price [USD/kWh] / 3.6e6 [J/kWh].

    Raises
    ------
    ValueError
        If one of them is negative.
    """
    power = at_least("power", power, 0, mend="give watts")
    return power * at_least("per_kwh", per_kwh, 0, mend="give US dollars per kWh") / _JOULES_PER_KWH


def cost_per_token(
    price: ArrayLike, power: ArrayLike, tok_s: ArrayLike, *, years: ArrayLike, per_kwh: ArrayLike
) -> Number:
    """Price of one token for hardware and energy [USD]: (purchase_rate + energy_rate) / tok_s.

    Parameters
    ----------
    price, power : array_like
        Price [USD] and power [W] of all the hardware, host included.
    tok_s : array_like
        Throughput of the tokens whose price is wanted [tokens/s].
    years, per_kwh : array_like
        Lifetime [years] and energy price [USD/kWh].

    Raises
    ------
    ValueError
        If one is negative, or throughput or lifetime not positive.

    Notes
    -----
    MoE-CAP names price and power as the two costs and adds them unamortised; here both are rates. Assumes that the
    machine works all its life and draws its thermal design power.
    """
    rate = purchase_rate(price, years=years) + energy_rate(power, per_kwh=per_kwh)
    return rate / positive("tok_s", tok_s, "give tokens per second")
