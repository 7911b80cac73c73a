"""MoE-Lightning's Algorithm 2: divides requests of unequal length into micro-batches of about equal token counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.errors import WorkloadError


class Partition(NamedTuple):
    """Micro-batches as lists of request numbers, full ones first, and the requests that wait for the next batch."""

    micro_batches: list[list[int]]
    aborted: list[int]


def balance(prompt_len: Sequence[int], *, micro_batches: int, size: int, output_len: int, cache: int) -> Partition:
    """Put each request, the longest first, into the open micro-batch with the fewest prompt tokens.

    Parameters
    ----------
    prompt_len : sequence of int
        Prompt tokens of every request; results are positions in it.
    micro_batches : int
        Micro-batches that are open at first, n_ub.
    size : int
        Number of requests at which a micro-batch is closed, ubs.
    output_len : int
        Tokens that every request generates.
    cache : int
        Tokens of KV cache per micro-batch.

    Raises
    ------
    WorkloadError
        If a number is not positive, or a request would not even fit into an empty micro-batch.

    Notes
    -----
    MoE-Lightning, Algorithm 2, mended in two places: where no micro-batch is open, the request waits and nothing else
    is tried; and micro-batches that are not full are returned at the end, where the printed algorithm loses their
    requests. Requests of equal length keep their order, and of equal sums the first micro-batch is taken.
    """
    _check(prompt_len, micro_batches, size, output_len, cache)
    open_batches: list[list[int]] = [[] for _ in range(micro_batches)]
    sums = [0] * micro_batches
    closed: list[list[int]] = []
    aborted: list[int] = []
    for request in sorted(range(len(prompt_len)), key=lambda number: -prompt_len[number]):
        if not open_batches:
            aborted.append(request)
            continue
        place = sums.index(min(sums))
        batch = open_batches[place]
        if sums[place] + prompt_len[request] + (1 + len(batch)) * output_len > cache:
            aborted.append(request)
            continue
        batch.append(request)
        sums[place] += prompt_len[request]
        if len(batch) == size:
            closed.append(open_batches.pop(place))
            sums.pop(place)
    return Partition(closed + [batch for batch in open_batches if batch], aborted)


def _check(prompt_len: Sequence[int], micro_batches: int, size: int, output_len: int, cache: int) -> None:
    for name, value in (("micro_batches", micro_batches), ("size", size), ("output_len", output_len), ("cache", cache)):
        if value < 1:
            raise WorkloadError(f"{name}={value} leaves no room for any request; give at least 1.")
    longest = max(prompt_len, default=1)
    if min(prompt_len, default=1) < 1:
        raise WorkloadError(f"a prompt of {min(prompt_len)} tokens has nothing to prefill; give every prompt a token.")
    if longest + output_len > cache:
        raise WorkloadError(
            f"a request of {longest} + {output_len} tokens never fits into a cache of {cache}; "
            "raise cache or leave the request out."
        )
