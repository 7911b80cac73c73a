"""Benchmark of runs with the gpu lane on the card at hand: right tokens, then passes, simulated and measured."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from workbench.bench import record
from workbench.bench.hybrid.passes import Passes, told
from workbench.bench.hybrid.tokens import differing, models, ways
from workbench.core.errors import WorkbenchError
from workbench.core.units import format_bytes
from workbench.engine import calibrate, make_checkpoint
from workbench.hardware import Machine
from workbench.models import ModelConfig, checkpoint

Row = dict[str, Any]

SETTINGS = ((128, 256), (512, 128), (32, 512), (128, 1024))
"""Decodes of a pass, and KV entries that each reads."""
ROUNDS = 3
"""Rounds of passes; each is kept as soon as it is done."""


def bench_hybrid(
    name: str,
    *,
    gpu_memory: str,
    minutes: float,
    out: Path,
    say: Callable[[str], None] = record.say,
) -> bool:
    """Prove and measure the gpu lane on the card at hand; True if every answer is right.

    Steps in a record in `out` that the same card and versions made are not made again, unless they went wrong.

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
    until = time.monotonic() + 60 * minutes
    kept = _Record(out / "hybrid.json", Machine.local(device="cuda"))
    right = True
    for step, make in _steps(name, gpu_memory, out, say):
        if kept.right(step):
            continue
        if time.monotonic() > until:
            say(f"{step}: not reached")
            right = False
            continue
        begin = time.monotonic()
        row = _made(make)
        kept.add(step, row)
        right = right and row["right"]
        say(f"{step}: {row['told']} ({time.monotonic() - begin:.0f} s)")
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


def _made(make: Callable[[], Row]) -> Row:
    """The row of a step, which tells of its error if there was one: the other steps go on."""
    try:
        return make()
    except (WorkbenchError, RuntimeError) as error:
        return {"told": f"{type(error).__name__}: {error}"[:300], "right": False}


def _steps(
    name: str, gpu_memory: str, out: Path, say: Callable[[str], None]
) -> Iterator[tuple[str, Callable[[], Row]]]:
    first, *others = models(out / "models")
    yield f"tokens of {first.name}", partial(_tokens, first, say)
    yield f"calibration for {name}", partial(_calibration, name, out)
    passes = cache(partial(_passes, name, out, gpu_memory))
    for number in range(ROUNDS):
        yield f"passes of {name} in {gpu_memory}, round {number + 1}", partial(_round, passes, number, say)
    for model in others:
        yield f"tokens of {model.name}", partial(_tokens, model, say)


def _tokens(model: ModelConfig, say: Callable[[str], None]) -> Row:
    """Serve the requests in every way on the card and on the host."""
    right = wrong = refused = 0
    failed = list[str]()
    for way in ways():
        try:
            count = differing(model, way)
        except (WorkbenchError, RuntimeError, ValueError) as error:  # the other ways go on
            failed.append(f"{way}: {type(error).__name__}: {error}"[:300])
            say(failed[-1])
            continue
        if count is None:
            refused += 1
        elif count:
            wrong += 1
            failed.append(f"{way}: {count} requests got other tokens")
            say(failed[-1])
        else:
            right += 1
    told = f"{right} of {right + len(failed)} ways gave the host's tokens, {refused} were refused"
    return {"told": told, "right": not failed, "ways": right, "wrong": wrong, "refused": refused, "failed": failed}


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
