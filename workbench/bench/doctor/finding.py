"""One line of the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes
    ----------
    name, found : str
        The thing and its state, in words.
    mend : str
        What to do about it; empty if it is as it should be.
    """

    name: str
    found: str
    mend: str = ""

    def __str__(self) -> str:
        mark = "!" if self.mend else " "
        line = f"{mark} {self.name:<18} {self.found}"
        return f"{line}\n{'':21}-> {self.mend}" if self.mend else line
