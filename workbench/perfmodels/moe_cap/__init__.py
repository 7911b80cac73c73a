"""MoE-CAP: sparsity-aware utilisation, its diagram of demand against hardware, and the cost of processors."""

from workbench.perfmodels.moe_cap.utilisation import (
    Placement,
    Resources,
    activated_bytes,
    activated_size,
    kv_read_bytes,
    kv_tokens,
    overestimate,
    practical,
    required_bandwidth,
    required_ops,
    smbu,
    smfu,
    step_demand,
    token_flops,
    utilisation,
)

__all__ = [
    "Placement",
    "Resources",
    "activated_bytes",
    "activated_size",
    "kv_read_bytes",
    "kv_tokens",
    "overestimate",
    "practical",
    "required_bandwidth",
    "required_ops",
    "smbu",
    "smfu",
    "step_demand",
    "token_flops",
    "utilisation",
]
