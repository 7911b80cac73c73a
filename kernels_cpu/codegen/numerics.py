"""Powers of two and aligned scratch memory, for the kernels of attention, experts and gates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import vector_ir
from .compiled import compiled

ROUND = np.float32(vector_ir.ROUND)
FLOOR = np.float32(-126)
C0 = np.float32(vector_ir.EXP2[0])
C1 = np.float32(vector_ir.EXP2[1])
C2 = np.float32(vector_ir.EXP2[2])
C3 = np.float32(vector_ir.EXP2[3])
C4 = np.float32(vector_ir.EXP2[4])
C5 = np.float32(vector_ir.EXP2[5])
C6 = np.float32(vector_ir.EXP2[6])
LOG2_E = math.log2(math.e)


@compiled("contract")
def exp2(x: Any) -> Any:
    """2**x for x <= 0, relative error below 3e-7; without call or branch, so that loops over it vectorise."""
    bounded = FLOOR if x < FLOOR else x  # this order keeps NaN
    shifted = np.float32(bounded + ROUND)
    f = bounded - np.float32(shifted - ROUND)
    poly = ((((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1) * f) + C0
    exponent = np.uint32(np.uint32(shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23))
    return np.float32(poly * exponent.view(np.float32))


@compiled()
def aligned_floats(size: int) -> Any:
    """An fp32 array that begins on a cache line, not cleared."""
    space = np.empty(size + 16, np.float32)
    begin = (64 - space.ctypes.data % 64) % 64 // 4
    return space[begin : begin + size]
