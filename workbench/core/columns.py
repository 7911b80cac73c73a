"""Columns of numbers that results hold: tuples for whoever reads them, arrays until somebody does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from workbench.core.errors import ResultError

Arrays = Mapping[str, npt.NDArray[Any]]
Given = Mapping[str, Sequence[float] | npt.NDArray[Any]]
_COMPUTE = "_compute"
"""Attribute with the function that gives the arrays, until they are there."""
_ARRAYS = "_arrays"
"""Attribute with the arrays by the names of their columns."""


class Columns:
    """Base of a frozen dataclass whose fields are tuples of numbers.

    A result may have tens of thousands of entries that nobody reads. So a column that was given as an array becomes a
    tuple when it is first asked for. Fields need a `default_factory`: a default would be an attribute of the class,
    which hides that a column is not there yet.

    Raises
    ------
    ResultError
        If the columns are refused, see `check_columns`.
    """

    def __post_init__(self) -> None:
        self._check(vars(self))

    @classmethod
    def _check(cls, columns: Given) -> None:
        """Refuse columns that no result has."""
        raise NotImplementedError

    @classmethod
    def of_arrays(cls, **arrays: npt.NDArray[Any]) -> Self:
        """Columns of these arrays, one for each field, which are not copied."""
        cls._check(arrays)
        return cls.later(lambda: arrays)

    @classmethod
    def later(cls, compute: Callable[[], Arrays]) -> Self:
        """Columns of arrays, one for each field, that are computed when the first is asked for."""
        found = object.__new__(cls)
        object.__setattr__(found, _COMPUTE, compute)
        return found

    def __getattr__(self, name: str) -> Any:
        """A column that is made now; called for attributes that are not there."""
        if name.startswith("_") or name not in self._names():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return vars(self).setdefault(name, tuple(self._made()[name].tolist()))

    @classmethod
    def _names(cls) -> list[str]:
        return [column.name for column in fields(cls)]  # type: ignore[arg-type]

    def _made(self) -> Arrays:
        """The arrays, of columns that were given as such."""
        own = vars(self)
        compute = own.get(_COMPUTE)
        if _ARRAYS not in own and compute is not None:
            arrays = compute()
            self._check(arrays)
            own[_ARRAYS] = arrays
        own.pop(_COMPUTE, None)
        found: Arrays = own.get(_ARRAYS, {})
        return found

    def array(self, name: str) -> npt.NDArray[Any]:
        """A column as an array, not to be written."""
        found = self._made().get(name)
        return np.asarray(getattr(self, name)) if found is None else found

    def columns(self) -> dict[str, tuple[Any, ...]]:
        """Every column by its name."""
        return {name: getattr(self, name) for name in self._names()}

    def __reduce__(self) -> tuple[Any, ...]:
        """The columns, so that a copy or a pickle computes nothing later."""
        return type(self), tuple(self.columns().values())


def check_columns(what: str, columns: Given) -> None:
    """Refuse columns of different lengths, empty ones aside, and entries that are negative or not finite.

    Raises
    ------
    ResultError
        If there are such columns or entries.
    """
    lengths = {name: len(column) for name, column in columns.items() if len(column)}
    if len(set(lengths.values())) > 1:
        raise ResultError(f"the {what} of a result have columns of unlike lengths, {lengths}; give one entry for each.")
    for name in lengths:
        try:
            entries = np.asarray(columns[name], dtype=np.float64)
        except (OverflowError, TypeError, ValueError):
            entries = np.array([math.inf])
        if not ((entries >= 0) & (entries < math.inf)).all():
            raise ResultError(
                f"the {what} of a result have an entry in {name} that is no finite number from 0 on; mend it."
            )
