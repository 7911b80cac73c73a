"""Rates of this computer in seconds: reading, copying, multiply-adds and products, beside recorded ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch

from workbench.bench.doctor.finding import Finding
from workbench.core.quiet import Noise
from workbench.engine.calibration.measure import gemm_rates, seconds_of
from workbench.kernels import multiply_add, read_memory

NORMAL = 0.7
"""Least share of a recorded rate that is normal: DRAM of one virtual computer has a slow and a fast state, in which
reading differs by a quarter (two cores of Zen 4)."""
_READ = 1 << 29
"""Bytes that are read and copied: more than any last-level cache holds."""
_LATER = "ask again later: the host may be shared, its clock low or its memory slow at present"
UNITS = {"reading": "GB/s", "copying": "GB/s", "multiply-adds": "GFLOP/s", "products": "GFLOP/s"}


def speeds(cores: int) -> dict[str, float]:
    """Rates by name [B/s or FLOP/s], each the median of seven repetitions."""
    memory = np.ones(_READ, np.int8)
    found = dict[str, float]()
    for threads in sorted({1, cores}):
        on = f"on {threads} core{'s' if threads > 1 else ''}"
        found[f"reading {on}"] = _READ / seconds_of(partial(read_memory, memory, threads=threads))
        flop = multiply_add(threads=threads)
        found[f"multiply-adds {on}"] = flop / seconds_of(partial(multiply_add, threads=threads))
    half = memory[: _READ // 2]
    target = np.empty_like(half)
    found["copying on 1 core"] = half.nbytes / seconds_of(lambda: np.copyto(target, half))
    before = torch.get_num_threads()
    try:
        products = gemm_rates(cores)
    finally:
        torch.set_num_threads(before)
    return found | {f"products in {name} on {cores} cores": rate for name, rate in products}


def judged(rates: Mapping[str, float], others: Mapping[str, float], noise: Noise, family: str) -> Iterator[Finding]:
    """Each rate, beside what was recorded on a computer of the same family."""
    for name, rate in rates.items():
        unit = next(unit for kind, unit in UNITS.items() if name.startswith(kind))
        what, _, how = name.partition(" ")
        told = f"{rate / 1e9:.3g} {unit} {how}"
        if name not in others:
            yield Finding(what, told)
            continue
        share = rate / others[name]
        mend = _LATER if share < NORMAL and noise.quiet else ""
        yield Finding(what, f"{told}, {share:.2f} of that recorded on {family}", mend)
    busy = "" if noise.quiet else "close other programs and ask again: these rates are too low"
    yield Finding("other programs", f"took {noise.others:.0%} of the cores meanwhile", busy)
