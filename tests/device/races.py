"""Finds two accesses to the same memory that nothing puts in order, in one run, whatever order that run took.

A clock says how much of each stream's work is known to be over. A stream's own work moves its clock; waiting for an
event joins the event's clock in. Of two accesses to the same bytes, one of them a write, the later must know the
earlier to be over. `torch.cuda._sanitizer` does this on a card, by the addresses at which tensors begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

HOST = "host"
Clock = dict[str, int]
"""Pieces of work by stream that are known to be over."""


class RaceError(RuntimeError):
    """Nothing puts two accesses to the same memory in order."""


@dataclass(frozen=True)
class Access:
    """Bytes [begin, end) of a memory, touched by the `place`-th piece of work of a stream."""

    stream: str
    place: int
    label: str
    writes: bool
    begin: int
    end: int

    def covers(self, other: Access) -> bool:
        """True if it touches all bytes that the other one touches."""
        return self.begin <= other.begin and other.end <= self.end

    def conflicts(self, other: Access) -> bool:
        """True if both touch a byte, and one of them writes."""
        return (self.writes or other.writes) and self.begin < other.end and other.begin < self.end


class Memory:
    """One allocation, and the accesses to it that later ones must be in order with."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: list[Access] = []

    def touch(self, access: Access, known: Clock) -> None:
        """Note an access that is issued when `known` is over.

        Raises
        ------
        RaceError
            If an earlier access to the same bytes is in no order with it.
        """
        for earlier in self._seen:
            ordered = earlier.stream == access.stream or earlier.place <= known.get(earlier.stream, 0)
            if earlier.conflicts(access) and not ordered:
                raise RaceError(
                    f"{access.label} on {access.stream} {_verb(access)} {self.name}, which {earlier.label} on "
                    f"{earlier.stream} {_verb(earlier)}, and nothing puts them in order."
                )
        self._seen = [earlier for earlier in self._seen if not _replaces(access, earlier)]
        self._seen.append(access)


class Touch(NamedTuple):
    """What a piece of work does to bytes [begin, end) of a memory."""

    memory: Memory
    writes: bool
    begin: int
    end: int


def joined(clock: Clock, other: Clock) -> Clock:
    """What is over according to either."""
    return {name: max(clock.get(name, 0), other.get(name, 0)) for name in clock.keys() | other.keys()}


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"


def _replaces(access: Access, earlier: Access) -> bool:
    """True if whatever is in order with `access` is in order with `earlier` too."""
    again = access.stream == earlier.stream and not earlier.writes
    return (access.writes or again) and access.covers(earlier)
