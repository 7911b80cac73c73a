"""Decode attention over the number of threads, short and live: what a notebook measures on the reader's own machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import cast

import numpy as np

from workbench.bench.cpu.attention import DIM, HEADS, Attention, Case, pool_elements, uneven
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
    """Shuffled rounds of 128 to 2048 tokens per sequence, on 1, 2, 4 and so on threads up to all cores.

    Parameters
    ----------
    sequences : int
    group : int
        Query heads per KV head, of which there are 8 of 128 dims.
    seconds : float
        How long to go on [s]; every number of threads has three rounds at least.
    peers : names
        Who computes the same beside our kernel, of `bench.cpu.work.PEERS`.
    """
    case = Case(f"{sequences} sequences, G={group}", uneven(sequences), group)
    pool = random_pool(pool_elements([case]))
    work, rng, counts = Attention(case, pool, peers=peers), np.random.default_rng(1), thread_counts(usable_cores())
    for threads in counts:
        play(work, pool, threads, rng)
    rounds, begin = list[Round](), time.perf_counter()
    while time.perf_counter() - begin < seconds or len(rounds) < 3 * len(counts):
        rounds += [play(work, pool, threads, rng) for threads in counts]
    return rounds


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on, and all cores."""
    return sorted({*(2**power for power in range(cores.bit_length()) if 2**power <= cores), cores})


def attended(rounds: Sequence[Round]) -> dict[str, dict[int, float]]:
    """KV entries attended per second, by who computed and number of threads: medians of the rounds of one work [1/s].

    An entry is the K and V of one token in one layer. "reading alone" is a ceiling: the same blocks, nothing computed.
    """
    work, names = cast(Attention, rounds[0].work), {"paged": "reading alone"}
    found = {}
    for name in (*work.contenders, *work.ceilings):
        seconds = {n: median(one.seconds[name] for one in rounds if one.threads == n) for n in _threads(rounds)}
        found[names.get(name, name)] = {n: work.context / taken for n, taken in seconds.items()}
    return found


def _threads(rounds: Sequence[Round]) -> list[int]:
    return sorted({one.threads for one in rounds})
