"""The five pipelines of the contract, and the mixed batch they are printed for."""

import numpy as np

from workbench.pipeline import Pipeline, Stack, cpu, fetch, gpu, load, offload
from workbench.scheduler.batch import Batch
from workbench.schedules import (
    CGOPipe,
    FastDecode,
    Fiddler,
    FlexGenS3,
    FlexGenS4,
    KTransformers,
    LayerStreaming,
    Overlap,
    Schedule,
    Sequential,
    VSLPipe,
)
from workbench.schedules.registry import every_schedule
from workbench.stages import (
    ExpertSet,
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

VSL = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)

LIGHTNING = Pipeline(VSL.chain, fetch(experts.weights).fetches)

STREAMED = fetch(weights) | gpu(qkv, attention, out_proj, moe)

PIPELINES: dict[str, Pipeline] = {
    "vslpipe": VSL,
    "flexgen_s4": fetch(weights, kv) | gpu(qkv, attention, out_proj, moe),
    "ktransformers": gpu(qkv, attention, out_proj, route)
    >> (gpu(shared_experts) | offload >> cpu(experts, defer=3) >> load)
    >> gpu(combine),
    "all_gpu": gpu(qkv, attention, out_proj, moe),
    "all_cpu": cpu(qkv, attention, out_proj, moe),
}


def split(hot: ExpertSet | slice) -> Pipeline:
    """These experts on the GPU and, beside them, the others on the CPU."""
    rest = ~(ExpertSet.of_slice(hot) if isinstance(hot, slice) else hot)
    return (
        gpu(qkv, attention, out_proj, route)
        >> (gpu(experts[hot]) | offload >> cpu(experts[rest]) >> load)
        >> gpu(combine)
    )


APART = fetch(experts.prefill.weights) | gpu(qkv, attention, out_proj, route) >> (
    gpu(experts.prefill) | offload >> cpu(experts.decode) >> load
) >> gpu(combine)
"""Prefill rows on the GPU, to which their experts are streamed, and decode rows on the CPU."""

_CHOSEN: dict[str, tuple[Pipeline, Schedule]] = {
    **{f"{name}.sequential": (pipeline, Sequential(micro_batches=2)) for name, pipeline in PIPELINES.items()},
    "vslpipe.prefetch": (VSL, Sequential(prefetch=True)),
    "vslpipe.vslpipe": (VSL, VSLPipe()),
    "lightning.cgopipe": (LIGHTNING, CGOPipe(micro_batches=2)),
    "lightning.fastdecode": (LIGHTNING, FastDecode(micro_batches=2)),
    "lightning.flexgen_s3": (LIGHTNING, FlexGenS3(micro_batches=2)),
    "flexgen_s4.flexgen_s4": (PIPELINES["flexgen_s4"], FlexGenS4(micro_batches=2)),
    "streamed.layer_streaming": (STREAMED, LayerStreaming()),
    "ktransformers.ktransformers": (PIPELINES["ktransformers"], KTransformers()),
    "ktransformers.fiddler": (PIPELINES["ktransformers"], Fiddler()),
    "experts_on_cpu.ktransformers": (KTransformers.example, KTransformers()),
    "experts_on_cpu.fiddler": (Fiddler.example, Fiddler()),
    "both_on_cpu.overlap": (Overlap.example, Overlap()),
    "vslpipe.overlap": (VSL, Overlap()),
    "flexgen_s4.overlap": (PIPELINES["flexgen_s4"], Overlap()),
}


def added(*known: Schedule) -> dict[str, tuple[Pipeline, Schedule]]:
    """Schedules of the package that are not among these kinds, each with its example, by the name of its module."""
    kinds = {type(schedule) for schedule in known}
    return {
        f"example.{kind.__module__.rpartition('.')[2]}": (kind.example, kind())
        for kind in every_schedule()
        if kind not in kinds and kind.example is not None
    }


ADDED = added(*(schedule for _, schedule in _CHOSEN.values()))
"""Schedules that stand nowhere above."""
GOLDEN = _CHOSEN | ADDED


_ON_CPU = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
_LATE = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=1) >> load >> gpu(combine)
STACKS: dict[str, tuple[Stack, Schedule]] = {
    "n_cpu_moe.sequential": (_ON_CPU[:2] + PIPELINES["all_gpu"][2:], Sequential()),
    "host_between.prefetch": (
        STREAMED[:1] + PIPELINES["all_cpu"][1:2] + PIPELINES["all_gpu"][2:3] + STREAMED[3:],
        Sequential(prefetch=True),
    ),
    "resident_first.vslpipe": (Pipeline(VSL.chain)[:2] + VSL[2:], VSLPipe()),
    "streamed_between.vslpipe": (Pipeline(VSL.chain)[:1] + VSL[1:3] + Pipeline(VSL.chain)[3:], VSLPipe(weight_slots=3)),
    "every_other.cgopipe": (
        LIGHTNING[:1] + Pipeline(VSL.chain)[1:2] + LIGHTNING[2:3] + Pipeline(VSL.chain)[3:],
        CGOPipe(micro_batches=2),
    ),
    "deferring_twice.ktransformers": (_LATE[:2] + _LATE[2:], KTransformers()),
    "half_of_the_experts.overlap": (split(slice(None, 2))[:], Overlap()),
    "streamed_rest.overlap": (
        (fetch(experts[2:].weights) | gpu(qkv, attention, out_proj, route, experts[:2], experts[2:], combine))[:],
        Overlap(1, 3),
    ),
    "used_experts.prefetch": (
        (fetch(weights, experts.chosen) | gpu(qkv, attention, out_proj, moe))[:],
        Sequential(prefetch=True),
    ),
    "used_experts.overlap": (
        (fetch(experts.prefill.chosen) | Pipeline(APART.chain))[:2] + PIPELINES["all_gpu"][2:],
        Overlap(),
    ),
    "rows_apart.prefetch": (APART[:2] + PIPELINES["all_gpu"][2:3] + APART[3:], Sequential(prefetch=True)),
    "rows_apart.overlap": (APART[:], Overlap()),
}
"""Stacks of four layers, each with a schedule that takes it."""


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


MIXED = Batch(prefills=ids(4, 5), prefill_len=ids(5, 4), decodes=ids(0, 1, 2, 3), context=ids(7, 6, 3, 2), layers=2)
