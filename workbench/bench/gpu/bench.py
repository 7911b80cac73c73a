"""Benchmark of the gpu lane on the GPU at hand: its ceilings, and the error and speed of every kernel.

Each step is saved in the record as soon as it is done, so that an interrupted run continues where it stopped.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from kernels_triton.backend.ceilings import timed
from workbench.bench import record
from workbench.bench.gpu import report
from workbench.bench.gpu.attention_tiles import tune_attention
from workbench.bench.gpu.case import Case, Size
from workbench.bench.gpu.cases import CASES
from workbench.core.errors import WorkbenchError
from workbench.hardware import Device, Link, Machine, usable_cores
from workbench.kernels import copy_rate, link_rates, matmul_rate, multiply_add, read_memory

Row = dict[str, Any]

_TRIES = 2
"""Most attempts at a step: one that ended the process twice is left out."""


class CardLostError(WorkbenchError):
    """The GPU does not answer any more, as after an illegal address: only a new process can continue."""


@dataclass(frozen=True)
class Setting:
    """Device of the steps: a GPU, or for a rehearsal the CPU with tiny operands and the interpreter."""

    device: torch.device
    rehearsal: bool

    @property
    def backend(self) -> str:
        """Backend of every call of our kernels."""
        return "triton-interpret" if self.rehearsal else "triton"

    @property
    def card(self) -> str:
        """Name of the device in the record."""
        return "rehearsal without a GPU" if self.rehearsal else torch.cuda.get_device_name(self.device)


@dataclass(frozen=True)
class Step:
    """One measurement, by name; `run` returns its row."""

    name: str
    run: Callable[[], Row]


def bench_gpu(
    *,
    minutes: float = 9,
    out: Path = Path("out/gpu"),
    dry_run: bool = False,
    cases: Sequence[Case] = CASES,
    tiles: bool = True,
    say: Callable[[str], None] = record.say,
) -> list[Row]:
    """Measure until the time is over; write gpu.json, gpu.svg and, for a GPU, machine.json; report a table at the end.

    Parameters
    ----------
    minutes : float
        Time after which no step begins [min].
    out : Path
        Folder; steps in a record there, of the same GPU and versions, are not measured again.
    dry_run : bool
        Run every step on tiny operands in the interpreter, on a computer without a GPU.
    cases : sequence of Case
    tiles : bool
        Time other tiles of attention too.
    say : callable
        Receives each line of the report.

    Returns
    -------
    list of dict
        One row per step.

    Raises
    ------
    WorkbenchError
        If there is no GPU, or it was lost; a new process with the same `out` continues after that step.
    """
    setting = _setting(dry_run)
    until = time.monotonic() + 60 * minutes
    kept = _Record(out / "gpu.json", setting)
    say(f"{setting.card}, torch {torch.__version__}, {len(kept.rows)} steps were done before")
    steps = [*_steps(setting, kept, cases), *(_tiles(setting) if tiles else ())]
    left = [step.name for step in steps if not kept.done(step.name)]
    for number, step in enumerate(steps, 1):
        if not kept.done(step.name) and time.monotonic() < until:
            row = _taken(step, setting, kept)
            say(f"{number}/{len(steps)} {step.name}: {report.told(row)}")
    rows = list(kept.rows.values())
    machine = _machine(setting, kept.rates)
    if machine is not None and not setting.rehearsal:
        machine.save(out / "machine.json")
    (out / "gpu.svg").write_text(report.picture(rows, setting.card), encoding="utf-8")
    missing = [name for name in left if not kept.done(name)]
    for line in report.table(rows, kept.rates, missing):
        say(line)
    return rows


def _setting(dry_run: bool) -> Setting:
    if dry_run:
        return Setting(torch.device("cpu"), rehearsal=True)
    if not torch.cuda.is_available():
        raise WorkbenchError("torch finds no GPU here; pass --dry-run to rehearse in the interpreter.")
    return Setting(torch.device("cuda", torch.cuda.current_device()), rehearsal=False)


class _Record:
    """Rows so far, in a file that is complete at every moment."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self._path = path
        self._setting = setting
        self.rows: dict[str, Row] = record.rows_by_step(path, setting.card)

    def done(self, name: str) -> bool:
        """True if a step has a result, or has ended the process `_TRIES` times."""
        row = self.rows.get(name, {})
        return bool(row) and ("begun" not in row or row["begun"] >= _TRIES)

    def begin(self, name: str) -> None:
        """Record that a step has begun, in case it ends the process."""
        self._keep({"step": name, "begun": self.rows.get(name, {}).get("begun", 0) + 1, "failed": "was cut off"})

    def finish(self, name: str, row: Row) -> None:
        """Record the result of a step."""
        self._keep({"step": name, **row})

    def _keep(self, row: Row) -> None:
        self.rows[row["step"]] = row
        machine = _machine(self._setting, self.rates) or _unknown(self._setting)
        rows = list(self.rows.values())
        record.replace(self._path, machine, report.ratios(rows), rows)

    @property
    def rates(self) -> dict[str, float]:
        """Measured ceilings of the GPU and its host, by name [B/s or FLOP/s]."""
        rates: dict[str, float] = {}
        for row in self.rows.values():
            rates |= row.get("rates", {})
        return rates


def _taken(step: Step, setting: Setting, kept: _Record) -> Row:
    kept.begin(step.name)
    try:
        row = step.run()
    except Exception as error:  # whatever a kernel or its compiler raises: the others go on
        row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    kept.finish(step.name, row)
    if not setting.rehearsal:
        _check_card(setting, step)
    return row


def _check_card(setting: Setting, step: Step) -> None:
    gc.collect()
    try:
        torch.cuda.synchronize(setting.device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise CardLostError(
            f"{setting.card} answers no longer after {step.name}; start again with the same --out to go on behind it."
        ) from error


# ------------------------------------------------------------------------------------------------------------ steps


def _steps(setting: Setting, kept: _Record, cases: Sequence[Case]) -> list[Step]:
    """Ceilings, then each kernel's error and speed."""
    steps = [
        Step("the card", partial(_card, setting)),
        Step("memory", lambda: {"rates": {"copy": copy_rate(setting.device, _size(setting, 1 << 31))}}),
        Step("matrix product", partial(_products, setting)),
        Step("link", lambda: {"rates": link_rates(setting.device, _size(setting, 1 << 29))}),
        Step("link while the CPU reads", partial(_shared_memory, setting)),
    ]
    for case in cases:
        steps.append(Step(f"{case.name}: error", partial(_error, case, setting)))
        steps.append(Step(f"{case.name}: speed", partial(_speed, case, setting, kept)))
    return steps


def _tiles(setting: Setting) -> list[Step]:
    return [Step(f"tiles: {name}", run) for name, run in tune_attention(setting.device, setting.rehearsal)]


def _size(setting: Setting, full: int) -> int:
    return 1 << 20 if setting.rehearsal else full


def _card(setting: Setting) -> Row:
    host = {"cores": usable_cores(), "processor": platform.processor() or platform.machine()}
    host["triton"] = version("triton")
    if setting.rehearsal:
        return host
    about = torch.cuda.get_device_properties(setting.device)
    return host | {
        "name": about.name,
        "arch": f"sm_{about.major}{about.minor}",
        "memory": about.total_memory,
        "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def _products(setting: Setting) -> Row:
    size = 64 if setting.rehearsal else 8192
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return {"rates": {name: matmul_rate(setting.device, kind, size) for name, kind in kinds.items()}}


def _shared_memory(setting: Setting) -> Row:
    """Measure the link while all cores read memory, their reading rate then, and their rates alone."""
    memory = np.ones(_size(setting, 1 << 30), np.int8)
    cores = usable_cores()
    read_memory(memory, threads=cores)
    alone = memory.nbytes / median(timed(lambda: read_memory(memory, threads=cores), torch.device("cpu")))
    flops = multiply_add(threads=cores) / _seconds(lambda: multiply_add(threads=cores))
    stop = False

    def read() -> float:
        begin = time.perf_counter()
        total = 0
        while not stop:
            read_memory(memory, threads=cores)
            total += memory.nbytes
        return total / (time.perf_counter() - begin)

    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(read)
        try:
            rates = link_rates(setting.device, _size(setting, 1 << 29))
        finally:
            stop = True
        rate = reading.result()
    shared = {f"{name} while the CPU reads": rates[name] for name in ("h2d", "d2h")}
    return {"rates": shared | {"CPU reads": alone, "CPU reads beside the link": rate, "CPU fp32": flops}}


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _error(case: Case, setting: Setting) -> Row:
    """Relative Frobenius error against float64."""
    torch.manual_seed(0)
    call = case.make(Size.TINY if setting.rehearsal else Size.CHECK, setting.device)
    found = call.ours(setting.backend).cpu().double()
    want = call.exact()
    error = float((found - want).norm() / want.norm().clamp(min=1e-30))
    right = error <= call.limit  # false for NaN
    return {"case": case.name, "error": error, "limit": call.limit} | ({} if right else {"failed": "wrong answer"})


def _speed(case: Case, setting: Setting, kept: _Record) -> Row:
    """Seconds of our kernel and of its baselines; without any, our torch backend is the baseline.

    The floor is the larger of flops and bytes over their measured ceilings.
    """
    torch.manual_seed(0)
    call = case.make(Size.TINY if setting.rehearsal else Size.FULL, setting.device)
    rates = kept.rates
    runs = timed(lambda: call.ours(setting.backend), setting.device, least=1 if setting.rehearsal else 3)
    others = call.peers or {"our torch": partial(call.ours, "torch")}
    peers = {name: _peer(work, setting) for name, work in others.items()}
    row = {"case": case.name, "seconds": median(runs), "fastest": min(runs), "runs": len(runs), "peers": peers}
    if "copy" in rates and "bf16" in rates:
        row["floor"] = max(call.flops / rates["bf16"], call.bytes / rates["copy"])
        row["bound by"] = "memory" if row["floor"] == call.bytes / rates["copy"] else "arithmetic"
    return row


def _peer(work: Callable[[], object], setting: Setting) -> float | str:
    try:
        return median(timed(work, setting.device))
    except Exception as error:  # a peer that cannot do this here says so, and ours counts all the same
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]


# ----------------------------------------------------------------------------------------------------------- record


def _machine(setting: Setting, rates: dict[str, float]) -> Machine | None:
    """This computer with the measured rates, or None before all of them are measured."""
    wanted = ("copy", "bf16", "fp32", "h2d", "d2h", "CPU reads", "CPU fp32")
    if not set(wanted) <= set(rates):
        return None
    memory = 1.0 if setting.rehearsal else float(torch.cuda.get_device_properties(setting.device).total_memory)
    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    gpu = Device(setting.card, memory, rates["copy"], (("bf16", rates["bf16"]), ("fp32", rates["fp32"])))
    cpu = Device(f"{usable_cores()} core(s)", host, rates["CPU reads"], (("fp32", rates["CPU fp32"]),))
    blank = _unknown(setting)
    return replace(blank, gpu=gpu, cpu=cpu, link=Link(rates["h2d"], rates["d2h"]), rates=tuple(sorted(rates.items())))


def _unknown(setting: Setting) -> Machine:
    """The GPU by name with placeholder rates, for a record that is written before the rates are measured."""
    nothing = Device("not measured", 1.0, 1.0, (("bf16", 1.0),))
    today = datetime.now(UTC).isoformat(timespec="seconds")
    return Machine(setting.card, nothing, nothing, Link(1.0, 1.0), host=platform.node(), measured=today)
