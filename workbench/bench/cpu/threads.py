"""Decode attention over the number of threads: a short measurement for notebooks on the reader's own machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import cast

import numpy as np

from workbench.bench.cpu.attention import DIM, HEADS, Attention, DecodeCase, pool_elements, uneven
from workbench.bench.cpu.rounds import Round, play
from workbench.bench.cpu.work import random_pool
from workbench.hardware import usable_cores

ENTRY = 2 * 2 * HEADS * DIM
"""Bytes of one token's K and V in one layer, in bf16."""


def thread_rounds(
    *,
    sequences: int = 64,
    group: int = 4,
    seconds: float = 20,
    peers: Sequence[str] = ("C", "plain Numba", "naive Numba"),
) -> list[Round]:
    """Measure shuffled rounds with 128 to 2048 tokens per sequence, on 1, 2, 4 and so on threads up to all cores.

    Parameters
    ----------
    sequences : int
    group : int
        Query heads per KV head; there are 8 KV heads of 128 dims.
    seconds : float
        Duration of the measurement [s]; every number of threads has at least three rounds.
    peers : names
        Baselines to time beside our kernel, from `bench.cpu.work.PEERS`.
    """
    case = DecodeCase(f"{sequences} sequences, G={group}", uneven(sequences), group)
    pool = random_pool(pool_elements([case]))
    work = Attention(case, pool, peers=peers)
    rng = np.random.default_rng(1)
    counts = thread_counts(usable_cores())
    for threads in counts:
        play(work, pool, threads, rng)
    rounds = list[Round]()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(rounds) < 3 * len(counts):
        rounds += [play(work, pool, threads, rng) for threads in counts]
    return rounds


def thread_counts(cores: int) -> list[int]:
    """Numbers of threads to measure: 1, 2, 4 and so on, and all cores."""
    powers = {2**power for power in range(cores.bit_length())}
    return sorted({count for count in powers if count <= cores} | {cores})


def attended(rounds: Sequence[Round]) -> dict[str, dict[int, float]]:
    """KV entries attended per second, by implementation and number of threads: medians of one work's rounds [1/s].

    An entry is the K and V of one token in one layer. "reading alone" is a ceiling: it reads the same blocks and
    computes nothing.
    """
    work = cast(Attention, rounds[0].work)
    names = {"paged": "reading alone"}
    found = {}
    for name in (*work.implementations, *work.ceilings):
        found[names.get(name, name)] = {n: work.context / _seconds(rounds, name, n) for n in _threads(rounds)}
    return found


def _seconds(rounds: Sequence[Round], name: str, threads: int) -> float:
    return median(one.seconds[name] for one in rounds if one.threads == threads)


def _threads(rounds: Sequence[Round]) -> list[int]:
    return sorted({one.threads for one in rounds})
