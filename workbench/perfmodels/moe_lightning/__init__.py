"""MoE-Lightning: a reader that predicts with its hierarchical roofline, and the public names of model and search."""

from workbench.perfmodels.moe_lightning.model import (
    Estimate,
    Job,
    LayerTime,
    Mode,
    Policy,
    estimate,
    layer_time,
    prefill_time,
)
from workbench.perfmodels.moe_lightning.policy_memory import cpu_peak, fits, gpu_peaks
from workbench.perfmodels.moe_lightning.policy_search import (
    Found,
    PolicyMap,
    least_weights,
    policy_map,
    search,
    tensor_parallel,
    with_shares,
)
from workbench.perfmodels.moe_lightning.predict import predict
from workbench.perfmodels.moe_lightning.wiring import as_scenario

__all__ = [
    "Estimate",
    "Found",
    "Job",
    "LayerTime",
    "Mode",
    "Policy",
    "PolicyMap",
    "as_scenario",
    "cpu_peak",
    "estimate",
    "fits",
    "gpu_peaks",
    "layer_time",
    "least_weights",
    "policy_map",
    "predict",
    "prefill_time",
    "search",
    "tensor_parallel",
    "with_shares",
]
