"""Benchmark of runs with the gpu lane on the card at hand: right tokens, then passes, simulated and measured."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import cache, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from workbench.bench import record
from workbench.bench.hybrid.passes import Passes, told
from workbench.bench.hybrid.tokens import models, tokens_row
from workbench.core.errors import WorkbenchError
from workbench.core.units import format_bytes
from workbench.engine import calibrate, make_checkpoint
from workbench.hardware import Machine, usable_cores
from workbench.models import ModelConfig, checkpoint

Row = dict[str, Any]
_Step = tuple[str, Callable[[], Row | None]]
"""Name of a step, and the function that makes its row; there is none if the time is over."""

SETTINGS = ((128, 256), (512, 128), (32, 512), (128, 1024))
"""Decodes of a pass, and KV entries that each reads."""
ROUNDS = 3
"""Rounds of passes; each is kept as soon as it is done."""
_CORES = 3
"""Cores that a process takes that compares tokens."""


def bench_hybrid(
    name: str,
    *,
    gpu_memory: str,
    minutes: float,
    out: Path,
    say: Callable[[str], None] = record.say,
) -> bool:
    """Prove and measure the gpu lane on the card at hand; True if every answer is right.

    Tokens are compared in a process for each model, several side by side where there are cores for it: an error that
    ends one leaves the others as they are. Then passes are measured in this process, alone. Steps in a record in `out`
    that the same card and versions made are not made again, unless they went wrong.

    Parameters
    ----------
    name : str
        Recipe of the model that is measured.
    gpu_memory : str
        Memory of the card that a run may take, with its unit.
    minutes : float
        Time after which no step begins [min].
    out : Path
        Folder for hybrid.json, and for machine.json, the calibrated computer with which passes are simulated.
    say : callable
        Receives each line of the report.

    Raises
    ------
    WorkbenchError
        If there is no GPU.
    """
    begin = time.monotonic()
    kept = _Record(out / "hybrid.json", Machine.local(device="cuda"))
    right = True
    until = begin + 60 * minutes
    steps = chain(_tokens(out / "models", kept, until), _in_turn(_steps(name, gpu_memory, out, say), kept, until))
    for step, make in steps:
        row = _made(make)
        if row is None:
            say(f"{step}: not reached")
            right = False
            continue
        kept.add(step, row)
        right = right and row["right"]
        for line in row.get("failed", ()):
            say(line)
        say(f"{step}: {row['told']} (after {time.monotonic() - begin:.0f} s)")
    for line in _summary(kept.rows.values()):
        say(line)
    return right


def errors(rows: Iterable[Row]) -> dict[tuple[str, str, int, int], float]:
    """The relative error of simulated passes by model and memory, schedule, decodes and KV entries; over all rounds.

    It is that of the median pass; each is compared with what its round's calibration predicted.
    """
    slower = defaultdict[tuple[str, str, int, int], list[float]](list)
    for of_round in rows:
        model_and_memory = of_round["step"].partition(", round")[0]
        for each in of_round.get("schedules", ()):
            kind = model_and_memory, each["schedule"], each["rows"], each["context"]
            slower[kind] += [seconds / each["simulated"] for seconds in each["measured"]]
    return {kind: abs(1 / float(np.median(found)) - 1) for kind, found in slower.items()}


def _summary(rows: Iterable[Row]) -> Iterator[str]:
    """The errors of simulated passes in words, if any were made."""
    found = list(errors(rows).values())
    if found:
        yield (
            f"simulated over measured seconds of {len(found)} kinds of passes: off by {np.median(found):.1%} "
            f"(median), {max(found):.1%} at most"
        )


def _made(make: Callable[[], Row | None]) -> Row | None:
    """The row of a step, which tells of its error if there was one: the other steps go on."""
    try:
        return make()
    except (WorkbenchError, RuntimeError) as error:
        return {"told": f"{type(error).__name__}: {error}"[:300], "right": False}


def _in_turn(steps: Iterable[_Step], kept: _Record, until: float) -> Iterator[_Step]:
    """The steps that have not been right yet; none is made later than `until`."""
    for step, make in steps:
        if not kept.right(step):
            yield step, make if time.monotonic() < until else lambda: None


def _tokens(folder: Path, kept: _Record, until: float) -> Iterator[_Step]:
    """The tokens of every model that have not been right yet, each as it is there; none is begun later than `until`."""
    wanted = [model for model in models(folder) if not kept.right(f"tokens of {model.name}")]

    def in_time(model: ModelConfig) -> Row | None:
        return _apart(model) if time.monotonic() < until else None

    with ThreadPoolExecutor(max(1, usable_cores() // _CORES)) as threads:
        begun = {threads.submit(in_time, model): model.name for model in wanted}
        for found in as_completed(begun):
            yield f"tokens of {begun[found]}", found.result


def _apart(model: ModelConfig) -> Row:
    """The row of a model's tokens, from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(tokens_row, model).result()


def _steps(name: str, gpu_memory: str, out: Path, say: Callable[[str], None]) -> Iterator[_Step]:
    yield f"calibration for {name}", partial(_calibration, name, out)
    passes = cache(partial(_passes, name, out, gpu_memory))
    for number in range(ROUNDS):
        yield f"passes of {name} in {gpu_memory}, round {number + 1}", partial(_round, passes, number, say)


def _calibration(name: str, out: Path) -> Row:
    """Time the model's operations in their places, and keep the computer that follows."""
    machine = calibrate(checkpoint(make_checkpoint(name)), device="cuda", refresh=True)
    machine.save(out / "machine.json")
    link = machine.link
    told = f"link {format_bytes(link.h2d)}/s to the card and {format_bytes(link.d2h)}/s back, {machine.gpu.name}"
    return {"told": told, "right": True}


def _passes(name: str, out: Path, gpu_memory: str) -> Passes:
    machine = Machine.load(out / "machine.json").limit(gpu_memory=gpu_memory)
    return Passes(checkpoint(make_checkpoint(name)), machine, SETTINGS)


def _round(passes: Callable[[], Passes], number: int, say: Callable[[str], None]) -> Row:
    found = passes().round(number, say)
    return {"told": told(found), "right": True, "schedules": found}


class _Record:
    """Rows so far by step, in a file that is complete at every moment."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self._path = path
        self._machine = machine
        self.rows: dict[str, Row] = record.rows_by_step(path, machine.name)

    def right(self, step: str) -> bool:
        """True if a step was made, and nothing went wrong."""
        return bool(self.rows.get(step, {}).get("right", False))

    def add(self, step: str, row: Row) -> None:
        """Keep the row of a step."""
        self.rows[step] = {"step": step, **row}
        record.replace(self._path, self._machine, {}, list(self.rows.values()))
