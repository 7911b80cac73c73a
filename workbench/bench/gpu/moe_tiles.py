"""Tuning of the experts' tiles on the GPU at hand: times all candidates for `bench moe`'s layers, writes the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kernels_triton.moe import tuning
from workbench.bench import record
from workbench.bench.moe.bench import MIXTRAL, QWEN3
from workbench.core.errors import EngineError

_UNSEEN = (9, 0)
"""Compute capability whose candidates are listed where there is no GPU."""


def tune(
    *,
    weights: Sequence[str] | None = None,
    out: Path | None = None,
    dry_run: bool = False,
    say: Callable[[str], None] = record.say,
) -> None:
    """Write the fastest tiles into the kernels' table, or only list the candidates.

    Parameters
    ----------
    weights : sequence of "16-bit", "8-bit" and "4-bit", optional
        Kinds of weights; all of them unless given.
    out : Path, optional
        Another table. A journal beside it keeps every time, so that an interrupted run can continue.
    dry_run : bool
        List the candidates; nothing is compiled and no GPU needed.
    say : callable
        Receives each line of the report.

    Raises
    ------
    EngineError
        If there is no GPU.
    """
    layers = [tuning.Layer(s.model_dim, s.expert_dim, s.experts, s.chosen) for s in (MIXTRAL, QWEN3)]
    kinds = tuple(weights or tuning.STORED)
    there = torch.cuda.is_available()
    if dry_run:
        major, minor = torch.cuda.get_device_capability() if there else _UNSEEN
        _list(tuning.tuned_shapes(10 * major + minor, layers, kinds), say)
        return
    if not there:
        raise EngineError(
            "tune times kernels on a GPU, and there is none: run it where there is one, or add --dry-run."
        )
    tuning.tune(layers, kinds, out=out, say=say)


def _list(shapes: Sequence[tuning.TunedShape], say: Callable[[str], None]) -> None:
    total = 0
    for shape in shapes:
        own = list(tuning.candidates(shape))
        total += len(own)
        rows = "more" if shape.most_rows is None else f"up to {shape.most_rows}"
        say(f"sm_{shape.arch}, {shape.weights}, {shape.layer}, {rows} pairs per expert: {len(own)} candidates")
        for m, gated, tiles in own:
            say(f"  {'gated' if gated else 'plain'}, {m} rows, {tiles}")
    say(f"{total} candidates in {len(shapes)} cases")
