"""The names of this computer's CPU, and the folder of all that belongs to it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import llvmlite.binding as llvm

from ..declarations import public


@public
def cpu_family() -> str:
    """LLVM's name of this CPU's microarchitecture, such as ``znver4`` or ``sapphirerapids``.

    Examples
    --------
    >>> cpu_family().isascii()
    True
    """
    return str(llvm.get_host_cpu_name())


def user_folder() -> Path:
    """The folder of what was compiled and tuned on this computer: under XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-workbench" / "kernels_cpu"


def cpu_name() -> str:
    """The CPU's name by Linux; empty elsewhere."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"^model name\s*:\s*(.+)$", told, re.MULTILINE)
    return match.group(1) if match else ""
