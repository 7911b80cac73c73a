"""Arguments of formulas: numbers or arrays of them, and an error that names the one outside the formula's domain."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Numbers: TypeAlias = float | Array
"""A number or an array of them; arguments of one formula are broadcast against each other."""


def at_least(least: float, name: str, value: Numbers, unit: str) -> Array:
    """The argument as an array, each of its numbers finite and not below `least`.

    Raises
    ------
    ValueError
        If one is, or is no number.
    """
    array = np.asarray(value, dtype=np.float64)
    return _require((array >= least) & np.isfinite(array), array, name, f"at least {least:g}", unit)


def positive(name: str, value: Numbers, unit: str) -> Array:
    """The argument as an array, each of its numbers finite and above zero.

    Raises
    ------
    ValueError
        If one is not.
    """
    array = np.asarray(value, dtype=np.float64)
    return _require((array > 0) & np.isfinite(array), array, name, "positive and finite", unit)


def at_least_or_unlimited(least: float, name: str, value: Numbers, unit: str) -> Array:
    """As `at_least`, but infinity is allowed: the formula has a limit there.

    Raises
    ------
    ValueError
        If a number is below `least`, or is none.
    """
    array = np.asarray(value, dtype=np.float64)
    return _require(array >= least, array, name, f"at least {least:g}", unit)


def whole(name: str, value: Numbers, unit: str) -> Array:
    """The argument as an array of whole numbers from 1.

    Raises
    ------
    ValueError
        If one is not.
    """
    array = np.asarray(value, dtype=np.float64)
    fine = np.isfinite(array) & (array >= 1) & (array == np.floor(array))
    return _require(fine, array, name, "a whole number from 1", unit)


def plain(array: Array) -> Numbers:
    """A result as the caller gave the arguments: a number where all of them were numbers."""
    result: Numbers = array[()]
    return result


def _require(fine: npt.NDArray[np.bool_], array: Array, name: str, expected: str, unit: str) -> Array:
    if not fine.all():
        worst = float(array[~fine].flat[0])
        raise ValueError(f"{name}={worst:g} is outside the formula's domain; give {name} {expected} [{unit}].")
    return array
