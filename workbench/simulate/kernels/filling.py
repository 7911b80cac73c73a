"""A process that compiles the kernels and keeps their machine code on disk, beside one that simulates in Python.

    python -m workbench.simulate.kernels.filling

It has a low priority. One process at a time compiles: another waits for it, finds the machine code and ends.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

_NICE = 10
"""Priority: beside others that compute, a tenth of a core; the lowest, 19, gets next to nothing for minutes."""


def begin() -> int:
    """Start the process, which says nothing and outlives this one; return its number.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    sources = str(Path(__file__).parents[3])
    path = os.pathsep.join([sources, *filter(None, sys.path)])
    nothing = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-m", __name__],
        {**os.environ, "PYTHONPATH": path},
        file_actions=nothing,
        setpgroup=0,  # signals of a terminal or a notebook to the group of this process do not end it
    )


def fill() -> None:
    """Compile the kernels unless their machine code is on disk."""
    from workbench.simulate.kernels.entries import COMPILED

    folder = COMPILED.folder
    if folder is None:
        return
    with open(folder / "simulator.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not COMPILED.kept:
            COMPILED.load()


if __name__ == "__main__":
    os.nice(_NICE)
    fill()
