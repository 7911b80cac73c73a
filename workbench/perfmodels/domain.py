"""Checks of the arguments of formulas, numbers or arrays: an error names the argument outside the formula's domain.

Every check of a number returns its argument as an array of floats; `mend` says what to give instead, as in "give s".
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.core.errors import ScenarioError
from workbench.models import ModelConfig
from workbench.workload import Workload

Array: TypeAlias = NDArray[np.float64]
Number: TypeAlias = float | Array
"""Argument or result of a formula: a number, or an array of any shape that broadcasts with the others."""


def within(what: str, value: ArrayLike, low: float, high: float, *, mend: str) -> Array:
    """Check that each number is from `low` to `high`, both included; infinity is allowed if it is the upper end.

    Raises
    ------
    ValueError
        If one lies outside or is no number.
    """
    array = np.asarray(value, dtype=np.float64)
    span = f"at least {low:g}" if np.isinf(high) else f"between {low:g} and {high:g}"
    return _require((array >= low) & (array <= high), array, what, span, mend)


def at_least(what: str, value: ArrayLike, low: float, mend: str) -> Array:
    """Check that each number is finite and not below `low`.

    Raises
    ------
    ValueError
        If one is below, infinite or no number.
    """
    array = np.asarray(value, dtype=np.float64)
    return _require((array >= low) & np.isfinite(array), array, what, f"at least {low:g} and finite", mend)


def positive(what: str, value: ArrayLike, mend: str) -> Array:
    """Check that each number is above zero and finite.

    Raises
    ------
    ValueError
        If one is zero, negative, infinite or no number.
    """
    array = np.asarray(value, dtype=np.float64)
    return _require((array > 0) & np.isfinite(array), array, what, "above 0 and finite", mend)


def whole(what: str, value: ArrayLike, mend: str, *, low: int = 1) -> Array:
    """Check that each number is a whole number from `low` on.

    Raises
    ------
    ValueError
        If one is not.
    """
    array = np.asarray(value, dtype=np.float64)
    fine = np.isfinite(array) & (array >= low) & (array == np.floor(array))
    return _require(fine, array, what, f"a whole number from {low}", mend)


def plain(array: Array) -> Number:
    """A result in the form of the arguments: a number if all of them were numbers."""
    result: Number = array[()]
    return result


def _require(fine: NDArray[np.bool_], array: Array, what: str, expected: str, mend: str) -> Array:
    if not fine.all():
        raise ValueError(f"{what} must be {expected}, not {array[~fine].flat[0]:g}; {mend}.")
    return array


def caches_alike(formula: str, model: ModelConfig) -> None:
    """Refuse a model whose layers do not all keep the same KV cache, or whose router has choices that are no experts.

    Raises
    ------
    ScenarioError
        If some layers keep states, an index or wider caches than others, or some choices compute nothing.
    """
    if model.idle_experts:
        raise ScenarioError(
            f"{formula} counts an expert for each choice, and {model.idle_experts} choices of {model.name} compute "
            "nothing; use bound or simulate."
        )
    widths = {(one.kv_width, one.pair_macs) for one, _ in model.unlike}
    if model.keeps_states or len(widths) > 1:
        raise ScenarioError(
            f"{formula} counts the same KV cache in every layer, and {model.name} has {model.layers_in_words}; use "
            "bound or simulate."
        )


def all_at_once(model: str, workload: Workload) -> None:
    """Refuse requests that arrive one after the other: the model has no term for arrivals.

    Raises
    ------
    ScenarioError
        If there are arrivals.
    """
    if len(workload.arrival):
        raise ScenarioError(f"{model} is about a pile of requests, not about arrivals; use simulate.")
