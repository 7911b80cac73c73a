"""MoE-Lightning's performance model: the time of one layer of decode under a policy, and the throughput of a job.

There are three versions of it (`Mode`), which share the formulas on which they agree. A policy's numbers may be arrays:
the search (`policy_search`) evaluates all candidates at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from workbench.core.units import DTYPE_BYTES
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.perfmodels.domain import Array, Number, caches_alike, plain

_STAGING_TRAFFIC = 3
"""Passes of DRAM by a streamed byte that is copied to pinned memory first: a read, a write, and a read by the link."""


class Mode(Enum):
    """Equations to use: of the paper's text, of the authors' public optimiser, or of the text with all costs added.

    PAPER has the text's Eqs 12 to 14 for all six variables of a policy. ARTIFACT computes as the public optimiser does:
    attention on the CPU and experts on the GPU, half of the attention's FLOP, the longest context, activations of the
    experts read and written. FULL adds to PAPER the costs that both leave out: prefill, attention projections, head,
    transfers of queries and attention output, DRAM traffic of staging, embeddings in GPU memory.
    """

    PAPER = "paper"
    ARTIFACT = "artifact"
    FULL = "full"


@dataclass(frozen=True)
class Job:
    """The model to serve, the machine, and the lengths of prompt and output.

    Parameters
    ----------
    model : ModelConfig
    machine : Machine
        The machine; its gpu is ONE GPU, or a node's GPUs together. FULL predicts best with measured rates
        (`Machine.limit(link=...)`).
    prompt_len, output_len : float
        s and n [tok]: the average prompt, or the longest where requests are padded.
    dtype : str
        Number format of weights, activations and KV cache.
    gpus : int
        Number of the machine's gpu that work tensor-parallel within the node.

    Raises
    ------
    ValueError
        If `model` is no ModelConfig or `machine` no Machine, a prompt is shorter than 1 token, an output shorter than 2
        or either endless, the dtype is none that is computed in, there is no GPU, or sequences outgrow a sliding
        window.
    """

    model: ModelConfig
    machine: Machine
    prompt_len: float
    output_len: float
    dtype: str = "bf16"
    gpus: int = 1

    def __post_init__(self) -> None:
        for name, kind in (("model", ModelConfig), ("machine", Machine)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"Job({name}=...) must be a {kind.__name__}, not {getattr(self, name)!r}; give one of "
                    f"wb.{name}s[...]."
                )
        if not self.prompt_len >= 1:
            raise ValueError(f"prompt_len={self.prompt_len} leaves nothing to prefill; give at least 1 token.")
        if not self.output_len >= 2:
            raise ValueError(f"output_len={self.output_len} has no decode step; give at least 2 tokens.")
        for name, length in (("prompt_len", self.prompt_len), ("output_len", self.output_len)):
            if math.isinf(length):
                raise ValueError(f"{name}={length} never ends; give tokens.")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not computed in; give one of {', '.join(DTYPE_BYTES)}.")
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} cannot compute; give at least 1.")
        caches_alike("MoE-Lightning's model", self.model)
        if self.model.windowed_layers and self.prompt_len + self.output_len > self.model.sliding_window:
            raise ValueError(
                f"sequences of {self.model.name} outgrow its sliding window of {self.model.sliding_window} tokens, "
                "which this model does not know; use bound or simulate."
            )

    @property
    def element(self) -> int:
        """Bytes of one number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def experts_bytes(self) -> float:
        """W_exp: all experts of one layer, mean over the layers [B]."""
        return float(self.model.routed_params * self.element / self.model.num_hidden_layers)

    @property
    def kv_per_token(self) -> float:
        """KV cache of one token in one layer [B]."""
        return float(self.model.kv_elements * self.element)

    @property
    def dense_params(self) -> float:
        """W_att: parameters of one layer that every token passes, without the router: attention, shared and dense."""
        return self.model.attention_params + self.model.unrouted_params

    @property
    def active_params(self) -> float:
        """Parameters of one layer that a token is multiplied with, the router left out."""
        model = self.model
        return self.dense_params + model.moe_share * model.num_experts_per_tok * model.expert_params

    @property
    def replicas(self) -> int:
        """GPUs in all, each of which holds the activations."""
        return self.gpus * self.machine.gpu.count

    @property
    def gpu_flops(self) -> float:
        """GEMM rate of all GPUs [FLOP/s]."""
        return self.gpus * self.machine.gpu.flop_rate(self.dtype)

    @property
    def gpu_bandwidth(self) -> float:
        """Memory bandwidth of all GPUs [B/s]."""
        return self.gpus * self.machine.gpu.bandwidth


class Policy(NamedTuple):
    """The paper's six-tuple; numbers, or arrays that broadcast against each other.

    Attributes
    ----------
    batch, micro_batch : float or array
        N and mu [sequences]; micro-batches are ceil(N / mu).
    gpu_attention, gpu_experts : float or array
        A_g and F_g, 1 where decode attention and the experts are computed on the GPU, else 0.
    weights_on_gpu, kv_on_gpu : float or array
        r_w and r_c: shares of the experts' weights and of the KV cache that stay in GPU memory.
    """

    batch: Number
    micro_batch: Number
    gpu_attention: Number = 0
    gpu_experts: Number = 1
    weights_on_gpu: Number = 0.0
    kv_on_gpu: Number = 0.0


class LayerTime(NamedTuple):
    """Time for which each resource is busy with one layer [s]; all overlap, so the longest is the layer's time."""

    link: Number
    gpu: Number
    cpu: Number
    back: Number

    @property
    def seconds(self) -> Number:
        """T = max(link, gpu, cpu, link back to the host)."""
        return plain(np.maximum.reduce(np.broadcast_arrays(*map(np.asarray, self))))

    def binding(self) -> str:
        """Name of the resource that is busy longest, for a single policy."""
        return max(self._fields, key=lambda name: float(getattr(self, name)))


class Estimate(NamedTuple):
    """Outcome of a policy: times of one layer of decode and of the passes, and output tokens per second of the job."""

    layer: LayerTime
    prefill: Number
    step: Number
    gen_tok_s: Number


def check(policy: Policy) -> None:
    """Refuse a policy outside the model's domain.

    Raises
    ------
    ValueError
        If mu is not in 1..N, N is infinite, an indicator is not 0 or 1, a share is not in [0, 1], or GPU memory gets a
        share of data that the GPU does not compute with.
    """
    batch, micro, on_gpu, experts, weights, kv = map(np.asarray, policy)
    if np.any(~((micro >= 1) & (micro <= batch))):
        raise ValueError("micro_batch must be at least 1 and at most the batch; choose mu in 1..N.")
    if np.any(np.isinf(batch)):
        raise ValueError("batch must be finite; give sequences.")
    for name, value in (("gpu_attention", on_gpu), ("gpu_experts", experts)):
        if np.any((value != 0) & (value != 1)):
            raise ValueError(f"{name} says where something is computed; give 1 for the GPU or 0 for the CPU.")
    for name, value, user in (("weights_on_gpu", weights, experts), ("kv_on_gpu", kv, on_gpu)):
        if np.any(~((value >= 0) & (value <= 1))):
            raise ValueError(f"{name} is a share; give a number from 0 to 1.")
        if np.any((value > 0) & (user == 0)):
            raise ValueError(f"{name} must be 0 where the CPU computes with it; set it to 0 or compute on the GPU.")


def check_mode(mode: Mode) -> None:
    """Refuse a value that is no `Mode`, such as the name "full".

    Raises
    ------
    ValueError
        If it is none.
    """
    if not isinstance(mode, Mode):
        raise ValueError(f"mode must be Mode.FULL, Mode.PAPER or Mode.ARTIFACT, not {mode!r}; give one of them.")


def layer_time(job: Job, policy: Policy, mode: Mode = Mode.FULL) -> LayerTime:
    """Time of one layer's decode step by resource [s].

        link = ((1 - r_w) W_exp F_g + (1 - r_c) KV A_g) / B_cg
        gpu  = A_g max(KV/B_g, F_att/P_g) + F_g max(ceil(N/mu) W_exp/B_g, F_ffn/P_g)
        cpu  = the same with 1 - A_g, 1 - F_g and the CPU's rates
        W_exp = E 3 h h_i b,  KV = N ctx 2 n_kv d b,  ctx = s + n/2,  F_att = 4 n_q d ctx N,  F_ffn = 6 k h h_i N

    Parameters
    ----------
    job : Job
    policy : Policy
        Number or arrays.
    mode : Mode
        FULL adds: to `gpu` the projections; to the link the outputs of the CPU, N b (h_att (1 - A_g) + h (1 - F_g)),
        where h_att is the width of the attention's output; to `cpu` 3 (1 - r_w) W_exp F_g / B_c, because staging shares
        DRAM with the attention and is taken not to overlap with it; and `back`: the queries and hidden states that the
        CPU computes with, and the new KV that is not kept on the GPU.

    Raises
    ------
    ValueError
        If the policy is outside the domain (see `check`), or `mode` no Mode.

    Notes
    -----
    MoE-Lightning, Eqs 12 to 14. Weights are read from GPU memory once per micro-batch. Assumes perfect overlap of all
    resources and that every micro-batch uses all experts.
    """
    check(policy)
    check_mode(mode)
    batch, micro, on_gpu, experts, weights, kv_share = map(np.asarray, policy)
    machine = job.machine
    count = np.ceil(batch / micro)
    kv = batch * (job.prompt_len + job.output_len / 2) * job.kv_per_token
    streamed = (1 - weights) * job.experts_bytes * experts
    att_bytes, att_flops = _attention(job, batch, mode)
    ffn_bytes, ffn_flops = _experts(job, batch, micro, mode)
    link = (streamed + on_gpu * (1 - kv_share) * kv) / machine.link.h2d
    gpu = on_gpu * np.maximum(att_bytes / job.gpu_bandwidth, att_flops / job.gpu_flops)
    gpu = gpu + experts * np.maximum(ffn_bytes / job.gpu_bandwidth, ffn_flops / job.gpu_flops)
    cpu_flops = machine.cpu.flop_rate("fp32")
    cpu = (1 - on_gpu) * np.maximum(att_bytes / machine.cpu.bandwidth, att_flops / cpu_flops)
    cpu = cpu + (1 - experts) * np.maximum(ffn_bytes / machine.cpu.bandwidth, ffn_flops / cpu_flops)
    back: Array = np.zeros_like(link)
    if mode is Mode.FULL:
        row = batch * job.element
        link = link + (1 - on_gpu) * row * job.model.absorbed_attn_size / machine.link.h2d
        link = link + (1 - experts) * row * job.model.hidden_size / machine.link.h2d
        weight_bytes = job.dense_params * job.element
        flops = 2.0 * job.dense_params * batch
        gpu = gpu + np.maximum(count * weight_bytes / job.gpu_bandwidth, flops / job.gpu_flops)
        cpu = cpu + _STAGING_TRAFFIC * streamed / machine.cpu.bandwidth
        moved = (1 - on_gpu) * row * job.model.absorbed_q_size + (1 - experts) * row * job.model.hidden_size
        back = (moved + batch * (1 - on_gpu * kv_share) * job.kv_per_token) / machine.link.d2h
    return LayerTime(plain(link), plain(gpu), plain(cpu), plain(back))


def _attention(job: Job, batch: Array, mode: Mode) -> tuple[Array, Array]:
    """Bytes and FLOP of one layer's decode attention."""
    model = job.model
    if mode is Mode.ARTIFACT:  # only scores and softmax, at the longest context; queries and outputs are moved too
        context = job.prompt_len + job.output_len
        rows = model.entry_macs * job.element + context * job.kv_per_token
        return batch * rows, batch * context * (2.0 * model.absorbed_q_size + 2 * model.num_attention_heads)
    context = job.prompt_len + job.output_len / 2
    return batch * context * job.kv_per_token, 2.0 * model.entry_macs * context * batch


def _experts(job: Job, batch: Array, micro: Array, mode: Mode) -> tuple[Array, Array]:
    """Bytes and FLOP of one layer's experts, weights read once per micro-batch."""
    model = job.model
    count = np.ceil(batch / micro)
    size = count * job.experts_bytes
    if mode is Mode.ARTIFACT:
        size = size + batch * job.element * (model.hidden_size + model.expert_width)
    return size, 2.0 * model.moe_share * model.num_experts_per_tok * model.expert_params * batch


def prefill_time(job: Job, policy: Policy) -> Number:
    """Time to prefill the whole batch, layer by layer, all on the GPU [s].

        L max(((1 - r_w) W_exp + N s h b)/B_cg, N s (2 W' + 4 n_q d s/2)/P_g, ceil(N/mu) (W_exp + W_att)/B_g, back)
        back = (N s kv/L (1 - r_c A_g) + N s h b)/B_gc,  W' = active parameters of a layer

    Parameters
    ----------
    job : Job
    policy : Policy
        Number or arrays.

    Raises
    ------
    ValueError
        If the policy is outside the domain.

    Notes
    -----
    The paper gives no formula (section 4: prefill runs on the GPU, KV goes to the CPU). Between layers the hidden
    states of the batch are kept in CPU memory, so they cross the link in both directions. The head runs once per
    sequence.
    """
    check(policy)
    batch, micro, on_gpu, _, weights, kv_share = map(np.asarray, policy)
    model = job.model
    machine = job.machine
    tokens = batch * job.prompt_len
    hidden = tokens * model.hidden_size * job.element
    scores = float(model.pair_macs) * job.prompt_len
    link = ((1 - weights) * job.experts_bytes + hidden) / machine.link.h2d
    compute = tokens * (2.0 * job.active_params + scores) / job.gpu_flops
    read = np.ceil(batch / micro) * (job.experts_bytes + job.dense_params * job.element) / job.gpu_bandwidth
    back = (tokens * (1 - kv_share * on_gpu) * job.kv_per_token + hidden) / machine.link.d2h
    layer = np.maximum.reduce(np.broadcast_arrays(link, compute, read, back))
    return plain(model.num_hidden_layers * layer + _head_time(job, batch, micro))


def _head_time(job: Job, batch: Array, micro: Array) -> Array:
    params = job.model.vocab_size * job.model.hidden_size
    read = np.ceil(batch / micro) * params * job.element / job.gpu_bandwidth
    seconds: Array = np.maximum(read, 2.0 * params * batch / job.gpu_flops)
    return seconds


def estimate(job: Job, policy: Policy, mode: Mode = Mode.FULL) -> Estimate:
    """Output tokens per second of a policy over the whole job.

        FULL             N n / (T_prefill + (n - 1) (L T + T_head))
        PAPER, ARTIFACT  N n / ((n - 1) L T)

    Parameters
    ----------
    job : Job
    policy : Policy
        Number or arrays.
    mode : Mode

    Raises
    ------
    ValueError
        If the policy is outside the domain, or `mode` no Mode.

    Notes
    -----
    MoE-Lightning says that T is minimised, which alone chooses N = 1; its optimiser minimises T/N, as here. Memory is
    not checked: see `policy_memory.fits`.
    """
    layer = layer_time(job, policy, mode)
    batch = np.asarray(policy.batch)
    micro = np.asarray(policy.micro_batch)
    step = job.model.num_hidden_layers * np.asarray(layer.seconds)
    prefill: Array = np.zeros_like(step)
    if mode is Mode.FULL:
        step = step + _head_time(job, batch, micro)
        prefill = np.asarray(prefill_time(job, policy))
    tokens = batch * job.output_len
    return Estimate(layer, plain(prefill), plain(step), plain(tokens / (prefill + (job.output_len - 1) * step)))
