"""Addresses of a tile's rows in the paged cache."""

from __future__ import annotations

from typing import Any

from ..codegen.compiled import compiled
from .vectors import in_streams


@compiled()
def address_rows(table: Any, token: int, end: int, geometry: Any, rows: Any) -> None:
    """Store the addresses of the rows of tokens token .. end - 1 in head 0; the last one fills the rest of `rows`."""
    base = geometry[0]
    block = geometry[1]
    block_bytes = geometry[2]
    row_bytes = geometry[3]
    at = 0
    count = min(len(rows), end - token)
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
    """Store the addresses of `address_rows` in the first half of `rows`, and in order of prefetch in the second."""
    tokens = len(rows) // 2
    address_rows(table, token, end, geometry, rows[:tokens])
    in_streams(rows[:tokens], min(tokens, end - token), rows[tokens:])


@compiled()
def rows_of_task(table: Any, tasks: Any, index: int, geometry: Any, rows: Any) -> None:
    """Apply `rows_and_order` to a task's first tile, if there is such a task."""
    if index < len(tasks):
        rows_and_order(table[tasks[index, 0]], tasks[index, 1], tasks[index, 2], geometry, rows)
