"""The only import of triton, which decides whether kernels are compiled or interpreted.

Triton decides once per process, at its first import: with TRITON_INTERPRET=1 in the environment it interprets.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # from triton 3.10 on, multiply-adds are not fused without it

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .bf16_mend import mend

INTERPRETED = not isinstance(tl.sum, triton.JITFunction)
if bool(triton.knobs.runtime.interpret) != INTERPRETED:
    raise ImportError(
        f"triton came in {'with' if INTERPRETED else 'without'} TRITON_INTERPRET=1, which has changed since; "
        "start Python anew with TRITON_INTERPRET=1 or without it."
    )
if INTERPRETED:
    from triton.runtime import interpreter

    mend(interpreter, tl)

__all__ = ["INTERPRETED", "TensorDescriptor", "tl", "triton"]
