"""Memory that this process can still take: what the computer has free, or what its control groups leave it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from workbench.hardware.system import System


class FreeMemory(NamedTuple):
    """Memory that can be taken.

    Attributes
    ----------
    bytes : float
        What is free; of a control group, without the files that it has read, whose memory the system takes back [B].
    whole : float
        Memory of the computer, or the limit of the group [B].
    of : str
        "this computer", or the folder of the group that has the least left.
    """

    bytes: float
    whole: float
    of: str


class _Names(NamedTuple):
    """Names of a version of control groups: limit, usage, and in `memory.stat` the files that can be dropped."""

    limit: str
    usage: str
    files: str


_UNIFIED = _Names("memory.max", "memory.current", "inactive_file")
_LEGACY = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """The least that the computer, this process's control group and the groups around it leave.

    Parameters
    ----------
    root : Path
        Folder with ``proc`` and ``sys``.

    Examples
    --------
    >>> 0 < free_memory().bytes <= free_memory().whole
    True
    """
    import psutil  # only runs need it: the rest of the workbench does without it

    memory = psutil.virtual_memory()
    everywhere = [FreeMemory(memory.available, memory.total, "this computer"), *_groups(System(root))]
    return min(everywhere, key=lambda one: one.bytes)


def _groups(system: System) -> Iterator[FreeMemory]:
    """Memory that each group with a limit leaves."""
    for folder, legacy in system.groups("memory"):
        names = _LEGACY if legacy else _UNIFIED
        limit = system.text(folder / names.limit)
        usage = system.text(folder / names.usage)
        if limit.isdecimal() and usage.isdecimal():  # the limit is "max" where there is none
            dropped = _stat(system.text(folder / "memory.stat")).get(names.files, 0)
            yield FreeMemory(max(0, int(limit) - int(usage) + dropped), int(limit), f"control group {folder}")


def _stat(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {name: int(number) for name, number in pairs}
