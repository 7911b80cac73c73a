"""Measures on a GPU which tiles are fastest, and writes them into the table. Explicit: nothing tunes itself in use."""

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
from .experts import Activation, Weights, quantise
from .grouped_gemm import launch
from .pairs import sort_pairs
from .tiles import PATH, SHARED_KIB, Tiles, arch_of, read_table

BUCKETS: dict[int | None, tuple[int, tuple[int, ...]]] = {
    16: (4, (16,)),
    32: (24, (16, 32)),
    64: (48, (32, 64)),
    None: (512, (64, 128)),
}
"""By most pairs per expert: the pairs per expert to measure with, and the rows of a block to try."""
STORED = {"16-bit": torch.bfloat16, "8-bit": torch.int8, "4-bit": torch.uint8}
"""Kinds of weights that are tuned; fp32 is there for exactness."""
_BYTES = {"16-bit": 2.0, "8-bit": 1.0, "4-bit": 0.5}
_GROUP = 128  # weights that share a scale
_FEWEST_SUMS, _MOST_SUMS = 8, 128  # fp32 of a thread; with more they no longer fit beside what is loaded


class Layer(NamedTuple):
    """A layer's sizes: M, F, E and k."""

    model_dim: int
    expert_dim: int
    experts: int
    chosen: int


class Case(NamedTuple):
    """What gets a row of the table."""

    arch: int
    weights: str
    layer: Layer
    most_rows: int | None


class Candidate(NamedTuple):
    """Tiles of one product, with the rows of a block that both share."""

    m: int
    gated: bool
    tiles: Tiles


Measure = Callable[[Case, Candidate], float | None]
"""Seconds of one product, None where the candidate does not run."""


def cases(arch: int, layers: Sequence[Layer], kinds: Sequence[str]) -> list[Case]:
    """Every layer and kind of weights at every number of pairs per expert."""
    return [Case(arch, kind, layer, most) for layer, kind, most in itertools.product(layers, kinds, BUCKETS)]


def candidates(case: Case) -> Iterator[Candidate]:
    """Tiles whose loads in flight fit the shared memory and whose sums fit the registers.

    Examples
    --------
    >>> len(list(candidates(Case(90, "16-bit", Layer(4096, 14336, 8, 2), 16))))
    68
    """
    steps = (64, 128) if case.arch >= 90 else (32, 64, 128)
    sizes = itertools.product(BUCKETS[case.most_rows][1], (True, False), (64, 128, 256), steps, (4, 8), (3, 4))
    room = 1024 * SHARED_KIB[max(arch for arch in SHARED_KIB if arch <= case.arch)]
    for m, gated, n, k, warps, stages in sizes:
        shared = stages * k * (n * (1 + gated) * _BYTES[case.weights] + 2 * m)
        sums = m * n * (1 + gated) / (32 * warps)
        if shared <= room and _FEWEST_SUMS <= sums <= _MOST_SUMS:
            for tma, per_sm in _ways(case):
                yield Candidate(m, gated, Tiles(n, k, 8, warps, stages, tma, per_sm))


def _ways(case: Case) -> Iterator[tuple[bool, int]]:
    """Weights through pointers or by TMA, and, for many rows, programs that last."""
    return itertools.product((False, True) if case.arch >= 90 else (False,), (0,) if case.most_rows else (0, 1))


def tune(
    layers: Sequence[Layer],
    kinds: Sequence[str] = tuple(STORED),
    *,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    arch: int | None = None,
    measure: Measure | None = None,
) -> None:
    """Time every candidate of every case, and write the fastest into the table.

    What was timed is kept line by line in a journal beside the table, so that a run which was interrupted goes on where
    it was; the table is replaced whole, case by case.

    Parameters
    ----------
    layers : sequence of Layer
    kinds : sequence of "16-bit", "8-bit" and "4-bit"
        Weights.
    out : Path, optional
        Another table than the package's own, whose rows come first into it where there is no such file.
    say : callable
        Takes each line of progress.
    arch, measure : optional
        Of this computer's GPU, and timing on it, unless given.
    """
    own = arch if arch is not None else arch_of(torch.device("cuda"))
    time = measure or Bench().seconds
    table = out or PATH
    journal = _Journal(table.with_suffix(".measured.jsonl"))
    todo = cases(own, layers, kinds)
    for place, case in enumerate(todo, start=1):
        left = [candidate for candidate in candidates(case) if not journal.knows(case, candidate)]
        say(f"{place} of {len(todo)}: {len(left)} candidates to time for {case}")
        for candidate in left:
            journal.note(case, candidate, time(case, candidate))
        row = _best(case, journal)
        _write(table, row)
        say(json.dumps(row))


class _Journal:
    """Seconds by case and candidate, on this GPU with this triton; each is on disk before the next is measured.

    A line that cannot be read is measured again, as are all where the file cannot be; where none can be written, an
    interrupted run has to begin anew.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._known, self._told = path, dict[str, float | None](), False
        try:
            lines = path.read_bytes().splitlines()
        except OSError:  # note tells it, unless there is no file yet
            lines = []
        for line in lines:
            try:
                entry = json.loads(line)
                self._known[str(entry["what"])] = None if entry["seconds"] is None else float(entry["seconds"])
            except (ValueError, TypeError, KeyError, RecursionError):  # also where a run ended in the middle of it
                continue

    @staticmethod
    def _key(case: Case, candidate: Candidate) -> str:
        return f"{where()}: {case} {candidate}"

    def knows(self, case: Case, candidate: Candidate) -> bool:
        return self._key(case, candidate) in self._known

    def note(self, case: Case, candidate: Candidate, seconds: float | None) -> None:
        key = self._key(case, candidate)
        self._known[key] = seconds
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write("\n" + json.dumps({"what": key, "seconds": seconds}))
        except OSError as error:
            if not self._told:
                warnings.warn(f"{self._path} cannot be written ({error}); times are lost if this ends.", stacklevel=4)
            self._told = True

    def seconds(self, case: Case, candidate: Candidate) -> float:
        found = self._known[self._key(case, candidate)]
        return float("inf") if found is None else found


def where() -> str:
    """GPU and triton, which a measurement holds for."""
    from importlib.metadata import version

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{device}, triton {version('triton')}"


def _best(case: Case, journal: _Journal) -> dict[str, Any]:
    """The row with the least time of both products together, which share the rows of a block."""
    fastest: dict[tuple[int, bool], tuple[float, Tiles]] = {}
    for candidate in candidates(case):
        key, found = (candidate.m, candidate.gated), (journal.seconds(case, candidate), candidate.tiles)
        fastest[key] = min(fastest.get(key, found), found, key=lambda pair: pair[0])
    m = min(BUCKETS[case.most_rows][1], key=lambda m: sum(fastest[m, gated][0] for gated in (True, False)))
    (gated_time, gated), (plain_time, plain) = fastest[m, True], fastest[m, False]
    return {
        "arch": case.arch,
        "weights": case.weights,
        "sizes": [case.layer.model_dim, case.layer.expert_dim],
        "most_rows": case.most_rows,
        "m": m,
        "gated": list(astuple(gated)),
        "plain": list(astuple(plain)),
        "microseconds": [round(gated_time * 1e6, 2), round(plain_time * 1e6, 2)],
        "source": f"{where()}, {datetime.now(UTC).date()}",
    }


def _write(path: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of the one for the same case; the old table stays until the new one is whole."""
    table = read_table(path if path.exists() else PATH)
    case = ("arch", "weights", "sizes", "most_rows")
    table["rows"] = [row, *(old for old in table["rows"] if any(old.get(name) != row[name] for name in case))]
    lines = ",\n".join(f"    {json.dumps(each)}" for each in table["rows"])
    head = "".join(f"  {json.dumps(name)}: {json.dumps(table[name])},\n" for name in table if name != "rows")
    fresh = path.with_suffix(".new")
    fresh.write_text(f'{{\n{head}  "rows": [\n{lines}\n  ]\n}}\n')
    os.replace(fresh, path)


class Bench:
    """Times products on the GPU; keeps the operands of the case at hand."""

    def __init__(self) -> None:
        enter_mode(Backend.TRITON)
        self._case: Case | None = None

    def seconds(self, case: Case, candidate: Candidate) -> float | None:
        """Median time of one product, with nothing of it left in the cache [s]; None if it asks for too much."""
        from ..backend.mode import triton

        if case != self._case:
            self._prepare(case)
        too_much = (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError)
        blocks = sort_pairs(self._ids, case.layer.experts, candidate.m)
        x, weights = (self._x, self._gate_up) if candidate.gated else (self._inner, self._down)
        factors, turn = (None, Activation.SWIGLU) if candidate.gated else (self._factors, None)
        operands = (x, weights, None, self._ids, factors, None, turn, blocks, candidate.m, candidate.tiles)
        try:
            return float(triton.testing.do_bench(lambda: launch(*operands), return_mode="median")) / 1e3
        except too_much:
            return None

    def _prepare(self, case: Case) -> None:
        M, F, E, k = case.layer
        tokens = max(1, BUCKETS[case.most_rows][0] * E // k)
        self._x = torch.randn(tokens, M, device="cuda").bfloat16()
        self._inner = torch.randn(tokens, k, F, device="cuda").bfloat16()
        self._ids = torch.rand(tokens, E, device="cuda").topk(k).indices
        self._factors = torch.rand(tokens, k, device="cuda")
        self._gate_up, self._down = (_stored((E, *size), case.weights) for size in ((2 * F, M), (M, F)))
        self._case = case


def _stored(shape: tuple[int, ...], kind: str) -> Weights:
    """Random weights, expert by expert: fp32 of all would take four times their room."""
    plain = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, shape[-1] ** -0.5)
    if kind == "16-bit":
        return plain
    each = [quantise(one[None], STORED[kind], _GROUP if kind == "4-bit" else None) for one in plain]
    return type(each[0])(*(torch.cat(parts) for parts in zip(*each, strict=True)))
