"""Where a formula holds: its arguments as arrays, or an error that says what was expected."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Number = float | Array
"""What the formulas take and give: a number, or an array of any shape that broadcasts with the others."""


def within(what: str, value: ArrayLike, low: float, high: float = np.inf, *, mend: str) -> Array:
    """`value` as an array of floats, each from `low` to `high`, both included.

    Raises
    ------
    ValueError
        If one lies outside or is no number.
    """
    array = np.asarray(value, dtype=np.float64)
    wrong = ~((array >= low) & (array <= high))
    if np.any(wrong):
        span = f"at least {low:g}" if np.isinf(high) else f"between {low:g} and {high:g}"
        raise ValueError(f"{what} must be {span}, not {np.atleast_1d(array)[np.atleast_1d(wrong)][0]:g}; {mend}.")
    return array


def positive(what: str, value: ArrayLike, *, mend: str) -> Array:
    """`value` as an array of floats, each above zero and finite.

    Raises
    ------
    ValueError
        If one is zero, negative, infinite or no number.
    """
    array = np.asarray(value, dtype=np.float64)
    wrong = ~((array > 0) & np.isfinite(array))
    if np.any(wrong):
        raise ValueError(f"{what} must be above 0, not {np.atleast_1d(array)[np.atleast_1d(wrong)][0]:g}; {mend}.")
    return array
