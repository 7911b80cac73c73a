"""Tile sizes of the grouped GEMM: a table by architecture, kind of weights, and pairs per expert."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

KINDS = {
    torch.float32: "fp32",
    torch.float16: "16-bit",
    torch.bfloat16: "16-bit",
    torch.int8: "8-bit",
    torch.float8_e4m3fn: "8-bit",
    torch.uint8: "4-bit",
}
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227}
"""Shared memory of a block by architecture, from CUDA's programming guide."""
PATH = Path(__file__).with_name("tiles.json")
"""The table of the package."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of one launch.

    Attributes
    ----------
    n, k : int
        Columns of the output per tile, and columns of the input per step.
    group : int
        Blocks of rows that are computed with one column tile before the next column tile.
    warps, stages : int
    tma : bool
        True if the copy engine of sm_90 and later reads the weights, where their layout allows it.
    per_sm : int
        Programs per multiprocessor that share all tiles; 0 for a program per tile.
    """

    n: int
    k: int
    group: int
    warps: int
    stages: int
    tma: bool = False
    per_sm: int = 0


@dataclass(frozen=True)
class LayerTiles:
    """Sizes of both products of a layer, which share the `m` rows of a block."""

    m: int
    gated: Tiles
    plain: Tiles


def read_table(path: Path) -> dict[str, Any]:
    """Read a table with its `rows`."""
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


@functools.cache
def table() -> list[dict[str, Any]]:
    """The rows of `tiles.json`, in order."""
    rows: list[dict[str, Any]] = read_table(PATH)["rows"]
    return rows


def tiles_for(
    arch: int, weights: torch.dtype, rows_per_expert: float, sizes: tuple[int, int] | None = None
) -> LayerTiles:
    """Look up the tiles for an architecture (80: sm_80, 0: the interpreter), pairs per expert, and a layer's M and F.

    Of the rows for the fewest pairs that are enough, one that was measured for these sizes comes first.

    Raises
    ------
    LookupError
        If the table has nothing for such weights.
    ValueError
        If the architecture lacks their type.

    Examples
    --------
    >>> tiles_for(0, torch.bfloat16, 2.0).m
    16
    """
    if weights is torch.float8_e4m3fn and 0 < arch < 89:
        raise ValueError(f"{weights} needs sm_89 or later, not sm_{arch}: quantise to torch.int8 or torch.uint8.")
    for most_rows, tiles in _fitting(arch, KINDS[weights], sizes):
        if rows_per_expert <= most_rows:
            return tiles
    raise LookupError(f"tiles.json has no row for {weights} on sm_{arch}: add one.")


@functools.cache
def _fitting(arch: int, kind: str, sizes: tuple[int, int] | None) -> list[tuple[float, LayerTiles]]:
    """Most pairs per expert and tiles of every row that is for such weights and layers, in the order of `_rank`."""
    layer_sizes = None if sizes is None else list(sizes)
    found = []
    for row in sorted(table(), key=_rank):
        fits_weights = row["arch"] <= arch and row["weights"] in (kind, "any")
        if fits_weights and row.get("sizes") in (None, layer_sizes):
            most_rows = math.inf if row["most_rows"] is None else float(row["most_rows"])
            found.append((most_rows, LayerTiles(row["m"], Tiles(*row["gated"]), Tiles(*row["plain"]))))
    return found


def _rank(row: dict[str, Any]) -> tuple[int, float, bool]:
    """Sort key of the rows: latest architecture, then the fewest pairs, then rows for one size of layer."""
    most = row["most_rows"]
    return -int(row["arch"]), math.inf if most is None else most, "sizes" not in row


@functools.cache
def arch_of(device: torch.device) -> int:
    """Compute capability times ten; 0 for the CPU, which runs the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
