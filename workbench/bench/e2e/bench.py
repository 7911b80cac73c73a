"""Generated tokens per second of this engine and its peers, on the same checkpoint and the same tokens."""

from __future__ import annotations

import json as codec
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
import psutil

from workbench.bench import record
from workbench.bench.e2e.gguf_file import as_gguf
from workbench.bench.e2e.shares import Shares
from workbench.bench.moe.roofs import Roofs
from workbench.core.errors import CheckpointError, WorkbenchError
from workbench.core.quiet import kept, listening
from workbench.engine import make_checkpoint
from workbench.hardware import Machine, usable_cores
from workbench.models import ModelConfig, checkpoint

ENGINES: dict[str, tuple[str, str]] = {
    "workbench bf16": ("workbench", "bf16"),
    "workbench int8": ("workbench", "int8"),
    "workbench int4": ("workbench", "int4"),
    "transformers eager": ("transformers", "eager"),
    "transformers grouped_mm": ("transformers", "grouped_mm"),
    "transformers continuous": ("transformers", "continuous"),
    "vllm": ("vllm", "bf16"),
    "llama.cpp bf16": ("llama.cpp", "bf16"),
    "llama.cpp q8_0": ("llama.cpp", "q8_0"),
    "llama.cpp q4_0": ("llama.cpp", "q4_0"),
}
"""Engine and option of the worker, by the name in the report."""
BASELINE = "workbench bf16"
_WARM = 4
"""Requests, and new tokens of each, before anything is timed."""


class Load(NamedTuple):
    """Requests of a comparison: shortest and longest prompt, and new tokens of each."""

    requests: int
    shortest: int
    longest: int
    new: int

    def prompts(self, model: ModelConfig) -> list[list[int]]:
        """Random prompts, the same for every engine."""
        random = np.random.default_rng(0)
        lengths = random.integers(self.shortest, self.longest + 1, self.requests)
        return [random.integers(0, model.vocab_size, length).tolist() for length in lengths]


LOADS = {"mixed": Load(64, 32, 256, 64), "decode": Load(64, 32, 32, 256), "one": Load(1, 32, 32, 64)}
"""Comparisons by name."""


class Run(NamedTuple):
    """Seconds and core-seconds of a run, and whether others left the cores alone."""

    seconds: float
    core_seconds: float
    quiet: bool


@dataclass
class Timed:
    """Runs of one engine on one load."""

    runs: list[Run] = field(default_factory=list)

    @property
    def counted(self) -> list[Run]:
        """The quiet runs if they are enough, else all."""
        return kept([run for run in self.runs if run.quiet], [run for run in self.runs if not run.quiet])

    @property
    def seconds(self) -> float:
        """Median by the clock."""
        return median(run.seconds for run in self.counted)

    @property
    def core_seconds(self) -> float:
        """Median of what the cores worked."""
        return median(run.core_seconds for run in self.counted)


class Worker:
    """A process with one engine; `failure` says why it has none.

    Parameters
    ----------
    python : str
        Interpreter of the engine's environment.
    engine, option : str
    folder : Path
        The checkpoint, or a file of its weights.
    """

    def __init__(self, python: str, engine: str, option: str, folder: Path) -> None:
        self.option = option
        self._errors = TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed with the worker
        script = str(Path(__file__).with_name("worker.py"))
        command = [python, script, engine, str(folder), option]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        except OSError as error:
            self._errors.close()
            raise WorkbenchError(f"there is no interpreter {python!r} ({error.strerror}); give its path.") from error
        if self._process.stdin is None or self._process.stdout is None:
            raise WorkbenchError("a worker has no streams; this is a bug.")
        self._input = self._process.stdin
        self._output = self._process.stdout
        try:
            told = self._hear()
        except ValueError as error:
            self.close()
            raise WorkbenchError(f"{engine} said what is no JSON ({error}); this is a bug.") from error
        self.version: str = told.get("version", "")
        self.failure: str = told.get("failure", "")

    def _hear(self) -> dict[str, Any]:
        line = self._output.readline()
        if line:
            heard: dict[str, Any] = codec.loads(line)
            return heard
        self._errors.seek(0)
        said = [line for line in self._errors.read().splitlines() if line.strip()]
        return {"failure": said[-1] if said else "it ended without a word"}

    def core_seconds(self) -> float:
        """Core-seconds that the process has worked so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
        """Serve requests: seconds, core-seconds and tokens.

        Raises
        ------
        WorkbenchError
            If the process has ended.
        """
        try:
            self._input.write(codec.dumps({"prompts": prompts, "new": new}) + "\n")
            self._input.flush()
        except OSError:  # it has ended: what it said last is the answer
            pass
        answer = self._hear()
        if "failure" in answer:
            raise WorkbenchError(f"the engine ended: {answer['failure']}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def bench_e2e(
    name: str,
    *,
    loads: Sequence[str],
    engines: Sequence[str],
    pythons: Mapping[str, str],
    rounds: int,
    json: Path | None,
    say: Callable[[str], None] = record.say,
) -> dict[str, dict[str, Timed]]:
    """Serve the same prompts with every engine, round by round, and print generated tokens per second and ratios.

    Beside each stand its S-MBU and S-MFU (MoE-CAP): the least shares of the cores' read and multiply rates that its
    speed takes. Both rates are measured before the first round and after each; the best counts. Engines that cannot be
    had, or fail later, are named and left out.

    Raises
    ------
    WorkbenchError
        If this engine itself is among them, an engine is unknown, or an interpreter does not exist.
    """
    kinds = sorted({kind for kind, _ in ENGINES.values()})
    if unheard := sorted(set(pythons) - set(kinds)):
        raise WorkbenchError(f"there is no engine {unheard[0]!r} to give an interpreter; there are {', '.join(kinds)}.")
    if unknown := sorted(set(engines) - set(ENGINES)):
        raise WorkbenchError(f"there is no engine {unknown[0]!r}; there are {', '.join(map(repr, ENGINES))}.")
    folder = make_checkpoint(name)
    model = checkpoint(folder)
    found = dict[str, dict[str, Timed]]()
    for load in loads:
        found[load] = {engine: Timed() for engine in engines}
    versions = dict[str, str]()
    with ExitStack() as closing:
        workers = dict[str, Worker]()
        for engine in dict.fromkeys(engines):
            kind, option = ENGINES[engine]
            begin = time.perf_counter()
            try:
                read = as_gguf(model, option) if kind == "llama.cpp" else folder
            except CheckpointError as error:
                say(f"left out: {engine}: {error}")
                continue
            worker = Worker(pythons.get(kind, sys.executable), kind, option, read)
            closing.callback(worker.close)
            if worker.failure:
                say(f"left out: {engine}: {worker.failure}")
                continue
            if not _served(partial(worker.serve, [[1] * _WARM] * _WARM, _WARM), engine, say):
                continue
            workers[engine] = worker
            versions[engine] = worker.version
            say(f"{engine} ({worker.version}) is ready after {time.perf_counter() - begin:.0f} s")
        if BASELINE in engines and BASELINE not in workers:
            raise WorkbenchError("this engine itself failed; see above.")
        order = list(workers)
        alive = set(workers)
        roofs = Roofs.measured("cpu", usable_cores())
        for turn in range(rounds):
            for load in loads:
                for number in np.random.default_rng(turn).permutation(len(order)).tolist():
                    engine = order[number]
                    what = f"{load}, {engine}"
                    timing = partial(_time, found[load][engine], workers[engine], LOADS[load], model, what, say)
                    if engine in alive and not _served(timing, engine, say):
                        alive.remove(engine)
            roofs = roofs.or_better(Roofs.measured("cpu", usable_cores()))
    for load in loads:
        found[load] = {engine: timed for engine, timed in found[load].items() if timed.runs}
    rows = _rows(found, versions, model, roofs)
    say(f"{usable_cores()} cores read {roofs.read / 1e9:.1f} GB/s and multiply {roofs.multiply / 1e9:,.0f} GFLOP/s")
    for load in loads:
        _print(load, found[load], [row for row in rows if row["load"] == load], say)
    if json is not None:
        record.write(json, Machine.local(device="cpu"), _ratios(found), rows)
    return found


def _served(serve: Callable[[], object], engine: str, say: Callable[[str], None]) -> bool:
    """True if an engine served; one that has ended is named."""
    try:
        serve()
    except WorkbenchError as error:
        say(f"left out from here on: {engine}: {error}")
        return False
    return True


def _time(timed: Timed, worker: Worker, load: Load, model: ModelConfig, what: str, say: Callable[[str], None]) -> None:
    with listening(worker.core_seconds) as noise:
        answer = worker.serve(load.prompts(model), load.new)
    lengths = {len(tokens) for tokens in answer["tokens"]}
    if lengths != {load.new} or len(answer["tokens"]) != load.requests:
        raise WorkbenchError(f"{what}: answers have {sorted(lengths)} tokens, {load.new} were asked for.")
    run = Run(answer["seconds"], answer["core_seconds"], noise.quiet)
    timed.runs.append(run)
    say(f"{what}: {load.requests * load.new / run.seconds:.1f} tok/s, {run.core_seconds:.1f} core-seconds; {noise}")


def _print(
    load: str, timed: Mapping[str, Timed], rows: Sequence[Mapping[str, Any]], say: Callable[[str], None]
) -> None:
    given = LOADS[load]
    lengths = f"{given.shortest}" if given.shortest == given.longest else f"{given.shortest} to {given.longest}"
    say(f"{load}: {given.requests} requests, prompts of {lengths} tokens, {given.new} new ones each, greedy")
    say(
        f"{'engine':26}  tok/s  core-seconds  of reading  of multiplying  "
        f"{BASELINE} is faster: by the clock, in core-seconds; quiet runs"
    )
    ours = timed.get(BASELINE)
    for row in rows:
        one = timed[row["engine"]]
        quiet = f"{sum(run.quiet for run in one.runs)} of {len(one.runs)}"
        clock, cores = "-", "-"
        if ours is not None:
            clock = f"{one.seconds / ours.seconds:.2f}x"
            cores = f"{one.core_seconds / ours.core_seconds:.2f}x"
        say(
            f"{row['engine']:26} {row['tokens_per_second']:6.1f} {one.core_seconds:13.1f} {row['of_reading']:11.0%} "
            f"{row['of_multiplying']:15.0%}  {clock:>37} {cores:>16}  {quiet}"
        )


def _ratios(found: Mapping[str, Mapping[str, Timed]]) -> dict[str, dict[str, float]]:
    """Seconds of each engine over those of this one, round by round."""
    ratios = dict[str, dict[str, float]]()
    for load, timed in found.items():
        if BASELINE not in timed:
            continue
        for engine, one in timed.items():
            pairs = zip(one.runs, timed[BASELINE].runs, strict=False)  # one that failed has fewer
            ratios[f"{load}: seconds of {engine} / {BASELINE}"] = record.ratio(
                [a.seconds / b.seconds for a, b in pairs]
            )
    return ratios


def _rows(
    found: Mapping[str, Mapping[str, Timed]], versions: Mapping[str, str], model: ModelConfig, roofs: Roofs
) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for load, timed in found.items():
        given = LOADS[load]
        prompts = given.prompts(model)
        for engine, one in timed.items():
            option = ENGINES[engine][1]
            shares = Shares.of(model, prompts, given.new, option, one.seconds, roofs)
            rows.append(
                {
                    "load": load,
                    "engine": engine,
                    "version": versions[engine],
                    "tokens_per_second": given.requests * given.new / one.seconds,
                    "core_seconds": one.core_seconds,
                    "of_reading": shares.reading,
                    "of_multiplying": shares.multiplying,
                    "runs": [run._asdict() for run in one.runs],
                }
            )
    return rows
