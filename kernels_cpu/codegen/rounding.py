"""Conversions between fp32 and bfloat16, which is held as 16 bits of an unsigned integer."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from .compiled import compiled


@compiled()
def bfloat16(bits: Any) -> Any:
    """Round fp32 bits to the bits of the nearest bfloat16, ties to even; NaN becomes a quiet NaN."""
    high = np.uint32(bits >> np.uint32(16))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + np.uint32(high & np.uint32(1))) >> np.uint32(16))
    is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint32(high | np.uint32(0x40)) if is_nan else rounded


@compiled()
def bfloat16_pairs(bits: Any, out: Any) -> None:
    """Round fp32 bits (2 n,) to bfloat16 and store pairs of neighbours as words (n,), the first in the lower half."""
    for s in range(len(out)):
        out[s] = bfloat16(bits[2 * s]) | np.uint32(bfloat16(bits[2 * s + 1]) << np.uint32(16))


@compiled()
def bfloat16_terms(numbers: Any, out: Any) -> None:
    """Split fp32 (n,) into three bfloat16 terms (3, n) uint16 whose sum it is.

    The first term is the nearest finite bfloat16, the second the nearest to the remainder, the third to the rest.
    """
    for x in range(len(numbers)):
        bits = np.float32(numbers[x]).view(np.uint32)
        first = bfloat16(bits)
        if first & np.uint32(0x7FFF) == np.uint32(0x7F80):
            first = np.uint32(bits >> np.uint32(16))
        rest = np.float32(numbers[x] - np.uint32(first << np.uint32(16)).view(np.float32))
        second = bfloat16(rest.view(np.uint32))
        rest = np.float32(rest - np.uint32(second << np.uint32(16)).view(np.float32))
        out[0, x] = first
        out[1, x] = second
        out[2, x] = bfloat16(rest.view(np.uint32))


def widened(element: Any) -> Any:
    """An element as fp32: fp32 itself, or uint16 that holds bfloat16 bits; for compiled code only."""
    raise NotImplementedError


@overload(widened, strict=False)
def _widened(element: Any) -> Callable[[Any], Any]:
    if element == types.uint16:
        return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    return lambda element: element


def narrowed(number: Any, like: Any) -> Any:
    """An fp32 as an element of the type of `like`, rounded to nearest: the inverse of `widened`."""
    raise NotImplementedError


@overload(narrowed, strict=False)
def _narrowed(number: Any, like: Any) -> Callable[[Any, Any], Any]:
    if like == types.uint16:
        return lambda number, like: np.uint16(bfloat16(np.float32(number).view(np.uint32)))
    return lambda number, like: np.float32(number)
