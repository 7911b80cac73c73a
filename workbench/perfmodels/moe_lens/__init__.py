"""MoE-Lens: a reader that predicts with Stage 2, and the public names of all of the paper's equations."""

from workbench.perfmodels.moe_lens.evaluation import Setting, evaluation_settings
from workbench.perfmodels.moe_lens.intensity import IntensityForm, Units, intensity, kv_to_saturate, tokens_to_saturate
from workbench.perfmodels.moe_lens.maps import (
    stage1_utilisation,
    stage2_utilisation,
    utilisation_over_capacity,
    utilisation_over_lengths,
)
from workbench.perfmodels.moe_lens.predict import predict
from workbench.perfmodels.moe_lens.profiler import GpuTime, fit_gpu_time, profile_points
from workbench.perfmodels.moe_lens.stage1 import (
    PmeForm,
    cpu_flops_needed,
    effective_kv_capacity,
    gpu_tokens_per_second,
    host_bandwidth_needed,
    kv_bandwidth_needed,
    kv_tokens_at_knee,
    parallelism_memory_efficiency,
    stage1,
    tokens_per_pass,
    weight_pass_seconds,
)
from workbench.perfmodels.moe_lens.stage2 import (
    Eq12,
    Life,
    Stage2,
    admission_rate,
    blocks_over_life,
    overlapped_sequences,
    separated_sequences,
    separated_tok_s,
    stage2,
    stage2_at_rate,
)
from workbench.perfmodels.moe_lens.streaming import Streaming, streaming

__all__ = [
    "Eq12",
    "GpuTime",
    "IntensityForm",
    "Life",
    "PmeForm",
    "Setting",
    "Stage2",
    "Streaming",
    "Units",
    "admission_rate",
    "blocks_over_life",
    "cpu_flops_needed",
    "effective_kv_capacity",
    "evaluation_settings",
    "fit_gpu_time",
    "gpu_tokens_per_second",
    "host_bandwidth_needed",
    "intensity",
    "kv_bandwidth_needed",
    "kv_to_saturate",
    "kv_tokens_at_knee",
    "overlapped_sequences",
    "parallelism_memory_efficiency",
    "predict",
    "profile_points",
    "separated_sequences",
    "separated_tok_s",
    "stage1",
    "stage1_utilisation",
    "stage2",
    "stage2_at_rate",
    "stage2_utilisation",
    "streaming",
    "tokens_per_pass",
    "tokens_to_saturate",
    "utilisation_over_capacity",
    "utilisation_over_lengths",
    "weight_pass_seconds",
]
