"""Tuner: measures the fastest tiles on a GPU and writes them into the table, only when it is called."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..backend.backend import Backend, enter_mode
from .experts import Activation, Quantised, Weights, quantise
from .grouped_gemm import launch
from .pairs import sort_pairs
from .tiles import PATH, SHARED_KIB, Tiles, arch_of, read_table

BUCKETS: dict[int | None, tuple[int, tuple[int, ...]]] = {
    16: (4, (16,)),
    32: (24, (16, 32)),
    64: (48, (32, 64)),
    None: (512, (64, 128)),
}
"""By the most pairs per expert: the pairs per expert to measure with, and the rows of a block to try."""
STORED = {"16-bit": torch.bfloat16, "8-bit": torch.int8, "4-bit": torch.uint8}
"""Kinds of weights that are tuned; fp32 is for exact results, not for speed."""
_BYTES = {"16-bit": 2.0, "8-bit": 1.0, "4-bit": 0.5}
_GROUP = 128  # weights that share a scale
_FEWEST_SUMS = 8  # fp32 accumulators per thread
_MOST_SUMS = 128  # more do not fit the registers together with the loaded operands


class Layer(NamedTuple):
    """A layer's sizes: M, F, E and k."""

    model_dim: int
    expert_dim: int
    experts: int
    chosen: int


class TunedShape(NamedTuple):
    """Key of a row of the table: architecture, kind of weights, layer, and most pairs per expert."""

    arch: int
    weights: str
    layer: Layer
    most_rows: int | None


class Candidate(NamedTuple):
    """Tiles of one product, with `m`, the rows of a block, which both products share."""

    m: int
    gated: bool
    tiles: Tiles


Measure = Callable[[TunedShape, Candidate], float | None]
"""Seconds of one product, None where the candidate does not run."""


def tuned_shapes(arch: int, layers: Sequence[Layer], kinds: Sequence[str]) -> list[TunedShape]:
    """List every layer and kind of weights with every number of pairs per expert."""
    return [TunedShape(arch, kind, layer, most) for layer, kind, most in itertools.product(layers, kinds, BUCKETS)]


def candidates(shape: TunedShape) -> Iterator[Candidate]:
    """Yield the tiles whose loads in flight fit the shared memory and whose accumulators fit the registers.

    Examples
    --------
    >>> len(list(candidates(TunedShape(90, "16-bit", Layer(4096, 14336, 8, 2), 16))))
    68
    """
    steps = (64, 128) if shape.arch >= 90 else (32, 64, 128)
    sizes = itertools.product(BUCKETS[shape.most_rows][1], (True, False), (64, 128, 256), steps, (4, 8), (3, 4))
    room = 1024 * SHARED_KIB[max(arch for arch in SHARED_KIB if arch <= shape.arch)]
    for m, gated, n, k, warps, stages in sizes:
        shared = stages * k * (n * (1 + gated) * _BYTES[shape.weights] + 2 * m)
        sums = m * n * (1 + gated) / (32 * warps)
        if shared <= room and _FEWEST_SUMS <= sums <= _MOST_SUMS:
            for tma, per_sm in _launch_modes(shape):
                yield Candidate(m, gated, Tiles(n, k, 8, warps, stages, tma, per_sm))


def _launch_modes(shape: TunedShape) -> Iterator[tuple[bool, int]]:
    """Values of `tma` and `per_sm` to try: TMA from sm_90 on, persistent programs for many rows."""
    tma = (False, True) if shape.arch >= 90 else (False,)
    per_sm = (0,) if shape.most_rows else (0, 1)
    return itertools.product(tma, per_sm)


def tune(
    layers: Sequence[Layer],
    kinds: Sequence[str] = tuple(STORED),
    *,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    arch: int | None = None,
    measure: Measure | None = None,
) -> None:
    """Time every candidate of every shape and write the fastest into the table.

    A journal beside the table keeps each time, so that an interrupted run can continue. The table is replaced as a
    whole after each shape.

    Parameters
    ----------
    layers : sequence of Layer
    kinds : sequence of "16-bit", "8-bit" and "4-bit"
        Kinds of weights.
    out : Path, optional
        Table to write, by default the package's. A new file starts with the package's rows.
    say : callable
        Receives each line of progress.
    arch, measure : optional
        Architecture and timing, by default of this computer's GPU.
    """
    architecture = arch if arch is not None else arch_of(torch.device("cuda"))
    time = measure or Bench().seconds
    table = out or PATH
    journal = _Journal(table.with_suffix(".measured.jsonl"))
    todo = tuned_shapes(architecture, layers, kinds)
    for place, shape in enumerate(todo, start=1):
        left = [candidate for candidate in candidates(shape) if not journal.knows(shape, candidate)]
        say(f"{place} of {len(todo)}: {len(left)} candidates to time for {shape}")
        for candidate in left:
            journal.note(shape, candidate, time(shape, candidate))
        row = _best(shape, journal)
        _write(table, row)
        say(json.dumps(row))


class _Journal:
    """Times by shape and candidate on this GPU with this triton [s]; each is on disk before the next is measured.

    Lines that cannot be read are measured again. Where the file cannot be written, an interrupted run starts anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, float | None] = {}
        self._warned = False
        try:
            lines = path.read_bytes().splitlines()
        except OSError:  # `note` warns of it, unless there is no file yet
            lines = []
        for line in lines:
            try:
                entry = json.loads(line)
                self._known[str(entry["what"])] = None if entry["seconds"] is None else float(entry["seconds"])
            except (
                ValueError,
                TypeError,
                KeyError,
                RecursionError,
            ):  # or a line that an interrupted run left incomplete
                continue

    @staticmethod
    def _key(shape: TunedShape, candidate: Candidate) -> str:
        """Key of a time in the journal; its text never changes, so that an older journal is still read."""
        fields = ", ".join(f"{name}={value!r}" for name, value in shape._asdict().items())
        return f"{where()}: Case({fields}) {candidate}"

    def knows(self, shape: TunedShape, candidate: Candidate) -> bool:
        """True if the candidate has been timed."""
        return self._key(shape, candidate) in self._known

    def note(self, shape: TunedShape, candidate: Candidate, seconds: float | None) -> None:
        """Keep the time of a candidate, and append it to the file."""
        key = self._key(shape, candidate)
        self._known[key] = seconds
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write("\n" + json.dumps({"what": key, "seconds": seconds}))
        except OSError as error:
            if not self._warned:
                warnings.warn(f"{self._path} cannot be written ({error}); times are lost if this ends.", stacklevel=4)
            self._warned = True

    def seconds(self, shape: TunedShape, candidate: Candidate) -> float:
        """Time of a candidate [s], infinite if it does not run."""
        found = self._known[self._key(shape, candidate)]
        return float("inf") if found is None else found


def where() -> str:
    """Name the GPU and the version of triton of a measurement."""
    from importlib.metadata import version

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{device}, triton {version('triton')}"


def _best(shape: TunedShape, journal: _Journal) -> dict[str, Any]:
    """Row of the table with the least time of both products together, which share the rows of a block."""
    fastest: dict[tuple[int, bool], tuple[float, Tiles]] = {}
    for candidate in candidates(shape):
        key = (candidate.m, candidate.gated)
        seconds = journal.seconds(shape, candidate)
        if key not in fastest or seconds < fastest[key][0]:
            fastest[key] = (seconds, candidate.tiles)
    m = min(BUCKETS[shape.most_rows][1], key=lambda m: fastest[m, True][0] + fastest[m, False][0])
    gated_time, gated = fastest[m, True]
    plain_time, plain = fastest[m, False]
    return {
        "arch": shape.arch,
        "weights": shape.weights,
        "sizes": [shape.layer.model_dim, shape.layer.expert_dim],
        "most_rows": shape.most_rows,
        "m": m,
        "gated": list(astuple(gated)),
        "plain": list(astuple(plain)),
        "microseconds": [round(gated_time * 1e6, 2), round(plain_time * 1e6, 2)],
        "source": f"{where()}, {datetime.now(UTC).date()}",
    }


def _write(path: Path, row: dict[str, Any]) -> None:
    """Replace the row of the same shape; the old table stays in place until the new one is complete."""
    table = read_table(path if path.exists() else PATH)
    kept = [old for old in table["rows"] if not _same_shape(old, row)]
    table["rows"] = [row, *kept]
    lines = ",\n".join(f"    {json.dumps(each)}" for each in table["rows"])
    head = "".join(f"  {json.dumps(name)}: {json.dumps(table[name])},\n" for name in table if name != "rows")
    fresh = path.with_suffix(".new")
    fresh.write_text(f'{{\n{head}  "rows": [\n{lines}\n  ]\n}}\n')
    os.replace(fresh, path)


def _same_shape(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(name) == other[name] for name in ("arch", "weights", "sizes", "most_rows"))


class Bench:
    """Timing of products on the GPU; keeps the operands of the current shape."""

    def __init__(self) -> None:
        enter_mode(Backend.TRITON)
        self._shape: TunedShape | None = None

    def seconds(self, shape: TunedShape, candidate: Candidate) -> float | None:
        """Median time of one product with a cold cache [s]; None if it exceeds the GPU's resources."""
        from ..backend.mode import triton

        if shape != self._shape:
            self._prepare(shape)
        too_much = (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError)
        blocks = sort_pairs(self._ids, shape.layer.experts, candidate.m)
        launched: tuple[Any, ...]
        if candidate.gated:
            launched = (self._x, self._gate_up, None, self._ids, None, None, Activation.SWIGLU)
        else:
            launched = (self._inner, self._down, None, self._ids, self._factors, None, None)
        operands = (*launched, blocks, candidate.m, candidate.tiles)
        try:
            return float(triton.testing.do_bench(lambda: launch(*operands), return_mode="median")) / 1e3
        except too_much:
            return None

    def _prepare(self, shape: TunedShape) -> None:
        M, F, E, k = shape.layer
        tokens = max(1, BUCKETS[shape.most_rows][0] * E // k)
        self._x = torch.randn(tokens, M, device="cuda").bfloat16()
        self._inner = torch.randn(tokens, k, F, device="cuda").bfloat16()
        self._ids = torch.rand(tokens, E, device="cuda").topk(k).indices
        self._factors = torch.rand(tokens, k, device="cuda")
        self._gate_up = _stored((E, 2 * F, M), shape.weights)
        self._down = _stored((E, M, F), shape.weights)
        self._shape = shape


def _stored(shape: tuple[int, ...], kind: str) -> Weights:
    """Random weights, quantised expert by expert: all in fp32 at once would take four times their memory."""
    plain = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, shape[-1] ** -0.5)
    if kind == "16-bit":
        return plain
    group = _GROUP if kind == "4-bit" else None
    experts = [quantise(expert[None], STORED[kind], group) for expert in plain]
    values = torch.cat([expert.values for expert in experts])
    scales = torch.cat([expert.scales for expert in experts])
    return Quantised(values, scales)
