"""KTransformers: a decode layer's timeline with deferred experts, its machines, and the choice of the CPU kernel."""

from workbench.perfmodels.ktransformers.deferral import (
    Kernel,
    KernelChoice,
    LayerTimes,
    choose_kernel,
    decode_timeline,
    deferral_outputs,
    end_to_end_speedup,
    experts_to_defer,
    layer_time,
    layer_utilisation,
    switch_prompt,
    time_reduction,
)

__all__ = [
    "Kernel",
    "KernelChoice",
    "LayerTimes",
    "choose_kernel",
    "decode_timeline",
    "deferral_outputs",
    "end_to_end_speedup",
    "experts_to_defer",
    "layer_time",
    "layer_utilisation",
    "switch_prompt",
    "time_reduction",
]
