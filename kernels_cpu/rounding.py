"""fp32 rounded to bfloat16, by its bits."""

from typing import Any

import numpy as np

from .compiled import compiled


@compiled()
def bfloat16(bits: Any) -> Any:
    """Bits of the bfloat16 nearest to fp32 bits, ties to even; NaN becomes a quiet NaN."""
    high = np.uint32(bits >> np.uint32(16))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + np.uint32(high & np.uint32(1))) >> np.uint32(16))
    is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint32(high | np.uint32(0x40)) if is_nan else rounded


@compiled()
def bfloat16_pairs(bits: Any, out: Any) -> None:
    """Two neighbours in a word of `out`, the first in its lower half."""
    for s in range(len(out)):
        out[s] = bfloat16(bits[2 * s]) | np.uint32(bfloat16(bits[2 * s + 1]) << np.uint32(16))
