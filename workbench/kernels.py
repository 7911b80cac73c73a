"""The public door to the kernels: usable in anybody's code, without Jupyter.

The CPU kernels are there at once; what also runs on the GPU is imported, and torch with it, when it is first asked
for, and triton when it is first launched.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kernels_cpu import (
    CodePath,
    Format,
    NodeExperts,
    PackedExperts,
    append_kv,
    append_kv_work,
    expert_mlp,
    expert_mlp_reference,
    expert_mlp_work,
    features,
    flash_decode,
    flash_decode_work,
    mla_decode,
    multiply_add,
    numa_nodes,
    pack_by_node,
    pack_experts,
    read_blocks,
    read_memory,
    side_by_side,
)

if TYPE_CHECKING:
    from kernels_triton import (
        Quantised,
        Routing,
        dequantise,
        fused_moe,
        fused_moe_work,
        grouped_gemm,
        grouped_gemm_work,
        quantise,
        rms_norm,
        rms_norm_work,
        route,
        route_work,
        tuning,
        with_shared,
    )

__all__ = [
    "CodePath",
    "Format",
    "NodeExperts",
    "PackedExperts",
    "Quantised",
    "Routing",
    "append_kv",
    "append_kv_work",
    "dequantise",
    "expert_mlp",
    "expert_mlp_reference",
    "expert_mlp_work",
    "features",
    "flash_decode",
    "flash_decode_work",
    "fused_moe",
    "fused_moe_work",
    "grouped_gemm",
    "grouped_gemm_work",
    "mla_decode",
    "multiply_add",
    "numa_nodes",
    "pack_by_node",
    "pack_experts",
    "quantise",
    "read_blocks",
    "read_memory",
    "rms_norm",
    "rms_norm_work",
    "route",
    "route_work",
    "side_by_side",
    "tuning",
    "with_shared",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("kernels_triton"), name)
    raise AttributeError(f"module 'workbench.kernels' has no attribute {name!r}")
