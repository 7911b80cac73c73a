"""What the gpu lane computes: router, sorting by expert, grouped GEMM and their sum, and RMSNorm.

Each op is a wrapper that validates, a Triton kernel, declared work and a float64 reference; those of the experts also
have an implementation in torch, which is what CPU tensors get. Triton is imported when a kernel is first launched. It
reads TRITON_INTERPRET then: set it before, or pass backend="triton-interpret", to run the kernels on the CPU for tests.
"""

from . import tuning
from .backend import Backend
from .experts import Activation, Quantised, dequantise, quantise
from .fused_moe import fused_moe, fused_moe_reference, fused_moe_work
from .grouped_gemm import grouped_gemm, grouped_gemm_reference, grouped_gemm_work
from .pairs import Blocks, sort_pairs
from .rms_norm import rms_norm, rms_norm_reference, rms_norm_work
from .router import Routing, route, route_reference, route_work, with_shared

__all__ = [
    "Activation",
    "Backend",
    "Blocks",
    "Quantised",
    "Routing",
    "dequantise",
    "fused_moe",
    "fused_moe_reference",
    "fused_moe_work",
    "grouped_gemm",
    "grouped_gemm_reference",
    "grouped_gemm_work",
    "quantise",
    "rms_norm",
    "rms_norm_reference",
    "rms_norm_work",
    "route",
    "route_reference",
    "route_work",
    "sort_pairs",
    "tuning",
    "with_shared",
]
