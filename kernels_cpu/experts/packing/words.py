"""Rows of numbers and codes, reordered to the words of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codegen.compiled import compiled
from ..weights import ROWS

PACKED_FROM = (np.float32, np.uint16, np.float16)
"""Types of matrices that can be packed; uint16 holds bfloat16 bits."""


def fp32(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Rows of any accepted dtype in fp32; uint16 holds bfloat16 bits."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32)


@compiled()
def reorder_int4(codes: Any, words: Any) -> bool:
    """Copy rows of codes (R, C) to words (blocks, C / 8, 64); False if one is above 15.

    Four columns in a row lie in the low halves of a word's bytes, the next four in the high halves.
    """
    rows, columns = codes.shape
    every = np.uint8(0)
    for row in range(len(words) * ROWS):
        block = row // ROWS
        lane = row % ROWS
        for step in range(columns // 8):
            word = np.uint32(0)
            for place in range(8 if row < rows else 0):
                code = codes[row, 8 * step + place]
                every |= code
                word |= np.uint32(np.uint32(code) << np.uint32(8 * (place % 4) + 4 * (place // 4)))
            words[block, step, lane] = word
    return bool(every < 16)


@compiled()
def reorder_mxfp4(codes: Any, exponents: Any, words: Any, scales: Any) -> bool:
    """Copy rows of codes (R, G, 16) and exponents (R, G) to words (blocks, 4 G, 64) and scales (blocks, G, 64).

    Four columns in a row lie in the low halves of a word's bytes, the next four in the high halves. False if a scale is
    NaN.
    """
    rows, groups, _ = codes.shape
    for row in range(len(words) * ROWS):
        block = row // ROWS
        lane = row % ROWS
        for g in range(groups):
            power = exponents[row, g] if row < rows else np.uint8(0)
            if power == 255:
                return False
            scales[block, g, lane] = power - 1 if power > 0 else 0  # the numbers of a word's codes are doubled
            for step in range(4):
                word = np.uint32(0)
                for pair in range(4 if row < rows else 0):
                    both = np.uint32(codes[row, g, 4 * step + pair])
                    shift = np.uint32(16 * (pair % 2) + 4 * (pair // 2))
                    word |= np.uint32((both & np.uint32(15)) << shift)
                    word |= np.uint32((both >> np.uint32(4)) << np.uint32(shift + np.uint32(8)))
                words[block, 4 * g + step, lane] = word
    return True
