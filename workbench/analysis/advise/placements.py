"""Placements of a model that people use, as pipelines and schedules under the names by which the field knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, Stack, cpu, fetch, gpu, load, offload, ranges_of
from workbench.schedules import CGOPipe, FastDecode, FlexGenS4, KTransformers, Schedule, Sequential, VSLPipe
from workbench.stages import (
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
    weights,
)

_KEPT = 20
"""Steps in which weights that would stream are kept on the GPU: twentieths of them."""
_SHARED = 16
"""Most steps in which the experts of a layer are shared between GPU and CPU."""


@dataclass(frozen=True)
class Layout:
    """One step of a placement.

    Attributes
    ----------
    what, known_as : str
        The placement in words, and the systems or options that place a model so.
    pipeline : Pipeline or Stack
    kept, kv_kept : float
        Shares of the streamed weights and of the streamed KV cache that stay on the GPU.
    """

    what: str
    known_as: str
    pipeline: Pipeline | Stack
    kept: float = 0.0
    kv_kept: float = 0.0

    @property
    def on_both(self) -> bool:
        """True if GPU and CPU share the work, or the GPU gets it from the host."""
        ranges = ranges_of(self.pipeline)
        devices = {stage.device for each in ranges for stage in each.pipeline.stages}
        return len(devices) > 1 or any(each.pipeline.fetches for each in ranges)


@dataclass(frozen=True)
class Placement:
    """A placement and its schedule.

    Attributes
    ----------
    layout : callable
        The layout at a step. Each step puts more weights on the GPU than the one before.
    schedule : Schedule
    steps : range
    partial : bool
        True if it is for models that do not fit the GPU whole: behind its last step all weights would be there.
    streams : bool
        True if weights stream ahead of their use, so that an iteration had better have many tokens.
    of_batches : bool
        True if it is for batches only: the schedule overlaps the work of several parts of a batch.
    """

    layout: Callable[[int], Layout]
    schedule: Schedule
    steps: range = range(1)
    partial: bool = False
    streams: bool = False
    of_batches: bool = False


def placements(model: ModelConfig) -> Iterator[Placement]:
    """Every placement that is tried for a model, but those without a step; the first is everything on the GPU."""
    yield from (each for each in _every(model) if each.steps)


def _every(model: ModelConfig) -> Iterator[Placement]:
    layers = model.num_hidden_layers
    on_gpu = gpu(qkv, attention, out_proj, moe)
    on_cpu = cpu(qkv, attention, out_proj, moe)
    yield Placement(_always("everything on the GPU", "llama.cpp -ngl 99, vLLM", on_gpu), Sequential())
    yield from _experts_apart(model, on_gpu)

    def whole_layers(count: int) -> Layout:
        rest = layers - count
        stack = on_cpu[:rest] + on_gpu[rest:]
        return Layout(f"{count} of {layers} layers on the GPU", f"llama.cpp -ngl {count + 1}", stack)  # and the head

    yield Placement(whole_layers, Sequential(), range(1, layers), partial=True)
    yield from _streams(on_gpu)
    yield Placement(_always("everything on the CPU", "llama.cpp -ngl 0", on_cpu), Sequential())


def _experts_apart(model: ModelConfig, on_gpu: Pipeline) -> Iterator[Placement]:
    """Placements with routed experts on the CPU, all else on the GPU.

    KTransformers computes the experts of both devices at the same time. Here they take turns: in the table of its
    documentation (doc/en/kt-kernel/experts-sched-Tutorial.md) throughput rises no faster with the share of the experts
    on the GPU, unless these are the most used ones.
    """
    layers = model.num_hidden_layers
    dense = next((layer for layer, kind in enumerate(model.layer_kinds) if not kind.dense), layers)
    every = model.num_local_experts
    steps = min(_SHARED, every)
    shared = (shared_experts,) if model.unrouted_params else ()
    before = gpu(qkv, attention, out_proj, route)
    behind = gpu(*shared, combine)
    round_trip = offload >> cpu(experts) >> load
    beside = gpu(shared_experts) | round_trip if shared else round_trip
    decodes = gpu(experts.prefill) | offload >> cpu(experts.decode) >> load
    fetched = fetch(experts.prefill.chosen) | before >> decodes >> behind

    def of_layers(on_the_gpu: int) -> Layout:
        count = layers - on_the_gpu
        stack = fetched[:count] + on_gpu[count:]
        return Layout(f"experts of {count} of {layers} layers on the CPU", f"llama.cpp -ncmoe {count}", stack)

    def of_each_layer(step: int) -> Layout:
        count = every * step // steps
        sets = gpu(experts[:count]) | offload >> cpu(experts[count:]) >> load
        known_as = f"KTransformers --kt-num-gpu-experts {count}"
        return Layout(f"{count} of {every} experts per layer on the GPU", known_as, before >> sets >> behind)

    yield Placement(of_layers, Sequential(), range(1, layers - dense), partial=True)
    yield Placement(of_each_layer, Sequential(), range(1, steps), partial=True)
    yield Placement(_always("experts on the CPU, fetched for prompts", "llama.cpp -cmoe", fetched), Sequential())
    yield Placement(_always("experts on the CPU", "KTransformers", before >> beside >> gpu(combine)), KTransformers())


def _streams(on_gpu: Pipeline) -> Iterator[Placement]:
    """Placements whose weights are on the host and come to the GPU when they are needed, or whose KV cache is there."""
    attending = gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
    some = range(_KEPT)
    chosen = _always("experts fetched once they are chosen", "MoE-Infinity, no cache", fetch(experts.chosen) | on_gpu)
    yield Placement(chosen, Sequential())
    whole = _streaming("weights streamed", "DeepSpeed ZeRO-Inference", fetch(weights) | on_gpu)
    yield Placement(whole, Sequential(prefetch=True), some, partial=True, streams=True)
    cache = _streaming("weights and KV streamed", "FlexGen", fetch(weights, kv) | on_gpu)
    yield Placement(cache, FlexGenS4(), some, partial=True, streams=True, of_batches=True)
    systems: tuple[tuple[str, Schedule], ...] = (("MoE-Lightning", CGOPipe()), ("MoE-Lens", VSLPipe()))
    for known_as, schedule in systems:
        on_host = _streaming("weights streamed, attention on the CPU", known_as, fetch(weights) | attending)
        yield Placement(on_host, schedule, some, partial=True, streams=True, of_batches=True)
    yield Placement(_always("attention on the CPU", "FastDecode", attending), FastDecode(), of_batches=True)


def _always(what: str, known_as: str, pipeline: Pipeline) -> Callable[[int], Layout]:
    """The only layout of a placement."""
    return lambda step: Layout(what, known_as, pipeline)


def _streaming(what: str, known_as: str, pipeline: Pipeline) -> Callable[[int], Layout]:
    """The layouts of a placement that keeps a share of its streamed weights on the GPU."""

    def kept(step: int) -> Layout:
        share = step / _KEPT
        return Layout(f"{what}, {share:.0%} kept" if share else what, known_as, pipeline, share)

    return kept
