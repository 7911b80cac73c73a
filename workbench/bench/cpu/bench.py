"""Benchmark of the CPU kernels against ceilings of memory and arithmetic, and against other implementations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.bench import record
from workbench.bench.cpu import attention, report
from workbench.bench.cpu.attention import BLOCK, DIM, HEADS, IN_INT8, Attention, Int8Attention
from workbench.bench.cpu.beside import say_overlap
from workbench.bench.cpu.plots import save_rooflines
from workbench.bench.cpu.rounds import Round, play
from workbench.bench.cpu.start import say_start
from workbench.bench.cpu.work import INNER, MODEL, Experts, Layer, Work, random_pool
from workbench.core.errors import WorkbenchError
from workbench.core.quiet import listening
from workbench.hardware import Machine, usable_cores
from workbench.kernels import cpu_family, features

_PATIENCE = 300
"""Seconds to wait for three quiet rounds at least."""


def bench_cpu(
    *,
    seconds: float = 60,
    shapes: bool = False,
    json: Path | None = None,
    picture: Path | None = None,
    say: Callable[[str], None] = record.say,
) -> list[Round]:
    """Time every implementation of every work in shuffled rounds, on one thread and on all; print shares of the roof.

    Parameters
    ----------
    seconds : float
        Duration of the measurement [s]; at least three rounds are made.
    shapes : bool
        Time other head dims and groups, our kernel alone, instead of the usual works.
    json, picture : Path, optional
        Files for the record and the roofline.
    say : callable
        Receives each line of the report.
    """
    pool, works = other_works() if shapes else every_work()
    say(f"{features()}; attention: K {HEADS}, D {DIM}, blocks of {BLOCK}; experts: M {MODEL}, F {INNER}; bf16")
    missing: dict[str, str] = {}
    for work in works:
        missing |= work.missing
    for name, why in missing.items():
        say(f"left out: {name}, because {why}")
    rounds, dropped = _rounds(pool, works, seconds)
    ratios = report.report(rounds, say)
    say(f"rounds kept {len(rounds) // len(works)}, dropped as disturbed {dropped}")
    if not shapes:
        four_heads = works[1]
        ratios |= say_start(say) | say_overlap(four_heads, say)
    for name, share in record.fallen(ratios, record.of_family("kernels", cpu_family())).items():
        say(f"fell: {name} to {share:.2f} of what is recorded for {cpu_family()}")
    if json is not None:
        rows: list[Mapping[str, Any]] = [{"dropped": dropped}, *report.rows(rounds)]
        record.write(json, Machine.local(device="cpu"), ratios, rows, family=cpu_family())
    if picture is not None:
        save_rooflines(report.rooflines(rounds), picture)
    return rounds


def _rounds(pool: npt.NDArray[Any], works: Sequence[Work], seconds: float) -> tuple[list[Round], int]:
    """Undisturbed rounds of all works until the time is over, and the number of rounds that were disturbed."""
    counts = sorted({1, usable_cores()})
    rng = np.random.default_rng(1)
    for threads in counts:
        for work in works:
            play(work, pool, threads, rng)
    rounds = list[Round]()
    dropped = 0
    begin = time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds or len(rounds) < 3 * len(counts) * len(works):
        if passed > max(_PATIENCE, 3 * seconds):
            raise WorkbenchError(f"other programs disturbed {dropped} rounds; close them and try again.")
        for threads in counts:
            with listening() as noise:
                seen = [play(work, pool, threads, rng) for work in works]
            if noise.quiet:
                rounds += seen
            else:
                dropped += 1
    return rounds, dropped


def every_work() -> tuple[npt.NDArray[np.uint16], list[Work]]:
    """The pool of random weights and caches, and all works on it."""
    cases = attention.attention_cases()
    pool = random_pool(max(attention.pool_elements(cases), 6 * MODEL * INNER))
    attentions: list[Work] = [Attention(case, pool) for case in cases]
    attentions += [Int8Attention(case, pool) for case in cases if case.name in IN_INT8]
    layer = Layer(pool)
    return pool, [*attentions, *(Experts(tokens, layer) for tokens in (1, 4))]


def other_works() -> tuple[npt.NDArray[np.uint16], list[Work]]:
    """A pool and attention with other head dims and groups, by our kernel alone."""
    cases = attention.other_shapes()
    pool = random_pool(attention.pool_elements(cases))
    return pool, [Attention(case, pool, peers=()) for case in cases]
