"""Triton kernels for the gpu lane. Each op is a wrapper that validates, a kernel, declared work and a reference.

Triton reads TRITON_INTERPRET when it is first imported: set it before, to run these kernels on the CPU for tests.
"""

from .rms_norm import rms_norm, rms_norm_reference, rms_norm_work

__all__ = ["rms_norm", "rms_norm_reference", "rms_norm_work"]
