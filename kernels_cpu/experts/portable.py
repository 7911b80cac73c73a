"""The portable inner loops of the experts; rows of a block are neighbours in memory, so LLVM vectorises over them."""

from typing import Any

import numpy as np

from ..codegen.compiled import compiled
from .weights import MXFP4_BYTES, ROWS, ZERO_BITS, Format

_INT8 = int(Format.INT8)
_MXFP4 = int(Format.MXFP4)
_UINT4 = int(Format.UINT4)
_BYTES = np.array(MXFP4_BYTES, np.int32)


@compiled("contract")
def fp32_rows(words: Any, x: Any, out: Any) -> None:
    """out[r] = row[r] . x for FP32 words (steps, 64)."""
    out[:] = 0
    for s in range(len(words)):
        for r in range(ROWS):
            out[r] += np.uint32(words[s, r]).view(np.float32) * x[s]


@compiled("contract")
def bf16_rows(words: Any, x: Any, out: Any) -> None:
    """out[r] = row[r] . x for BF16 words (steps, 64)."""
    out[:] = 0
    for s in range(len(words)):
        for r in range(ROWS):
            low = np.uint32(words[s, r] << np.uint32(16)).view(np.float32)
            high = np.uint32(words[s, r] & np.uint32(0xFFFF0000)).view(np.float32)
            out[r] += low * x[2 * s] + high * x[2 * s + 1]


@compiled("contract")
def scaled_rows(
    words: Any, format: int, scales: Any, x: Any, x_scales: Any, offsets: Any, sums: Any, out: Any
) -> None:  # fmt: skip
    """Compute `scaled_block` for one token, INT8, INT4, UINT4 or MXFP4; `sums` (64,) int32 is scratch."""
    groups = len(scales)
    steps = len(words) // groups
    per_word = 4 if format == _INT8 else 8
    bits = np.uint32(32 // per_word)
    mask = np.uint32((1 << (32 // per_word)) - 1)
    out[:] = 0
    for g in range(groups):
        for r in range(ROWS):
            sums[r] = offsets[g] * (np.int32(scales[g, r]) & np.int32(ZERO_BITS)) if format == _UINT4 else offsets[g]
        for s in range(g * steps, (g + 1) * steps):
            for j in range(per_word):
                # words of 4 bits hold four numbers in the low halves of their bytes, then four in the high halves
                shift = np.uint32(8 * (j % 4) + (4 if j >= 4 else 0)) if per_word == 8 else np.uint32(bits * j)
                number = np.int32(x[s * per_word + j])
                for r in range(ROWS):
                    code = np.int32(np.uint32(words[s, r] >> shift) & mask)
                    sums[r] += (_BYTES[code] if format == _MXFP4 else code) * number
        for r in range(ROWS):
            if format == _MXFP4:
                scale = _power(scales[g, r])
            elif format == _UINT4:
                scale = _without_zero(scales[g, r])
            else:
                scale = np.float32(scales[g, r])
            out[r] += np.float32(sums[r]) * (scale * x_scales[g])


@compiled()
def _power(exponent: int) -> Any:
    """The scale that an exponent of MXFP4 means."""
    return np.uint32(np.uint32(exponent) << np.uint32(23)).view(np.float32)


@compiled()
def _without_zero(word: int) -> Any:
    """The scale of a word of UINT4 that also holds a zero point."""
    return np.uint32(np.uint32(word) & np.uint32(0xFFFFFFFF & ~ZERO_BITS)).view(np.float32)
