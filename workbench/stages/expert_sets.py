"""Sets of a layer's routed experts: by index, by name, or the most used of a count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from workbench.core.errors import PipelineError
from workbench.core.units import is_whole


@dataclass(frozen=True)
class ExpertSet:
    """Some of the routed experts of every layer, as in ``experts[hot]``; ``experts[~hot]`` are the others.

    Parameters
    ----------
    name : str
        Name in pipelines and charts.
    table : sequence of sequences of int
        The experts of each layer of the model; one row alone serves all layers.
    bounds : (int, int or None), optional
        The first expert and the one behind the last, in place of a table; see `of_slice`.
    rest : bool
        True for all experts that are not in the table, or not within the bounds.

    Raises
    ------
    PipelineError
        If the name is no short text without brackets, or a row has an expert twice or no whole numbers.
    """

    name: str
    table: Sequence[Sequence[int]] = ()
    bounds: tuple[int, int | None] | None = None
    rest: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 40 or set(self.name) & set("[]~\n"):
            raise PipelineError(
                f"the name of an ExpertSet is a text of 1 to 40 letters, no brackets; {self.name!r} is not."
            )
        rows = tuple(tuple(row) for row in self.table)
        for layer, row in enumerate(rows):
            if not all(is_whole(each) and each >= 0 for each in row) or len(set(row)) < len(row):
                raise PipelineError(
                    f"row {layer} of ExpertSet({self.name!r}) must have different whole numbers from 0 on, not {row!r}."
                )
        if not rows and self.bounds is None:
            raise PipelineError(f"ExpertSet({self.name!r}) has no rows; give the experts of each layer.")
        object.__setattr__(self, "table", tuple(tuple(sorted(map(int, row))) for row in rows))

    @classmethod
    def of_slice(cls, which: slice) -> ExpertSet:
        """The experts of a slice of whole numbers, which negative ones count from the last expert.

        Raises
        ------
        PipelineError
            If it has a step, or edges that are no whole numbers.
        """
        edges = (which.start, which.stop)
        if which.step not in (None, 1) or not all(edge is None or is_whole(edge) for edge in edges):
            raise PipelineError(f"experts are a range of whole numbers with step 1, not {which!r}; write [a:b].")
        first, stop = ("" if edge is None else int(edge) for edge in edges)
        return cls(f"{first}:{stop}", (), (int(first or 0), None if stop == "" else int(stop)))

    def __invert__(self) -> ExpertSet:
        return replace(self, rest=not self.rest)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.table, self.bounds, self.rest))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{'~' if self.rest else ''}{self.name}"

    def of(self, layer: int, experts: int) -> tuple[int, ...]:
        """The experts of one layer that has so many in all, in ascending order.

        Raises
        ------
        PipelineError
            If the set has no row for the layer, or an expert that the layer has not.
        """
        if self.bounds is not None:
            chosen: Sequence[int] = range(experts)[slice(*self.bounds)]
        elif len(self.table) == 1:
            chosen = self.table[0]
        elif layer < len(self.table):
            chosen = self.table[layer]
        else:
            raise PipelineError(
                f"ExpertSet({self.name!r}) has rows for {len(self.table)} layers, and layer {layer} is asked for; give "
                "a row for each layer of the model, or one for all."
            )
        if len(chosen) and chosen[-1] >= experts:
            raise PipelineError(
                f"ExpertSet({self.name!r}) has expert {chosen[-1]} in layer {layer}, and the model has {experts}; give "
                f"experts from 0 to {experts - 1}."
            )
        if not self.rest:
            return tuple(chosen)
        there = set(chosen)
        return tuple(expert for expert in range(experts) if expert not in there)


def most_used(counts: npt.ArrayLike, number: int) -> ExpertSet:
    """The `number` most used experts of each layer.

    Parameters
    ----------
    counts : (layers, experts)
        Number of times that each expert was chosen, as `Result.expert_counts` of a run. Of equally used experts the
        lower index comes first.
    number : int

    Raises
    ------
    PipelineError
        If counts are no such table, or there are fewer experts.
    """
    found = np.asarray(counts)
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.number):
        raise PipelineError(f"counts are a table (layers, experts) of numbers, not of shape {found.shape}.")
    if not is_whole(number) or not 1 <= number <= found.shape[1]:
        raise PipelineError(f"number={number!r} of the most used experts must be from 1 to {found.shape[1]}.")
    order = np.argsort(-found, axis=1, kind="stable")
    return ExpertSet(f"{number} most used", order[:, :number].tolist())
