"""The CPU kernels against what these cores can read and multiply, and against what a user would take instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from workbench.bench import record
from workbench.bench.cpu_work import BLOCK, DIM, HEADS, INNER, MODEL, Work, every_work
from workbench.bench.quiet import OTHERS
from workbench.hardware import Machine, usable_cores
from workbench.kernels import features, multiply_add, read_memory

SLOW_BELOW = 0.8
"""Share of the fastest reading seen, below which a round belongs to the memory's slow state."""
_STEPS = 200_000


@dataclass(frozen=True)
class Round:
    """What one round saw: reading [B/s] and multiply-adds [FLOP/s], and seconds by (work, contender)."""

    threads: int
    read: float
    multiply: float
    seconds: dict[tuple[str, str], float]

    def roof(self, work: Work) -> float:
        """Seconds of reading all bytes in order, or of a share of the multiply-add peak, whichever is more."""
        return max(work.bytes / self.read, work.flops / (work.peak * self.multiply))


def bench_cpu(*, seconds: float = 60, json: Path | None = None, say: Callable[[str], None] = record.say) -> list[Round]:
    """Time every contender on every work in shuffled rounds, on one thread and on all; print shares of the roof.

    Parameters
    ----------
    seconds : float
        How long to go on [s]; at least three rounds are made.
    json : Path, optional
        Where to write the record.
    say : callable
        Takes each line of the report.
    """
    pool, works = every_work()
    counts = sorted({1, usable_cores()})
    say(f"{features()}; attention: K {HEADS}, D {DIM}, blocks of {BLOCK}; experts: M {MODEL}, F {INNER}; bf16")
    for threads in counts:
        _round(works, pool, threads, np.random.default_rng(0))
    rounds, dropped, rng, begin = list[Round](), 0, np.random.default_rng(1), time.perf_counter()
    while time.perf_counter() - begin < seconds or len(rounds) < 3 * len(counts):
        for threads in counts:
            seen, others = _watched(partial(_round, works, pool, threads, rng))
            dropped += others > OTHERS
            rounds += [] if others > OTHERS else [seen]
    ratios = _report(works, rounds, say)
    say(f"rounds kept {len(rounds)}, dropped as disturbed {dropped}")
    if json is not None:
        record.write(json, Machine.local(), ratios, [{"rounds": len(rounds), "dropped": dropped}])
    return rounds


def _watched(work: Callable[[], Round]) -> tuple[Round, float]:
    """The round, and the share of the cores that other programs took meanwhile."""
    own, cores = psutil.Process(), psutil.cpu_count() or 1
    before, mine, begin = psutil.cpu_times(), sum(own.cpu_times()[:2]), time.perf_counter()
    seen = work()
    after, passed = psutil.cpu_times(), time.perf_counter() - begin
    busy = after.user - before.user + after.system - before.system
    return seen, max(0.0, busy - (sum(own.cpu_times()[:2]) - mine)) / (passed * cores)


def _round(works: Sequence[Work], pool: npt.NDArray[Any], threads: int, rng: np.random.Generator) -> Round:
    """Everything once, in random order."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("", "read"): partial(read_memory, pool, threads=threads),
        ("", "multiply"): partial(multiply_add, _STEPS, threads=threads),
    }
    for work in works:
        for name, contender in work.contenders.items():
            calls[work.name, name] = partial(contender, threads)
    took, done = {}, {}
    for number in rng.permutation(len(calls)).tolist():
        key = list(calls)[number]
        begin = time.perf_counter()
        done[key] = calls[key]()
        took[key] = time.perf_counter() - begin
    read, multiply = ("", "read"), ("", "multiply")
    return Round(threads, pool.nbytes / took.pop(read), done[multiply] / took.pop(multiply), took)


def _report(works: Sequence[Work], rounds: Sequence[Round], say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    ratios = {}
    fastest = {n: max(r.read for r in rounds if r.threads == n) for n in {r.threads for r in rounds}}
    for threads in sorted(fastest):
        own = [r for r in rounds if r.threads == threads]
        reads = sorted(r.read for r in own)
        slow = sum(r.read < SLOW_BELOW * fastest[threads] for r in own)
        say(
            f"{threads} threads: reads {median(reads) / 1e9:.1f} GB/s ({reads[0] / 1e9:.1f} to {reads[-1] / 1e9:.1f}; "
            f"{slow} of {len(own)} rounds slow), multiplies {median(r.multiply for r in own) / 1e9:.0f} GFLOP/s"
        )
        say(f"  {'':22}    GB/s  of the roof  times portable  times torch in bf16")
        for work in works:
            seen = {name: [r.seconds[work.name, name] for r in own] for name in work.contenders}
            shares = [r.roof(work) / r.seconds[work.name, "ours"] for r in own]
            ratios[f"{work.name}, {threads} threads: of the roof"] = record.ratio(shares)
            times = {}
            for name in ("portable", "torch"):
                times[name] = record.ratio([a / b for a, b in zip(seen[name], seen["ours"], strict=True)])
                ratios[f"{work.name}, {threads} threads: times as fast as {name}"] = times[name]
            say(
                f"  {work.name:22}  {work.bytes / median(seen['ours']) / 1e9:6.1f}  {median(shares):11.2f}  "
                f"{times['portable']['median']:14.1f}  {times['torch']['median']:19.1f}"
            )
    return ratios
