"""The hierarchical roofline: the rate of an operation whose data lie one memory level away.

Level i computes, level j (larger and slower) holds data, and a link carries bytes from j to i. Everything here holds
for any operation and any two levels: GPU memory and DRAM, DRAM and disk. Arguments may be numbers or arrays.
"""

from __future__ import annotations

import numpy as np

from workbench.perfmodels.domain import Array, Number, at_least, plain, positive


def local_performance(intensity: Number, *, flops: Number, bandwidth: Number) -> Number:
    """Rate of an operation whose data lie at its own level [FLOP/s].

        P = min(P_i, B_i I_i)

    Parameters
    ----------
    intensity : float or array
        I_i, FLOP per byte read at this level [FLOP/B].
    flops, bandwidth : float or array
        P_i [FLOP/s] and B_i [B/s]; all arguments are broadcast against each other.

    Raises
    ------
    ValueError
        If an intensity is negative or a rate is not positive.

    Notes
    -----
    MoE-Lightning, Eq. 8. Assumes that computing and reading overlap completely.
    """
    read = positive("bandwidth", bandwidth, "give B/s") * at_least("intensity", intensity, 0, "give FLOP/B")
    return plain(np.minimum(positive("flops", flops, "give FLOP/s"), read))


def performance(intensity: Number, far_intensity: Number, *, flops: Number, bandwidth: Number, link: Number) -> Number:
    """Rate of an operation at level i with data fetched from level j [FLOP/s].

        P = min(P_i, B_i I_i, B_ji I_j)

    Parameters
    ----------
    intensity, far_intensity : float or array
        I_i and I_j: FLOP per byte read at level i, and per byte fetched from level j [FLOP/B].
    flops, bandwidth, link : float or array
        P_i [FLOP/s], B_i and B_ji [B/s].

    Raises
    ------
    ValueError
        If an intensity is negative or a rate is not positive.

    Notes
    -----
    MoE-Lightning, Eq. 7. Assumes that the fetch overlaps with computing and with reading at level i.
    """
    near = local_performance(intensity, flops=flops, bandwidth=bandwidth)
    fetched = positive("link", link, "give B/s") * at_least("far_intensity", far_intensity, 0, "give FLOP/B")
    return plain(np.minimum(near, fetched))


def first_turning_point(*, far_flops: Number, far_bandwidth: Number, link: Number) -> Number:
    """P1, the intensity below which the operation belongs to the level of its data [FLOP/B].

        I_j(P1) = P_j / B_ji,  the solution of B_ji I = min(P_j, B_j I)

    Parameters
    ----------
    far_flops, far_bandwidth : float or array
        P_j [FLOP/s] and B_j [B/s] of the level that holds the data.
    link : float or array
        B_ji [B/s].

    Raises
    ------
    ValueError
        If a rate is not positive, or the link is not slower than the far level's own memory: then fetching is never
        slower and there is no such point.

    Notes
    -----
    MoE-Lightning, Eq. 9. The print leaves I on both sides; as B_j > B_ji, the two roofs meet on the compute roof only.
    """
    compute = positive("far_flops", far_flops, "give FLOP/s")
    read = positive("far_bandwidth", far_bandwidth, "give B/s")
    carried = positive("link", link, "give B/s")
    if np.any(carried >= read):
        raise ValueError(
            f"link={np.max(carried):g} B/s is not below far_bandwidth={np.min(read):g} B/s, so fetching is never the "
            "slower way and there is no turning point P1; give a link slower than the memory it reads."
        )
    return plain(compute / carried)


def second_turning_point(intensity: Number, *, flops: Number, bandwidth: Number, link: Number) -> Number:
    """P2, the intensity below which the link bounds the operation at level i [FLOP/B].

        I_j(P2) = min(P_i, B_i I_i) / B_ji

    Parameters
    ----------
    intensity : float or array
        I_i, FLOP per byte read at level i [FLOP/B].
    flops, bandwidth, link : float or array
        P_i [FLOP/s], B_i and B_ji [B/s].

    Raises
    ------
    ValueError
        If an intensity is negative or a rate is not positive.

    Notes
    -----
    MoE-Lightning, Eq. 10.
    """
    near: Array = np.asarray(local_performance(intensity, flops=flops, bandwidth=bandwidth))
    return plain(near / positive("link", link, "give B/s"))


def balance_point(intensity: Number, *, bandwidth: Number, link: Number) -> Number:
    """Intensity towards level j at which the link and level i's memory are busy for equal times [FLOP/B].

        I_j = B_i I_i / B_ji

    Parameters
    ----------
    intensity : float or array
        I_i [FLOP/B]; in tokens for a layer's experts: I grows by k/E per token, so N = mu B_i / B_ji.
    bandwidth, link : float or array
        B_i and B_ji [B/s].

    Raises
    ------
    ValueError
        If an intensity is negative or a rate is not positive.

    Notes
    -----
    MoE-Lightning, Eq. 11. Meaningful while level i is bound by its memory, B_i I_i < P_i; beyond, P2 applies.
    """
    read = positive("bandwidth", bandwidth, "give B/s") * at_least("intensity", intensity, 0, "give FLOP/B")
    return plain(read / positive("link", link, "give B/s"))


def attention_intensity(query_heads: Number, kv_heads: Number, kv_bytes: Number) -> Number:
    """FLOP per byte of KV cache that decode attention reads [FLOP/B].

        I = 4 n_q / (2 n_kv b)

    Parameters
    ----------
    query_heads, kv_heads : float or array
        n_q and n_kv.
    kv_bytes : float or array
        b, bytes of one element of the cache [B]; 0.5 for int4.

    Raises
    ------
    ValueError
        If an argument is not positive.

    Notes
    -----
    MoE-Lightning, section 3.3. Scores and weighted sum, 2 FLOP per multiply-add each; softmax and the query's own
    bytes are left out. Independent of batch and context.
    """
    heads = positive("query_heads", query_heads, "give heads") / positive("kv_heads", kv_heads, "give heads")
    return plain(2.0 * heads / positive("kv_bytes", kv_bytes, "give B"))


def experts_intensity(tokens: Number, experts: Number, chosen: Number, weight_bytes: Number) -> Number:
    """FLOP per byte of expert weights when all experts of a layer are read once for `tokens` tokens [FLOP/B].

        I = 2 T k / (E b)

    Parameters
    ----------
    tokens : float or array
        T: the micro-batch for the GPU's memory, the whole batch for the link.
    experts, chosen : float or array
        E and k.
    weight_bytes : float or array
        b, bytes per weight [B].

    Raises
    ------
    ValueError
        If an argument is not positive, or more experts are chosen than there are.

    Notes
    -----
    MoE-Lightning, section 3.3 (Fig. 5). Activations are left out.
    """
    total = positive("experts", experts, "give experts")
    active = positive("chosen", chosen, "give experts")
    if np.any(active > total):
        raise ValueError(f"chosen={np.max(active):g} is more than experts={np.min(total):g}; choose at most all.")
    n = positive("tokens", tokens, "give tokens")
    size = positive("weight_bytes", weight_bytes, "give B")
    return plain(2.0 * n * active / (total * size))
