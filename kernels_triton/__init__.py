"""Triton kernels for the gpu lane. Each op is a wrapper that validates, a kernel, declared work and a reference.

Triton is imported when a kernel is first launched. It reads TRITON_INTERPRET then: set it before, to run these kernels
on the CPU for tests.
"""

from .backend import Backend
from .pairs import Blocks, sort_pairs
from .rms_norm import rms_norm, rms_norm_reference, rms_norm_work
from .router import Routing, route, route_reference, route_work

__all__ = [
    "Backend",
    "Blocks",
    "Routing",
    "rms_norm",
    "rms_norm_reference",
    "rms_norm_work",
    "route",
    "route_reference",
    "route_work",
    "sort_pairs",
]
