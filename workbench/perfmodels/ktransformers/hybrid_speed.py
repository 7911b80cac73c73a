"""KTransformers' machines: NUMA options, and the speed of decode and prefill with the experts on the CPU."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from workbench.hardware.processors import Processor
from workbench.models import ModelConfig
from workbench.perfmodels.coverage import uniform_coverage
from workbench.perfmodels.domain import Array, Number, at_least, caches_alike, positive
from workbench.perfmodels.ktransformers.deferral import LayerTimes, choose_kernel, experts_to_defer, layer_time
from workbench.perfmodels.moe_cap import kv_read_bytes


class Numa(enum.Enum):
    """Placement of experts, and the sockets that compute them, on a host of several sockets."""

    SINGLE = "one socket alone"
    OBLIVIOUS = "pages anywhere, threads anywhere"
    EXPERTS = "whole experts, each on one socket"
    TENSORS = "a slice of every expert on every socket"


def numa_bandwidth(numa: Numa, *, sockets: int, local: ArrayLike, remote: ArrayLike, top_k: int) -> Number:
    """Bandwidth at which one token's k experts are read from DRAM [B/s].

        SINGLE     B
        OBLIVIOUS  n / ((1 / n) / B + (1 - 1 / n) / B_remote)
        EXPERTS    B k / E[most experts on one socket]
        TENSORS    n B

    Parameters
    ----------
    numa : Numa
    sockets : int
        n.
    local, remote : array_like
        B of one socket's own memory, B_remote of another's [B/s].
    top_k : int
        k; each falls on every socket equally likely.

    Raises
    ------
    ValueError
        If sockets or k is below 1, or a bandwidth not positive.

    Notes
    -----
    KTransformers section 3.3 names the options; the formulas are ours. OBLIVIOUS takes the remote rate that remains
    while every socket reads from the others; adding up partial sums is free.
    """
    n = int(at_least("sockets", sockets, 1, mend="give the sockets of the host"))
    k = int(at_least("top_k", top_k, 1, mend="give the experts per token"))
    own = positive("local", local, "give bytes per second")
    other = positive("remote", remote, "give bytes per second")
    if numa is Numa.SINGLE:
        return own
    if numa is Numa.OBLIVIOUS:
        return n / (1.0 / n / own + (1.0 - 1.0 / n) / other)
    if numa is Numa.EXPERTS:
        return own * k / _expected_most(k, n)
    return n * own


def _expected_most(balls: int, bins: int) -> float:
    """Expected largest count when balls fall into equally likely bins.

    Counts are independent Poisson ones of mean balls / bins that happen to sum to balls:
    P(no count above m) = coefficient of x^balls in (sum of P(j) x^j for j <= m)^bins / P(the sum is balls).
    """
    share = _poisson(balls, balls / bins)
    certain = _poisson(balls, float(balls))[balls]
    expected = 0.0
    for most in range(balls):
        power = np.ones(1)
        for _ in range(bins):
            power = np.convolve(power, share[: most + 1])[: balls + 1]
        expected += 1.0 - (float(power[balls] / certain) if power.size > balls else 0.0)
    return expected


def _poisson(most: int, mean: float) -> Array:
    """Probabilities of 0 up to `most` events; factorials would overflow from 171 on."""
    ratios: Array = np.cumsum(np.log(mean / np.arange(1, most + 1)))
    return np.exp(np.concatenate(([0.0], ratios)) - mean)


@dataclass(frozen=True)
class HybridMachine:
    """A GPU beside a host whose CPU computes the routed experts.

    Attributes
    ----------
    gpu : Processor
    sockets : int
    local, remote : float
        DRAM bandwidth of a socket's own memory and of another's [B/s].
    tile_flops, vector_flops : float
        Rates of the CPU kernels per socket [FLOP/s].
    gpu_efficiency, cpu_efficiency : float
        Shares of the GPU's and of the host's bandwidth that decode reaches.
    sync : float
        Submission and synchronisation per layer [s].
    numa : Numa
    """

    gpu: Processor
    sockets: int
    local: float
    remote: float
    tile_flops: float
    vector_flops: float
    gpu_efficiency: float = 1.0
    cpu_efficiency: float = 1.0
    sync: float = 0.0
    numa: Numa = Numa.TENSORS

    def calibrated(self, model: ModelConfig, profile: LayerTimes) -> HybridMachine:
        """The same machine with the efficiencies and synchronisation that a profiled layer [s] of one model implies.

        Raises
        ------
        ValueError
            If the profile's attention takes no time.
        """
        attention = float(positive("attention", profile.attention, "profile a layer whose attention takes time"))
        ideal = replace(self, gpu_efficiency=1.0, cpu_efficiency=1.0, sync=0.0)
        perfect = decode_layer(model, ideal)
        return replace(
            self,
            gpu_efficiency=perfect.attention / attention,
            cpu_efficiency=perfect.routed / profile.routed,
            sync=profile.sync,
        )


def decode_layer(model: ModelConfig, machine: HybridMachine) -> LayerTimes:
    """Times of one MoE layer for one token [s]: bytes of each component over the bandwidth that is reached.

    Notes
    -----
    KTransformers section 4.2. At batch 1 every component is bound by reading its weights once.
    """
    caches_alike("KTransformers' model", model)
    rate = machine.gpu.bandwidth * machine.gpu_efficiency
    chosen = model.num_experts_per_tok
    host = numa_bandwidth(
        machine.numa, sockets=machine.sockets, local=machine.local, remote=machine.remote, top_k=chosen
    )
    return LayerTimes(
        attention=(model.attention_params + model.router_params) * model.other_bytes / rate,
        shared=model.shared_params * model.other_bytes / rate,
        routed=chosen * model.expert_params * model.expert_bytes / float(host * machine.cpu_efficiency),
        sync=machine.sync,
    )


def deferred_experts(model: ModelConfig, machine: HybridMachine) -> int:
    """Experts to defer on this machine: the fewest that keep the CPU busy, two staying immediate."""
    times = decode_layer(model, machine)
    chosen = model.num_experts_per_tok
    return int(experts_to_defer(times.attention + times.sync, times.routed / chosen, top_k=chosen))


def decode_speed(
    model: ModelConfig, machine: HybridMachine, *, deferred: ArrayLike = 0, context: ArrayLike = 0
) -> Number:
    """Tokens per second of a single sequence [tokens/s].

        1 / (moe_layers T(D) + dense_layers T_dense + T_head + T_KV)

    Parameters
    ----------
    model : ModelConfig
        The model, with the bytes per parameter with which it is deployed.
    machine : HybridMachine
    deferred, context : array_like
        D, and cached tokens.

    Raises
    ------
    ValueError
        If D is no whole number from 0 to k - 1 or the context negative.

    Notes
    -----
    KTransformers sections 4.2 and 6.2. Dense layers, head and KV cache are on the GPU; the last layer's missing
    deferral (one layer in tens) is left out.
    """
    rate = machine.gpu.bandwidth * machine.gpu_efficiency
    times = decode_layer(model, machine)
    moe = model.moe_layers * layer_time(times, deferred, top_k=model.num_experts_per_tok)
    dense = model.dense_layers * (times.attention + model.dense_params * model.other_bytes / rate)
    ends = (model.head_bytes + kv_read_bytes(model, 1, context)) / rate
    return 1.0 / (moe + dense + ends)


def prefill_speed(model: ModelConfig, machine: HybridMachine, prompt: ArrayLike) -> Number:
    """Prompt tokens per second of a single prompt that is not cut into chunks [tokens/s].

    A layer takes A + max(S, x + R). The time on the GPU is the larger of reading weights and computing at its nominal
    rate; that on the CPU is the larger of reading the touched experts and computing with the kernel that is chosen for
    their mean number of tokens.

    Parameters
    ----------
    model, machine : ModelConfig, HybridMachine
    prompt : array_like
        L [tokens].

    Raises
    ------
    ValueError
        If L < 1.

    Notes
    -----
    KTransformers sections 3.2 and 6.2; nothing is deferred in prefill. Uniform routing. An upper estimate: GPU kernels
    and load balance are perfect, activations move for free.
    """
    caches_alike("KTransformers' model", model)
    length = at_least("prompt", prompt, 1, mend="give tokens")
    sockets = 1 if machine.numa is Numa.SINGLE else machine.sockets
    tile = choose_kernel(length * model.num_experts_per_tok / model.num_local_experts).tile
    flops = np.where(tile, machine.tile_flops, machine.vector_flops) * sockets
    share = uniform_coverage(length, experts=model.num_local_experts, top_k=model.num_experts_per_tok)
    touched = model.num_local_experts * share
    # If every expert is touched, the sockets are balanced, with whole experts and with slices of them.
    spread = Numa.TENSORS if machine.numa is Numa.EXPERTS else machine.numa
    host = numa_bandwidth(spread, sockets=machine.sockets, local=machine.local, remote=machine.remote, top_k=1)
    reading = touched * model.expert_params * model.expert_bytes / (host * machine.cpu_efficiency)
    routed = np.maximum(reading, 2.0 * length * model.num_experts_per_tok * model.expert_params / flops)

    def on_gpu(params: float) -> Number:
        read = params * model.other_bytes / (machine.gpu.bandwidth * machine.gpu_efficiency)
        time: Number = np.maximum(read, 2.0 * length * params / machine.gpu.flops)
        return time

    scores = 2.0 * model.attended_below(length) * model.pair_macs
    attention = on_gpu(model.attention_params + model.router_params) + scores / machine.gpu.flops
    moe = attention + np.maximum(on_gpu(model.shared_params), machine.sync + routed)
    dense = attention + on_gpu(model.dense_params)
    head = model.head_bytes / (machine.gpu.bandwidth * machine.gpu_efficiency)
    total: Number = model.moe_layers * moe + model.dense_layers * dense + head
    return length / total
