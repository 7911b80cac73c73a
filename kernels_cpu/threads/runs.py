"""Division of sequences into runs of tokens, each a task for one thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codegen.compiled import compiled
from ..machine.parameters import parameters

_RUN = parameters().attention.run
_LEAST_RUN = min(_RUN, parameters().attention.least_run)


@compiled()
def count_tasks(begins: Any, lengths: Any) -> int:
    """Number of tasks that `list_tasks` makes of tokens begins[s] .. lengths[s] - 1 of each sequence s."""
    count = 0
    for s in range(lengths.size):
        token = begins[s]
        while token < lengths[s]:
            token += _run(lengths[s] - token, lengths[s] - begins[s])
            count += 1
    return count


@compiled()
def _run(rest: int, whole: int) -> int:
    """Tokens of the next run of a sequence of `whole` tokens, of which `rest` are left."""
    if whole <= 2 * _RUN:
        return _RUN
    return max(_LEAST_RUN, (rest // 4 + 255) // 256 * 256)


@compiled()
def list_tasks(begins: Any, lengths: Any, tasks: Any, first: Any) -> None:
    """tasks[i] = (sequence, first token, end, i); first[s] is the first task of sequence s, first[B] their number."""
    place = 0
    for s in range(lengths.size):
        first[s] = place
        token = begins[s]
        while token < lengths[s]:
            end = min(lengths[s], token + _run(lengths[s] - token, lengths[s] - begins[s]))
            tasks[place, 0] = s
            tasks[place, 1] = token
            tasks[place, 2] = end
            tasks[place, 3] = place
            token = end
            place += 1
    first[lengths.size] = place


def split(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tasks of `list_tasks`, sorted with the longest first, and `first`, which refers to the unsorted order."""
    tasks = np.empty((count_tasks(begins, lengths), 4), np.int64)
    first = np.empty(len(lengths) + 1, np.int64)
    list_tasks(begins, lengths, tasks, first)
    return tasks[np.argsort(tasks[:, 1] - tasks[:, 2], kind="stable")], first
