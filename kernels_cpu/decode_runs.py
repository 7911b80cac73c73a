"""How sequences are cut into the runs of tokens that threads take, and where the rows of these lie."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled
from .decode_vectors import in_streams

# Tokens per task: long enough to hide its start, short enough that threads end together. Longer sequences are cut into
# runs that shrink towards their end. 256 to 2048 gave 32.0 to 33.6 GB/s on two Zen 4 cores.
RUN, LEAST_RUN = 2048, 1024


@compiled()
def count_tasks(begins: Any, lengths: Any) -> int:
    """Number of tasks that `list_tasks` makes."""
    count = 0
    for s in range(lengths.size):
        token = begins[s]
        while token < lengths[s]:
            token += _run(lengths[s] - token, lengths[s] - begins[s])
            count += 1
    return count


@compiled()
def _run(rest: int, whole: int) -> int:
    if whole <= 2 * RUN:
        return RUN
    return max(LEAST_RUN, (rest // 4 + 255) // 256 * 256)


@compiled()
def list_tasks(begins: Any, lengths: Any, tasks: Any, first: Any) -> None:
    """tasks[i] = sequence, first token, end, place among all; first[s]: place of the first one of sequence s."""
    place = 0
    for s in range(lengths.size):
        first[s] = place
        token = begins[s]
        while token < lengths[s]:
            end = min(lengths[s], token + _run(lengths[s] - token, lengths[s] - begins[s]))
            tasks[place, 0], tasks[place, 1], tasks[place, 2], tasks[place, 3] = s, token, end, place
            token = end
            place += 1
    first[lengths.size] = place


def split(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tasks that `list_tasks` makes, the longest first, and where those of each sequence begin."""
    tasks = np.empty((count_tasks(begins, lengths), 4), np.int64)
    first = np.empty(len(lengths) + 1, np.int64)
    list_tasks(begins, lengths, tasks, first)
    return tasks[np.argsort(tasks[:, 1] - tasks[:, 2], kind="stable")], first


@compiled()
def address_rows(table: Any, token: int, end: int, geometry: Any, rows: Any) -> None:
    """Addresses of the rows of a tile's tokens in head 0; past the end they repeat the last one."""
    base, block, block_bytes, row_bytes = geometry[0], geometry[1], geometry[2], geometry[3]
    at, count = 0, min(len(rows), end - token)
    while at < count:
        page = (token + at) // block
        offset = token + at - page * block
        address = base + table[page] * block_bytes + offset * row_bytes
        several = min(count - at, block - offset)
        for x in range(several):
            rows[at + x] = address + x * row_bytes
        at += several
    for x in range(count, len(rows)):
        rows[x] = rows[count - 1]


@compiled()
def rows_and_order(table: Any, token: int, end: int, geometry: Any, rows: Any) -> None:
    """Addresses of the rows of a tile's tokens in head 0, and once more in the order in which they are asked for."""
    tokens = len(rows) // 2
    address_rows(table, token, end, geometry, rows[:tokens])
    in_streams(rows[:tokens], min(tokens, end - token), rows[tokens:])


@compiled()
def rows_of_task(table: Any, tasks: Any, index: int, geometry: Any, rows: Any) -> None:
    """As `rows_and_order` for a task's first tile, if there is such a task."""
    if index < len(tasks):
        rows_and_order(table[tasks[index, 0]], tasks[index, 1], tasks[index, 2], geometry, rows)
