"""CPU decode attention against what these cores can read and multiply, and against what a user would take instead."""

from __future__ import annotations

import mmap
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
import torch

from workbench.bench import record
from workbench.bench.quiet import OTHERS
from workbench.hardware import Machine, usable_cores
from workbench.kernels import CodePath, features, flash_decode, flash_decode_work, multiply_add, read_memory

HEADS, DIM, BLOCK = 8, 128, 64
"""KV heads, head dim and tokens per block of every case."""
SLOW_BELOW = 0.8
"""Share of the fastest reading seen, below which a round belongs to the memory's slow state."""
_PEAK = 0.85
"""Share of the multiply-add peak that the bar asks for where arithmetic binds."""
_STEPS = 200_000


@dataclass(frozen=True)
class Case:
    """One batch: a name, the lengths of its sequences and the query heads that share a KV head."""

    name: str
    lengths: npt.NDArray[np.int64]
    group: int


def cases() -> list[Case]:
    """64 sequences of 128 to 2048 tokens, and one of 65,536."""
    uneven = np.random.default_rng(7).integers(128, 2049, 64)
    long = np.array([65536])
    batches = [Case(f"64 sequences, G={group}", uneven, group) for group in (1, 4, 8)]
    return [*batches, *(Case(f"1 x 64k, G={group}", long, group) for group in (1, 4))]


class Batch:
    """Operands of a case, over one pool that all cases share, and the contenders that compute it."""

    def __init__(self, case: Case, pool: npt.NDArray[np.uint16]) -> None:
        self.case, rng = case, np.random.default_rng(0)
        count = -(-case.lengths // BLOCK)
        self._kv = pool[: int(count.sum()) * HEADS * 2 * BLOCK * DIM].reshape(-1, HEADS, 2, BLOCK, DIM)
        places = rng.permutation(len(self._kv)).astype(np.int32)
        self._table = np.zeros((len(count), int(count.max())), np.int32)
        for row, (end, size) in enumerate(zip(np.cumsum(count), count, strict=True)):
            self._table[row, :size] = places[end - size : end]
        self._q = rng.standard_normal((len(count), HEADS * case.group, DIM), dtype=np.float32)
        self.out = np.empty_like(self._q)
        context, heads = int(case.lengths.sum()), HEADS * case.group
        self.flops, _ = flash_decode_work(heads, HEADS, DIM, context, len(count), 2)
        self.kv_bytes = 2 * HEADS * DIM * 2 * context
        self._rows = [self._gathered(row) for row in range(len(count))]

    def _gathered(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (K, S, D) of one sequence, side by side in memory, which eager torch needs; untimed."""
        length = int(self.case.lengths[row])
        blocks = self._kv[self._table[row, : -(-length // BLOCK)]]
        both = torch.from_numpy(blocks.transpose(2, 1, 0, 3, 4).reshape(2, HEADS, -1, DIM)).view(torch.bfloat16)
        return both[0, :, :length].contiguous(), both[1, :, :length].contiguous()

    def ours(self, threads: int) -> None:
        """`flash_decode` on this computer's path."""
        flash_decode(self._q, self._kv, self._table, self.case.lengths, out=self.out, threads=threads)

    def portable(self, threads: int) -> None:
        """The same with plain loops, which the compiler may vectorise."""
        path = CodePath.PORTABLE
        flash_decode(self._q, self._kv, self._table, self.case.lengths, out=self.out, threads=threads, path=path)

    def eager(self, threads: int) -> None:
        """torch in bf16: scores, softmax and weighted sum, sequence by sequence."""
        torch.set_num_threads(threads)
        for row, (k, v) in enumerate(self._rows):
            q = torch.from_numpy(self._q[row]).bfloat16().view(HEADS, self.case.group, DIM)
            values = torch.softmax(q @ k.transpose(1, 2) * DIM**-0.5, dim=-1) @ v
            self.out[row] = values.float().reshape(-1, DIM).numpy()


@dataclass(frozen=True)
class Round:
    """What one round saw: reading [B/s] and multiply-adds [FLOP/s], and seconds by (case, contender)."""

    threads: int
    read: float
    multiply: float
    seconds: dict[tuple[str, str], float]

    def roof(self, batch: Batch) -> float:
        """Seconds that no attention beats: all KV read in order, or 85 % of the multiply-add peak."""
        return max(batch.kv_bytes / self.read, batch.flops / (_PEAK * self.multiply))


def bench_cpu(*, seconds: float = 60, json: Path | None = None, say: Callable[[str], None] = record.say) -> list[Round]:
    """Time every contender on every case in shuffled rounds, on one thread and on all; print shares of the roof.

    Parameters
    ----------
    seconds : float
        How long to go on [s]; at least three rounds are made.
    json : Path, optional
        Where to write the record.
    say : callable
        Takes each line of the report.
    """
    pool = _random_pool(max(int(-(-case.lengths // BLOCK).sum()) for case in cases()) * HEADS * 2 * BLOCK * DIM)
    batches = [Batch(case, pool) for case in cases()]
    counts = sorted({1, usable_cores()})
    say(f"{features()}; torch {torch.__version__}; K {HEADS}, D {DIM}, bf16 cache in blocks of {BLOCK} tokens")
    for threads in counts:
        _round(batches, pool, threads, np.random.default_rng(0))
    rounds, dropped, rng, begin = list[Round](), 0, np.random.default_rng(1), time.perf_counter()
    while time.perf_counter() - begin < seconds or len(rounds) < 3 * len(counts):
        for threads in counts:
            seen, others = _watched(partial(_round, batches, pool, threads, rng))
            dropped += others > OTHERS
            rounds += [] if others > OTHERS else [seen]
    ratios = _report(batches, rounds, say)
    say(f"rounds kept {len(rounds)}, dropped as disturbed {dropped}")
    if json is not None:
        record.write(json, Machine.local(), ratios, [{"rounds": len(rounds), "dropped": dropped}])
    return rounds


def _random_pool(elements: int) -> npt.NDArray[np.uint16]:
    """bf16 in huge pages where the system grants them."""
    memory = mmap.mmap(-1, 2 * elements + (1 << 21))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    pool = np.frombuffer(memory, np.uint16)
    pool = pool[-pool.ctypes.data % (1 << 21) // 2 :][:elements]
    some = (np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for start in range(0, elements, some.size):
        pool[start : start + some.size] = some[: elements - start]
    return pool


def _watched(work: Callable[[], Round]) -> tuple[Round, float]:
    """The round, and the share of the cores that other programs took meanwhile."""
    own, cores = psutil.Process(), psutil.cpu_count() or 1
    before, mine, begin = psutil.cpu_times(), sum(own.cpu_times()[:2]), time.perf_counter()
    seen = work()
    after, passed = psutil.cpu_times(), time.perf_counter() - begin
    busy = after.user - before.user + after.system - before.system
    return seen, max(0.0, busy - (sum(own.cpu_times()[:2]) - mine)) / (passed * cores)


def _round(batches: Sequence[Batch], pool: npt.NDArray[Any], threads: int, rng: np.random.Generator) -> Round:
    """Everything once, in random order."""
    work: dict[tuple[str, str], Callable[[], Any]] = {
        ("", "read"): partial(read_memory, pool, threads=threads),
        ("", "multiply"): partial(multiply_add, _STEPS, threads=threads),
    }
    for batch in batches:
        for contender in (batch.ours, batch.portable, batch.eager):
            work[batch.case.name, contender.__name__] = partial(contender, threads)
    took, done = {}, {}
    for number in rng.permutation(len(work)).tolist():
        key = list(work)[number]
        begin = time.perf_counter()
        done[key] = work[key]()
        took[key] = time.perf_counter() - begin
    read, multiply = ("", "read"), ("", "multiply")
    return Round(threads, pool.nbytes / took.pop(read), done[multiply] / took.pop(multiply), took)


def _report(
    batches: Sequence[Batch], rounds: Sequence[Round], say: Callable[[str], None]
) -> dict[str, dict[str, float]]:
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
        say(f"  {'':22}    GB/s  of the roof  times portable  times torch eager bf16")
        for batch in batches:
            name = batch.case.name
            rate = median(batch.kv_bytes / r.seconds[name, "ours"] for r in own)
            shares = [r.roof(batch) / r.seconds[name, "ours"] for r in own]
            others = {
                other: [r.seconds[name, other] / r.seconds[name, "ours"] for r in own]
                for other in ("portable", "eager")
            }
            say(
                f"  {name:22}  {rate / 1e9:6.1f}  {median(shares):11.2f}  {median(others['portable']):14.1f}  "
                f"{median(others['eager']):22.1f}"
            )
            ratios[f"{name}, {threads} threads: of the roof"] = record.ratio(shares)
            for other, values in others.items():
                ratios[f"{name}, {threads} threads: times as fast as {other}"] = record.ratio(values)
    return ratios
