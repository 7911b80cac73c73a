"""MoE-Lens, Equations 3 to 7: Stage 1, its bound for any job, and the rates that the host's CPU and memory need."""

from __future__ import annotations

import enum

import numpy as np

from workbench.perfmodels.domain import Number, at_least, plain, positive


class PmeForm(enum.Enum):
    """The sum, in Equation 3, of the KV held over a sequence's life."""

    CLOSED = "closed"
    """g (2p + g) / 2: the integral, which is the printed result."""
    SUM_INCLUSIVE = "sum 0..g"
    """(g + 1)(2p + g) / 2: the printed sum."""
    EXACT = "exact"
    """g (2p + g - 1) / 2 for p + g - 1 tokens: one prefill that emits a token and g - 1 decodes."""


def weight_pass_seconds(weight_bytes: Number, bandwidth: Number) -> Number:
    """Time in which all weights cross the link once [s].

        delta = Wm / B_IO

    Parameters
    ----------
    weight_bytes : number or array
        Wm, the streamed weights [B].
    bandwidth : number or array
        B_IO [B/s].

    Raises
    ------
    ValueError
        If an argument is not positive.

    Notes
    -----
    MoE-Lens, section 5.2. No time is lost between transfers.
    """
    return plain(positive("weight_bytes", weight_bytes, "give B") / positive("bandwidth", bandwidth, "give B/s"))


def gpu_tokens_per_second(flop_rate: Number, flops_per_token: Number) -> Number:
    """The GPU's rate if nothing else limits: T_GPU = C_GPU / F_tok [tokens/s].

    Parameters
    ----------
    flop_rate : number or array
        Sustained GEMM rate: the efficiency times the peak [FLOP/s].
    flops_per_token : number or array
        F_tok [FLOP].

    Raises
    ------
    ValueError
        If an argument is not positive.

    Notes
    -----
    MoE-Lens, below Eq. 4. Prompt and output tokens alike; FLOP of attention scores are left out.
    """
    rate = positive("flop_rate", flop_rate, "give FLOP/s")
    return plain(rate / positive("flops_per_token", flops_per_token, "give FLOP"))


def tokens_per_pass(tokens_per_second: Number, pass_seconds: Number) -> Number:
    """Tokens that the GPU computes while the weights stream once: n_it = T_GPU delta [tokens/iteration].

    Parameters
    ----------
    tokens_per_second : number or array
        T_GPU [tokens/s].
    pass_seconds : number or array
        delta [s].

    Raises
    ------
    ValueError
        If an argument is not positive.

    Notes
    -----
    MoE-Lens, Eqs. 10 to 13, where T_GPU stands for this.
    """
    rate = positive("tokens_per_second", tokens_per_second, "give tokens/s")
    return plain(rate * positive("pass_seconds", pass_seconds, "give s"))


def parallelism_memory_efficiency(prompt_len: Number, output_len: Number, *, form: PmeForm = PmeForm.CLOSED) -> Number:
    """Tokens processed in parallel per token of KV memory held [1/iteration].

        PME = 2 (p + g) / ((2 p + g) g)

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g [tokens].
    form : PmeForm
        CLOSED is the paper's result, SUM_INCLUSIVE its sum, EXACT the sum of a real sequence's iterations.

    Raises
    ------
    ValueError
        If g < 1 or p < 0; with EXACT also if p < 1, since the prefill emits the first token.

    Notes
    -----
    MoE-Lens, Eq. 3. Upper bound: every block is assumed full at every step.
    """
    p = at_least("prompt_len", prompt_len, 1 if form is PmeForm.EXACT else 0, "give tokens")
    g = at_least("output_len", output_len, 1, "give tokens")
    if form is PmeForm.CLOSED:
        return plain(2 * (p + g) / ((2 * p + g) * g))
    if form is PmeForm.SUM_INCLUSIVE:
        return plain(2 * (p + g) / ((g + 1) * (2 * p + g)))
    return plain(2 * (p + g - 1) / (g * (2 * p + g - 1)))


def stage1(
    prompt_len: Number,
    output_len: Number,
    kv_tokens: Number,
    pass_seconds: Number,
    gpu_tok_s: Number,
    *,
    form: PmeForm = PmeForm.CLOSED,
) -> Number:
    """Processed tokens per second that KV memory and GPU allow at most [tokens/s].

        T_max = min(PME M / delta, T_GPU)

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g [tokens].
    kv_tokens : number or array
        M, KV capacity in tokens.
    pass_seconds : number or array
        delta [s].
    gpu_tok_s : number or array
        T_GPU [tokens/s].
    form : PmeForm

    Raises
    ------
    ValueError
        If a rate, time or length is out of its domain.

    Notes
    -----
    MoE-Lens, Eq. 4. Prompt and output tokens together: times g/(p + g) for output tokens. Unlimited
    requests, blocks of one token, every iteration as long as one pass of weights.
    """
    pme = parallelism_memory_efficiency(prompt_len, output_len, form=form)
    memory = pme * at_least("kv_tokens", kv_tokens, 0, "give tokens") / positive("pass_seconds", pass_seconds, "give s")
    return plain(np.minimum(memory, positive("gpu_tok_s", gpu_tok_s, "give tokens/s")))


def kv_tokens_at_knee(
    prompt_len: Number, output_len: Number, pass_tokens: Number, *, form: PmeForm = PmeForm.CLOSED
) -> Number:
    """KV capacity from which the GPU limits Stage 1: M = n_it / PME [tokens].

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g [tokens].
    pass_tokens : number or array
        n_it [tokens/iteration].
    form : PmeForm

    Raises
    ------
    ValueError
        If a length is out of its domain.

    Notes
    -----
    MoE-Lens, Eq. 4 solved for M.
    """
    pme = parallelism_memory_efficiency(prompt_len, output_len, form=form)
    return plain(np.asarray(positive("pass_tokens", pass_tokens, "give tokens") / pme))


def kv_bandwidth_needed(weight_bytes: Number, kv_bytes: Number, link: Number) -> Number:
    """Rate at which the CPU must read KV so that attention is done when the weights have streamed [B/s].

        B_KV = KV / W B_IO

    Parameters
    ----------
    weight_bytes, kv_bytes : number or array
        W and KV [B]; only their ratio counts.
    link : number or array
        B_IO [B/s].

    Raises
    ------
    ValueError
        If W or B_IO is not positive, or KV negative.

    Notes
    -----
    MoE-Lens, Eq. 5 less the link's own reading; at KV = 2 W the requirement in Figure 10. The cache is full, every
    entry is read in every pass, and a pass takes as long as the weights stream.
    """
    w = positive("weight_bytes", weight_bytes, "give B")
    kv = at_least("kv_bytes", kv_bytes, 0, "give B")
    return plain(kv / w * positive("link", link, "give B/s"))


def host_bandwidth_needed(weight_bytes: Number, kv_bytes: Number, link: Number) -> Number:
    """DRAM bandwidth that streams the weights and reads all KV once per pass [B/s].

        B_mem = B_KV + B_IO = (W + KV) / W B_IO

    Parameters
    ----------
    weight_bytes, kv_bytes : number or array
        W and KV [B].
    link : number or array
        B_IO [B/s].

    Raises
    ------
    ValueError
        If W or B_IO is not positive, or KV negative.

    Notes
    -----
    MoE-Lens, Eq. 5, whose M is the total of weights and KV there, unlike in Eq. 4. The cache is full, every
    entry is read in every pass, and a pass takes as long as the weights stream.
    """
    return plain(np.asarray(kv_bandwidth_needed(weight_bytes, kv_bytes, link) + np.asarray(link)))


def cpu_flops_needed(group_size: Number, kv_bandwidth: Number, flop_per_fp32_byte: Number = 0.5) -> Number:
    """FLOP rate at which the CPU's attention keeps up with reading KV in bf16 [FLOP/s].

        T_CPU = 2 s I B_KV

    Parameters
    ----------
    group_size : number or array
        s, query heads that share one KV head.
    kv_bandwidth : number or array
        B_KV, KV bytes read per second, in bf16 [B/s].
    flop_per_fp32_byte : number or array
        I; one multiply-add for each 4-byte value gives 0.5.

    Raises
    ------
    ValueError
        If an argument is not positive.

    Notes
    -----
    MoE-Lens, Eq. 6. The 2 turns bytes of bf16 into bytes of the fp32 that is computed in. I is our reading.
    """
    s = positive("group_size", group_size, "give query heads per KV head")
    b = positive("kv_bandwidth", kv_bandwidth, "give B/s")
    return plain(2 * s * positive("flop_per_fp32_byte", flop_per_fp32_byte, "give FLOP/B") * b)


def effective_kv_capacity(prompt_len: Number, output_len: Number) -> Number:
    """Factor by which a KV cache counts as larger if blocks are allocated as sequences grow, instead of all at once.

        C_KV,eff / C_KV = (p + g) / (p + g/2)

    Parameters
    ----------
    prompt_len, output_len : number or array
        p and g [tokens].

    Raises
    ------
    ValueError
        If g < 1 or p < 0.

    Notes
    -----
    MoE-Lens, Eq. 7. Sequences of all ages in equal numbers; between 1 and 2.
    """
    p = at_least("prompt_len", prompt_len, 0, "give tokens")
    g = at_least("output_len", output_len, 1, "give tokens")
    return plain((p + g) / (p + g / 2))
