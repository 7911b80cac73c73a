"""MoE-CAP: sparsity-aware utilisation of every resource, and the rates that a latency target needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.perfmodels.domain import Number, at_least, caches_alike, positive, within


def activated_size(
    layers: ArrayLike, attention: ArrayLike, expert: ArrayLike, distinct: ArrayLike, *, always: ArrayLike = 0.0
) -> Number:
    """Bytes of the parameters that one step reads, from sizes alone [B].

        S_act = n_layer S_attn + S_expert (sum over layers of distinct experts) + always

    Parameters
    ----------
    layers, attention, expert : array_like
        Number of layers, and bytes of one layer's attention and of one expert [B].
    distinct : array_like
        Experts that at least one token was routed to, summed over the layers.
    always : array_like
        Bytes of shared experts, dense layers, routers and head, which every step reads [B].

    Raises
    ------
    ValueError
        If one of them is negative.

    Notes
    -----
    MoE-CAP, Eq. 5. A dense model is one whose single expert is always distinct.
    """
    mend = "give counts and bytes"
    n = at_least("layers", layers, 0, mend=mend)
    s_attn = at_least("attention", attention, 0, mend=mend)
    s_expert = at_least("expert", expert, 0, mend=mend)
    count = at_least("distinct", distinct, 0, mend=mend)
    rest = at_least("always", always, 0, mend=mend)
    return n * s_attn + count * s_expert + rest


def activated_bytes(model: ModelConfig, coverage: ArrayLike) -> Number:
    """Bytes of a model's parameters that one step reads [B]: Eq. 5 with everything that is always read.

    Parameters
    ----------
    model : ModelConfig
    coverage : array_like
        Share of a layer's experts that the batch touches, mean over the layers (see `coverage`).

    Raises
    ------
    ValueError
        If the coverage is not between 0 and 1.

    Notes
    -----
    MoE-CAP, Eq. 5; the head counts as read, the embedding table does not. Traced routing gives the coverage
    ``traced_experts(...).mean() / experts``.
    """
    share = within("coverage", coverage, 0, 1, mend="give distinct experts / all experts")
    return model.always_bytes + share * model.routed_bytes


def kv_read_bytes(model: ModelConfig, batch: ArrayLike, context: ArrayLike) -> Number:
    """KV cache that one decode step of a batch reads [B]: batch x cached tokens over all layers x bytes of one.

    Raises
    ------
    ValueError
        If batch or context is negative.

    Notes
    -----
    S_KV of MoE-CAP's Eqs. 1 and 5, of the whole step and not "per token" as printed.
    """
    caches_alike("MoE-CAP's S_KV", model)
    batch = at_least("batch", batch, 0, mend="give the sequences of one step")
    tokens = at_least("context", context, 0, mend="give the cached tokens of one sequence")
    return batch * model.attended(tokens) * model.kv_bytes_per_token(model.dtype)


def kv_tokens(model: ModelConfig, context: ArrayLike) -> Number:
    """Cached tokens that one query token attends to, summed over the layers; sliding windows cap it.

    Raises
    ------
    ValueError
        If the context is negative.
    """
    caches_alike("MoE-CAP's S-F_token", model)
    tokens = at_least("context", context, 0, mend="give the cached tokens of one sequence")
    return model.num_hidden_layers * model.attended(tokens)


def required_bandwidth(activated: ArrayLike, kv: ArrayLike, tpot: ArrayLike) -> Number:
    """Bandwidth that is needed to read parameters and KV cache once per output token [B/s]: (S_act + S_KV) / TPOT.

    Parameters
    ----------
    activated, kv : array_like
        S_act and S_KV [B].
    tpot : array_like
        Time per output token [s].

    Raises
    ------
    ValueError
        If a size is negative or TPOT not positive.

    Notes
    -----
    MoE-CAP, Eq. 1. Activations and intermediate states are left out.
    """
    read = at_least("activated", activated, 0, mend="give bytes") + at_least("kv", kv, 0, mend="give bytes")
    return read / positive("tpot", tpot, "give seconds per output token")


def required_ops(
    batch: ArrayLike,
    active_params: ArrayLike,
    kv_tokens: ArrayLike,
    kv_elements: ArrayLike,
    tpot: ArrayLike,
    *,
    query_group: ArrayLike,
) -> Number:
    """Operations per second that are needed for one step per TPOT [FLOP/s].

        OPS = 2 B (p_act + l s_kv group) / TPOT

    Parameters
    ----------
    batch : array_like
        B [sequences].
    active_params : array_like
        p_act, parameters that one token is multiplied with.
    kv_tokens, kv_elements : array_like
        l, cached tokens of one sequence times layers; s_kv, cache ELEMENTS of one token and layer.
    tpot : array_like
        Time per output token [s].
    query_group : array_like
        Multiply-adds per cached element: H / K for grouped queries, H (2 d_c + d_r) / (d_c + d_r) for absorbed MLA.

    Raises
    ------
    ValueError
        If one is negative or TPOT not positive.

    Notes
    -----
    MoE-CAP, Eq. 2, mended: as printed s_kv is a size in bytes and the query group is missing.
    """
    batch = at_least("batch", batch, 0, mend="give the sequences of one step")
    weights = at_least("active_params", active_params, 0, mend="give parameters per token")
    scores = at_least("kv_tokens", kv_tokens, 0, mend="give cached tokens x layers")
    scores = scores * at_least("kv_elements", kv_elements, 0, mend="give elements, not bytes")
    scores = scores * at_least("query_group", query_group, 0, mend="give query heads per KV head")
    return 2.0 * batch * (weights + scores) / positive("tpot", tpot, "give seconds per output token")


def practical(theoretical: ArrayLike, utilisation: ArrayLike) -> Number:
    """Nominal figure that hardware needs to meet a theoretical demand: theoretical / S-MBU (or S-MFU).

    Raises
    ------
    ValueError
        If the demand is negative or the utilisation not above 0 and at most 1.

    Notes
    -----
    MoE-CAP, Eqs. 3 and 4. Assumes that the profiled utilisation holds at the target too.
    """
    share = positive("utilisation", utilisation, "give a share of the peak")
    within("utilisation", share, 0, 1, mend="give a share of the peak")
    return at_least("theoretical", theoretical, 0, mend="give bytes or FLOP per second") / share


def smbu(activated: ArrayLike, kv: ArrayLike, tpot: ArrayLike, peak: ArrayLike) -> Number:
    """Sparse memory bandwidth utilisation [1]: (S_act + S_KV) / TPOT / B_peak.

    Parameters
    ----------
    activated, kv : array_like
        S_act and S_KV [B]; with the whole model for S_act it is the ordinary MBU.
    tpot : array_like
        Measured time per output token [s].
    peak : array_like
        B_peak [B/s].

    Raises
    ------
    ValueError
        If a size is negative, or TPOT or peak not positive.

    Notes
    -----
    MoE-CAP, Eq. 5. Above 1 means that not everything counted was read, or that the peak is wrong.
    """
    return required_bandwidth(activated, kv, tpot) / positive("peak", peak, "give bytes per second")


def smfu(tok_s: ArrayLike, flops_per_token: ArrayLike, peak: ArrayLike) -> Number:
    """Sparse model FLOPS utilisation [1]: T_token S-F_token / F_peak.

    Raises
    ------
    ValueError
        If throughput [tokens/s] or FLOP per token is negative, or the peak [FLOP/s] not positive.

    Notes
    -----
    MoE-CAP, Eq. 6.
    """
    rate = at_least("tok_s", tok_s, 0, mend="give tokens per second")
    work = at_least("flops_per_token", flops_per_token, 0, mend="give FLOP, as token_flops does")
    return rate * work / positive("peak", peak, "give FLOP per second")


def token_flops(model: ModelConfig, context: ArrayLike) -> Number:
    """Operations of one token, its attention over the cached context included [FLOP].

        S-F_token = sum over layers of F_attn + 2 (N_router + k_expert N_expert), dense layers 2 N_ffn, head 2 N_head

    Raises
    ------
    ValueError
        If the context [tokens] is negative.

    Notes
    -----
    MoE-CAP, Eq. 7, mended: the print leaves out the sum over layers. k_expert includes shared experts.
    """
    return required_ops(
        1, model.active_params, kv_tokens(model, context), model.kv_elements, 1.0, query_group=model.query_group
    )


def overestimate(total: ArrayLike, activated: ArrayLike) -> Number:
    """Factor by which MBU and MFU come out too high when all parameters are counted [1]: total / activated.

    Raises
    ------
    ValueError
        If the activated size is not positive or above the total.

    Notes
    -----
    MoE-CAP, Figure 3.
    """
    active = positive("activated", activated, "give a size in the unit of the total")
    whole = positive("total", total, "give a size in the unit of the activated")
    if np.any(active > whole):
        raise ValueError(f"activated must be at most the total, not {activated!r} of {total!r}; swap or correct them.")
    return whole / active


@dataclass(frozen=True)
class Placement:
    """Placement of a model's routed experts and KV cache, and the processor that computes with them.

    Attributes
    ----------
    weights_on_gpu, kv_on_gpu : float
        Shares of the routed experts and of the KV cache in GPU memory (r_w, r_c); the rest is in DRAM.
    gpu_experts, gpu_attention : bool
        F_g and A_g: True if the GPU computes everything, and data in DRAM cross the link; False if the CPU computes
        with the data in DRAM.

    Raises
    ------
    ValueError
        If a share is not between 0 and 1, or `gpu_experts` or `gpu_attention` neither True nor False.
    """

    weights_on_gpu: float = 1.0
    kv_on_gpu: float = 1.0
    gpu_experts: bool = True
    gpu_attention: bool = True

    def __post_init__(self) -> None:
        within("weights_on_gpu", self.weights_on_gpu, 0, 1, mend="give a share")
        within("kv_on_gpu", self.kv_on_gpu, 0, 1, mend="give a share")
        for name in ("gpu_experts", "gpu_attention"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(
                    f"{name} must be True or False, not {getattr(self, name)!r}; give True if the GPU computes it all."
                )


class Resources(NamedTuple):
    """One number per resource: GPU memory, DRAM, host-to-device link, GPU and CPU arithmetic."""

    hbm: Number
    dram: Number
    link: Number
    gpu: Number
    cpu: Number

    @classmethod
    def of(cls, machine: Machine, dtype: str = "bf16") -> Resources:
        """A machine's rates [B/s], [B/s], [B/s], [FLOP/s], [FLOP/s]; sustained rates if it lists them."""
        gpu = machine.gpu
        cpu = machine.cpu
        rates = (gpu.bandwidth, cpu.bandwidth, machine.link.h2d, gpu.flop_rate(dtype), cpu.flop_rate(dtype))
        return cls(*rates)


def step_demand(
    model: ModelConfig, placement: Placement, *, batch: ArrayLike, context: ArrayLike, coverage: ArrayLike
) -> Resources:
    """Demand of one decode step on every resource [B], [B], [B], [FLOP], [FLOP].

    Parameters
    ----------
    model, placement : ModelConfig, Placement
    batch, context, coverage : array_like
        Sequences, cached tokens of each, share of the experts that the batch touches.

    Raises
    ------
    ValueError
        If one is outside its domain.

    Notes
    -----
    MoE-CAP's Eqs. 5 to 7 for each resource, instead of for the GPU alone. Touched experts are spread evenly over
    resident and offloaded ones. Data that cross the link are read once from DRAM and once from GPU memory; writing them
    there is left out. Only data that the tokens need count: streaming experts that no token chose lowers the
    utilisation.
    """
    share = within("coverage", coverage, 0, 1, mend="give distinct experts / all experts")
    rows = at_least("batch", batch, 0, mend="give the sequences of one step")
    expert_bytes = share * model.routed_bytes
    away = (1.0 - placement.weights_on_gpu) * expert_bytes
    kv = kv_read_bytes(model, batch, context)
    kv_away = (1.0 - placement.kv_on_gpu) * kv
    always = model.always_bytes
    cpu_experts = 0.0 if placement.gpu_experts else 1.0
    cpu_attention = 0.0 if placement.gpu_attention else 1.0
    expert_flops = 2.0 * rows * model.moe_layers * model.num_experts_per_tok * model.expert_params
    score_flops = 2.0 * rows * kv_tokens(model, context) * model.entry_macs
    on_cpu = cpu_experts * (1.0 - placement.weights_on_gpu) * expert_flops
    on_cpu = on_cpu + cpu_attention * (1.0 - placement.kv_on_gpu) * score_flops
    total = 2.0 * rows * model.always_params + expert_flops + score_flops
    return Resources(
        hbm=always + expert_bytes - cpu_experts * away + kv - cpu_attention * kv_away,
        dram=away + kv_away,
        link=(1.0 - cpu_experts) * away + (1.0 - cpu_attention) * kv_away,
        gpu=total - on_cpu,
        cpu=on_cpu,
    )


def utilisation(demand: Resources, peaks: Resources, tpot: ArrayLike) -> Resources:
    """S-MBU of GPU memory, DRAM and link, S-MFU of GPU and CPU [1 each]: demand / TPOT / peak.

    Raises
    ------
    ValueError
        If a demand is negative, or a peak or TPOT not positive.

    Notes
    -----
    MoE-CAP, Eqs. 5 and 6, per resource. The largest is that of the resource that binds.
    """
    seconds = positive("tpot", tpot, "give seconds per output token")
    shares = (
        at_least(name, need, 0, mend="give bytes or FLOP of one step")
        / seconds
        / positive(f"peak of {name}", peak, "give bytes or FLOP per second")
        for name, need, peak in zip(Resources._fields, demand, peaks, strict=True)
    )
    return Resources(*shares)
