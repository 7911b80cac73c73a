"""Settings of the system and of this shell that make runs slow or refuse them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from workbench.bench.doctor.finding import Finding
from workbench.core.units import format_bytes
from workbench.hardware.system import System

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
DISK = 2e9
"""Disk that compiled kernels, records and rounded experts take: assumed [B]."""
_OFF = {"NUMBA_DISABLE_JIT": "compiles nothing", "TRITON_INTERPRET": "interprets GPU kernels on the CPU"}


def settings(system: System, cores: int, cache: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The settings, with the mend of those that are wrong.

    Parameters
    ----------
    system : System
    cores : int
        Cores that this process may use.
    cache : Path
        Folder of the user's cache.
    environment : mapping
        Variables of the shell.
    """
    yield _threads(cores, environment)
    yield from _switches(environment)
    yield _limit(system, cores)
    yield _huge_pages(system)
    yield _governor(system)
    yield _cache(cache)


def _threads(cores: int, environment: Mapping[str, str]) -> Finding:
    given = {name: environment[name] for name in THREADS if name in environment}
    wrong = {name: value for name, value in given.items() if value != str(cores)}
    told = ", ".join(f"{name}={value}" for name, value in given.items()) or "no limits in the environment"
    mend = f"unset {' '.join(wrong)}: the workbench sets threads itself and has {cores} cores" if wrong else ""
    return Finding("threads", told, mend)


def _switches(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, what in _OFF.items():
        if environment.get(name, "0") not in ("", "0"):
            yield Finding("switch", f"{name}={environment[name]} {what}", f"unset {name} to measure or to work")


def _limit(system: System, cores: int) -> Finding:
    limit = system.core_limit
    if limit is None:
        return Finding("container", "no limit on the cores' time")
    told = f"{limit:g} of {cores} cores on average"
    mend = f"give the container {cores} cores, or start it with --cpuset-cpus: threads that wait for time stop all"
    return Finding("container", told, mend if limit < cores else "")


def _huge_pages(system: System) -> Finding:
    found = system.huge_pages
    mend = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled as root: KV and weights are read faster so"
    return Finding("huge pages", found or "not told by this system", mend if found == "never" else "")


def _governor(system: System) -> Finding:
    found = system.governor
    mend = "cpupower frequency-set -g performance as root: clocks follow the load late, and times scatter"
    return Finding("clock", found or "not told by this system", mend if found == "powersave" else "")


def _cache(cache: Path) -> Finding:
    there = next(each for each in (cache, *cache.parents) if each.exists())
    free = shutil.disk_usage(there).free
    told = f"{cache}, {format_bytes(free)} free"
    if not _writable(there):
        return Finding("cache", told, f"let {there} be written, or set XDG_CACHE_HOME: each start compiles anew")
    mend = f"free {format_bytes(DISK - free)} more of that disk" if free < DISK else ""
    return Finding("cache", told, mend)


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
