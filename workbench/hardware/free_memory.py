"""Memory that this process can still take: what the computer has free, or what its control groups leave it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


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
    everywhere = [FreeMemory(memory.available, memory.total, "this computer"), *_groups(root)]
    return min(everywhere, key=lambda one: one.bytes)


def _groups(root: Path) -> Iterator[FreeMemory]:
    """Memory that each group with a limit leaves, from this process's own to the outermost."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _LEGACY if controllers else _UNIFIED
        top = base / "memory" if controllers else base
        own = top / path.lstrip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
            limit = _text(folder / names.limit).strip()
            usage = _text(folder / names.usage).strip()
            if limit.isdecimal() and usage.isdecimal():  # the limit is "max" where there is none
                dropped = _stat(folder / "memory.stat").get(names.files, 0)
                yield FreeMemory(max(0, int(limit) - int(usage) + dropped), int(limit), f"control group {folder}")


def _stat(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(file).splitlines())
    return {name: int(number) for name, number in pairs}


def _text(file: Path) -> str:
    """A file's text; empty where the system has none or hides it."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
