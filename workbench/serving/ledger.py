"""The ledger of both memories: the contents and the free bytes of each, and changes that make everything fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from workbench.core.display import html_table
from workbench.core.units import BYTES, alike, format_bytes, percents
from workbench.scenario import Scenario
from workbench.schedules.base import Schedule


class Entry(NamedTuple):
    """One line of a ledger: a thing, the bytes that it takes of a memory [B], and a note on how these are made up."""

    name: str
    bytes: float
    note: str = ""


@dataclass(frozen=True)
class Account:
    """The contents of one memory.

    Attributes
    ----------
    name : str
        "GPU" or "host".
    entries : tuple of Entry
    capacity : float
        Size of the memory [B].
    """

    name: str
    entries: tuple[Entry, ...]
    capacity: float

    @property
    def total(self) -> float:
        """Bytes needed [B]."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def left(self) -> float:
        """Bytes left free; negative if the contents do not fit [B]."""
        return self.capacity - self.total

    def __getitem__(self, name: str) -> float:
        """Bytes of the entry with this name."""
        return next(entry.bytes for entry in self.entries if entry.name == name)


@dataclass(frozen=True)
class Change:
    """A change of one setting to the nearest value with which everything fits.

    Attributes
    ----------
    code, words : str
        The setting with its value, as it is written, such as ``kv_capacity='61.9GB'``, and as it is said, such as
        ``a KV capacity of 61.9GB``; more memory is no setting, and both are words.
    now : str
        The present value in words, and what changes besides.
    factor : float
        Factor by which the setting grows or shrinks, at least 1.
    scenario, schedule
        Scenario and schedule with the change made.
    """

    code: str
    words: str
    now: str
    factor: float
    scenario: Scenario = field(repr=False)
    schedule: Schedule = field(repr=False)

    def __str__(self) -> str:
        return f"{self.code} (now {self.now})"


@dataclass(frozen=True)
class Ledger:
    """The needs of a scenario and schedule in the machine's memories, line by line; true if everything fits.

    Attributes
    ----------
    machine : str
    gpu, host : Account
    search : callable () -> iterable of Change
        Finds `changes`, which takes longer than the ledger; by default there are none.
    """

    machine: str
    gpu: Account
    host: Account
    search: Callable[[], Iterable[Change]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Single changes, each of which makes everything fit, the nearest first; none if it fits as it is."""
        return () if self else tuple(sorted(self.search(), key=lambda change: change.factor))

    def __bool__(self) -> bool:
        return self.gpu.left >= 0 and self.host.left >= 0

    @property
    def verdict(self) -> str:
        """The verdict in words: that it fits, or the cause and the mend."""
        if self:
            rest = " and ".join(f"{format_bytes(a.left)} of {a.name} memory" for a in (self.gpu, self.host))
            return f"It fits {self.machine!r}: {rest} are left."
        reasons = self.shortage
        if not self.changes:
            return (
                f"{reasons} No single change of capacity, batch, weights' format or place, or one memory makes it fit."
            )
        if len(self.changes) == 1:
            return f"{reasons} It fits with {self.changes[0]}."
        *others, last = self.changes[:3]
        return f"{reasons} It fits with any one of these: {', '.join(map(str, others))}, or {last}."

    @property
    def shortage(self) -> str:
        """The memories that are too small, in words, without a search for what would fit; empty if everything does."""
        return " ".join(self._reason(account) for account in (self.gpu, self.host) if account.left < 0)

    def _reason(self, account: Account) -> str:
        """The sentence on a memory that is too small; its figures add up, in the unit of the memory's size."""
        entries = sorted((entry for entry in account.entries if entry.bytes), key=lambda entry: -entry.bytes)
        units = tuple(unit for unit in BYTES if account.capacity >= unit[1])
        total, (capacity, missing) = alike([account.capacity, -account.left], units or BYTES)
        shares = zip(percents([entry.bytes for entry in entries]), entries, strict=True)
        items = ", ".join(f"{share} % {entry.name}" for share, entry in shares if share)
        return (
            f"{self.machine!r} has {capacity} of {account.name} memory and this needs {total}, {missing} too much "
            f"({items})."
        )

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, device, size and note of every entry, and the sums of each device."""
        lines = []
        for account in (self.gpu, self.host):
            sums = [Entry("total", account.total), Entry("capacity", account.capacity), Entry("left", account.left)]
            lines += [(account.name, e.name, format_bytes(e.bytes), e.note) for e in (*account.entries, *sums)]
        return lines

    def __str__(self) -> str:
        rows = self.rows()
        names, columns, sizes, _ = zip(*rows, strict=True)
        widths = [max(map(len, column)) for column in (names, columns, sizes)]
        lines = [
            f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
        ]
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table([*self.rows(), ("", "", "", self.verdict)], ("memory", "what", "size", ""))
