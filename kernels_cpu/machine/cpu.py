"""What this computer calls its CPU."""

from __future__ import annotations

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


def cpu_name() -> str:
    """The CPU's name by Linux; empty elsewhere."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"^model name\s*:\s*(.+)$", told, re.MULTILINE)
    return match.group(1) if match else ""
