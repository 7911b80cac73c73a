"""A policy of MoE-Lightning's model as a scenario and a schedule, which every reader takes."""

from __future__ import annotations

import math

from workbench.perfmodels.moe_lightning.model import Job, Policy
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.scenario import Memory, Scenario
from workbench.scheduler.static import StaticBatching
from workbench.schedules import CGOPipe, FlexGenS4, Overlap, Schedule
from workbench.stages import (
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    out_proj,
    prefill_attention,
    qkv,
    route,
)
from workbench.workload import Workload

_BLOCK = 16


def as_scenario(policy: Policy, job: Job, workload: Workload) -> tuple[Scenario, Schedule]:
    """The scenario and schedule that a policy (N, mu, A_g, F_g, r_w, r_c) describes.

    A_g and F_g place decode attention and experts; experts on the GPU are streamed, and r_w of them stays there. With
    attention on the GPU the cache is streamed, and r_c of it stays there; with r_c = 1 nothing of it is streamed. N
    sets the KV capacity, mu the size and N / mu the number of the micro-batches.

    Parameters
    ----------
    policy : Policy
        Numbers only.
    job : Job
    workload : Workload
        Requests of about the job's lengths.

    Returns
    -------
    scenario : Scenario
        With `StaticBatching`, MoE-Lightning's scheduler; an iteration prefills the prompts of one micro-batch.
    schedule : Schedule
        CGOPipe with attention on the CPU and experts on the GPU, FlexGen's S4 where the cache is streamed, else
        `Overlap`.

    Raises
    ------
    WorkbenchError
        If the requests do not fit the cache, or the parts of the scenario do not go together.
    """
    parts = math.ceil(float(policy.batch) / float(policy.micro_batch))
    longest = int((workload.prompt_len + workload.output_len).max())
    sequence = -(-max(longest, math.ceil(job.prompt_len + job.output_len)) // _BLOCK) * _BLOCK
    streams_kv = bool(policy.gpu_attention) and float(policy.kv_on_gpu) < 1
    memory = Memory(
        kv_capacity=float(policy.batch) * sequence * job.kv_per_token * job.model.num_hidden_layers,
        kv_block=_BLOCK,
        weights=job.dtype,
        kv=job.dtype,
        weights_on_gpu=float(policy.weights_on_gpu) if policy.gpu_experts else 0.0,
        kv_on_gpu=float(policy.kv_on_gpu) if streams_kv else 0.0,
    )
    layer = _layer(on_gpu=bool(policy.gpu_attention), experts_on_gpu=bool(policy.gpu_experts), streams_kv=streams_kv)
    micro_batch = round(float(policy.micro_batch))
    scheduler = StaticBatching(parts, micro_batch, token_budget=micro_batch * float(workload.prompt_len.max()))
    return Scenario(layer, job.model, job.machine, memory, workload, scheduler), _schedule(policy, parts, streams_kv)


def _layer(*, on_gpu: bool, experts_on_gpu: bool, streams_kv: bool) -> Pipeline:
    """The pipeline of a placement of decode attention and experts."""
    if on_gpu:
        first = gpu(qkv, attention, out_proj, route)
    else:
        first = gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, route)
    if not experts_on_gpu:
        layer = first >> offload >> cpu(experts) >> load >> gpu(combine)
        return fetch(kv) | layer if streams_kv else layer
    streamed = fetch(experts.weights, kv) if streams_kv else fetch(experts.weights)
    return streamed | first >> gpu(experts, combine)


def _schedule(policy: Policy, parts: int, streams_kv: bool) -> Schedule:
    if policy.gpu_experts and not policy.gpu_attention:
        return CGOPipe(parts)
    if policy.gpu_experts and streams_kv:
        return FlexGenS4(parts)
    return Overlap(parts)
