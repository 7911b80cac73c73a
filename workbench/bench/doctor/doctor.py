"""The report on a computer."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from workbench.bench import record
from workbench.bench.doctor.finding import Finding
from workbench.bench.doctor.settings import settings
from workbench.bench.doctor.speeds import judged, speeds
from workbench.core.catalogue import cache_path
from workbench.core.quiet import listening
from workbench.core.units import format_bytes
from workbench.hardware import usable_cores
from workbench.hardware.free_memory import free_memory
from workbench.hardware.system import System
from workbench.kernels import FewLinear, cpu_family, features, has_products, numa_nodes

RECORD = "speeds"


def doctor(*, json: Path | None = None, say: Callable[[str], None] = record.say) -> int:
    """Print what this computer has, which code is taken, what is set wrongly, and whether its speed is normal.

    Parameters
    ----------
    json : Path, optional
        File for the measured rates, such as `data/measured/cpu/znver4/speeds.json`.
    say : callable
        Receives each line.

    Returns
    -------
    int
        Number of things to mend.
    """
    system = System()
    cores = usable_cores()
    family = cpu_family()
    wrong = 0
    for title, findings in (
        ("This computer", computer(system, cores, family)),
        ("Code that is taken", paths()),
        ("Settings", settings(system, cores, cache_path("x").parent)),
        ("Speed, measured now", _measured(cores, family, json)),
    ):
        say(title)
        for finding in findings:
            say(str(finding))
            wrong += bool(finding.mend)
        say("")
    say(f"{wrong} thing{'s' if wrong > 1 else ''} to mend" if wrong else "Nothing to mend.")
    return wrong


def computer(system: System, cores: int, family: str) -> Iterator[Finding]:
    """The parts of this computer."""
    name = system.cpu_name or platform.processor() or platform.machine()
    cache = f", last-level cache {system.last_cache}" if system.last_cache else ""
    yield Finding("CPU", f"{name} ({family}), {cores} cores for this process{cache}")
    nodes = numa_nodes()
    together = "one NUMA node" if len(nodes) == 1 else f"{len(nodes)} NUMA nodes, which share the host's experts"
    yield Finding("memory nodes", together)
    memory = free_memory()
    short = memory.bytes < memory.whole / 4
    mend = "close other programs, or raise the group's limit: a model has to fit what is free" if short else ""
    yield Finding("memory", f"{format_bytes(memory.bytes)} free of {format_bytes(memory.whole)}, {memory.of}", mend)
    yield _gpu(system)


def _gpu(system: System) -> Finding:
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        compute = f"compute capability {about.major}.{about.minor}"
        told = f"{about.name}, {format_bytes(about.total_memory)}, {compute}, CUDA {torch.version.cuda}"
        return Finding("GPU", told)
    driver = system.text("proc/driver/nvidia/version").partition("\n")[0]
    if driver:
        build = torch.version.cuda or "none: a build for CPUs"
        return Finding("GPU", f"{driver}; torch's CUDA is {build}", "delete .venv and start ./lab again")
    return Finding("GPU", "none: the gpu lane computes on half of the cores")


def paths() -> Iterator[Finding]:
    """The code that computes each operation on this computer."""
    found = features()
    yield Finding("vectors", str(found))
    slow = "install Numba for an x86-64 CPU with AVX2, where attention and experts are several times as fast"
    attention = "compiled for these registers" if found.lanes else "left to the compiler"
    yield Finding("attention, experts", attention, "" if found.lanes or platform.machine() != "x86_64" else slow)
    most = FewLinear(np.zeros((4, 64), np.uint16)).most if found.lanes else 0
    yield Finding("few rows", f"weights in bf16 read in place, up to {most} rows" if most else "torch")
    widened = "in fp32, from blocks of widened weights: this CPU has no products of bf16"
    yield Finding("bf16 products", "oneDNN" if has_products(torch.bfloat16) else widened)
    yield Finding("gpu lane", "Triton on the GPU, with device='cuda'" if torch.cuda.is_available() else "the host")


def _measured(cores: int, family: str, json: Path | None) -> Iterator[Finding]:
    with listening() as noise:
        rates = speeds(cores)
    if json is not None:
        rows = {name: record.ratio([rate]) for name, rate in rates.items()}
        record.write(json, f"{family}, {cores} cores", rows, [], family=family)
    yield from judged(rates, record.medians(record.of_family(RECORD, family)), noise, family)
