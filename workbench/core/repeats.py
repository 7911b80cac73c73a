"""Patterns that repeat in a sequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

_FEWEST = 4


class Run(NamedTuple):
    """A pattern of `length` items that follows itself, from the item `first` up to the item `stop`."""

    first: int
    length: int
    stop: int


def find_runs(items: Sequence[Hashable]) -> list[Run]:
    """Patterns that occur at least four times in a row, in order, none within another."""
    following = [len(items)] * len(items)
    seen = dict[Hashable, int]()
    for place in range(len(items) - 1, -1, -1):
        following[place] = seen.get(items[place], len(items))
        seen[items[place]] = place
    runs = list[Run]()
    place = 0
    while place < len(items):
        length = following[place] - place
        stop = following[place]
        while stop < len(items) and items[stop] == items[stop - length]:
            stop += 1
        if stop - place >= _FEWEST * length:
            runs.append(Run(place, length, stop))
            place = stop
        else:
            place += 1
    return runs
