"""Repetition in a sequence: patterns that occur several times in a row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

_FEWEST = 4


class Repeat(NamedTuple):
    """A pattern of `length` items that follows itself, from the item `first` up to the item `stop`."""

    first: int
    length: int
    stop: int


def find_repeats(items: Sequence[Hashable]) -> list[Repeat]:
    """Find the patterns that occur at least four times in a row, in order, none within another."""
    following = [len(items)] * len(items)
    seen = dict[Hashable, int]()
    for place in range(len(items) - 1, -1, -1):
        following[place] = seen.get(items[place], len(items))
        seen[items[place]] = place
    repeats = list[Repeat]()
    place = 0
    while place < len(items):
        length = following[place] - place
        stop = following[place]
        while stop < len(items) and items[stop] == items[stop - length]:
            stop += 1
        if stop - place >= _FEWEST * length:
            repeats.append(Repeat(place, length, stop))
            place = stop
        else:
            place += 1
    return repeats
