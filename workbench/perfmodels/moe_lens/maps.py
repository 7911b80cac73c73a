"""MoE-Lens' Figures 3 and 4: the usable share of the GPU over lengths, KV capacity and size of the job."""

from __future__ import annotations

import numpy as np

from workbench.perfmodels.domain import Array, Number, at_least, plain, positive
from workbench.perfmodels.moe_lens.stage1 import PmeForm, stage1
from workbench.perfmodels.moe_lens.stage2 import Eq12, Life, stage2


def stage1_utilisation(
    prompt_len: Number,
    output_len: Number,
    kv_tokens: Number,
    pass_tokens: Number,
    *,
    form: PmeForm = PmeForm.CLOSED,
) -> Number:
    """Share of the GPU that Stage 1 lets a job use: T_max / T_GPU = min(PME M / n_it, 1).

    Parameters
    ----------
    prompt_len, output_len, kv_tokens : number or array
        p, g and M [tokens].
    pass_tokens : number or array
        n_it [tokens/iteration].
    form : PmeForm

    Raises
    ------
    ValueError
        If an argument is out of its domain.

    Notes
    -----
    MoE-Lens, Eq. 4 and Figure 3. As Stage 1: GEMM only.
    """
    limit = positive("pass_tokens", pass_tokens, "give tokens")
    return plain(np.asarray(stage1(prompt_len, output_len, kv_tokens, 1.0, limit, form=form) / limit))


def stage2_utilisation(
    prompt_len: Number,
    output_len: Number,
    requests: Number,
    kv_tokens: Number,
    pass_tokens: Number,
    *,
    block: Number,
    eq12: Eq12 = Eq12.MENDED,
    life: Life = Life.INCLUSIVE,
) -> Number:
    """Share of the GPU that a finite job with a paged cache uses: T (p + g) / g / T_GPU.

    Parameters
    ----------
    prompt_len, output_len, requests, kv_tokens : number or array
        p, g [tokens], K and the capacity M = N b [tokens], of which whole blocks are used.
    pass_tokens : number or array
        n_it [tokens/iteration].
    block : number or array
        b [tokens].
    eq12, life
        See `stage2`.

    Raises
    ------
    ValueError
        If an argument is out of its domain or one whole sequence does not fit the cache.

    Notes
    -----
    MoE-Lens, Eq. 14 and Figure 4.
    """
    limit = positive("pass_tokens", pass_tokens, "give tokens")
    blocks = np.floor(at_least("kv_tokens", kv_tokens, 0, "give tokens") / block)
    job = (prompt_len, output_len, requests, blocks)
    predicted = stage2(*job, block=block, pass_seconds=1.0, pass_tokens=limit, eq12=eq12, life=life)
    return plain(np.asarray(predicted.proc_tok_s / limit))


def utilisation_over_lengths(
    prompt_len: Array, output_len: Array, kv_tokens: float, pass_tokens: float, *, form: PmeForm = PmeForm.CLOSED
) -> Array:
    """The map of Figure 3a: `stage1_utilisation` for every pair of prompt and output length.

        u[i, j] = min(PME(p_j, g_i) M / n_it, 1)

    Parameters
    ----------
    prompt_len : array (P,)
    output_len : array (G,)
    kv_tokens, pass_tokens : float
        M and n_it [tokens].
    form : PmeForm

    Returns
    -------
    array (G, P)

    Raises
    ------
    ValueError
        If an argument is out of its domain.

    Notes
    -----
    MoE-Lens, Figure 3a.
    """
    p = np.asarray(prompt_len)[None, :]
    g = np.asarray(output_len)[:, None]
    return np.asarray(stage1_utilisation(p, g, kv_tokens, pass_tokens, form=form))


def utilisation_over_capacity(
    prompt_len: float,
    output_len: float,
    requests: Array,
    kv_tokens: Array,
    pass_tokens: float,
    *,
    block: int,
    eq12: Eq12 = Eq12.MENDED,
    life: Life = Life.INCLUSIVE,
) -> Array:
    """The curves of Figure 4: `stage2_utilisation` for every size of job over KV capacity.

        u[i, j] = T(K_i, M_j) (p + g) / g / T_GPU

    Parameters
    ----------
    prompt_len, output_len : float
        p and g [tokens].
    requests : array (R,)
        K.
    kv_tokens : array (C,)
        M [tokens].
    pass_tokens : float
        n_it [tokens/iteration].
    block : int
        b [tokens].
    eq12, life
        See `stage2`.

    Returns
    -------
    array (R, C)

    Raises
    ------
    ValueError
        If an argument is out of its domain or one whole sequence does not fit the least capacity.

    Notes
    -----
    MoE-Lens, Figure 4. Figure 3b is its upper limit: `stage1_utilisation` over the same capacities.
    """
    k = np.asarray(requests)[:, None]
    m = np.asarray(kv_tokens)[None, :]
    job = (prompt_len, output_len, k, m, pass_tokens)
    return np.asarray(stage2_utilisation(*job, block=block, eq12=eq12, life=life))
