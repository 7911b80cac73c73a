"""What a run takes of the computer's memory: what the ledger says, no more by the hundredth run, and never unawares."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.live.world import RUNNABLE, requests, scenario
from tests.unit.test_free_memory import UNIFIED, belongs, group
from workbench.core.errors import EngineError
from workbench.core.units import format_bytes
from workbench.engine import runnable
from workbench.engine.loading.tensor_files import TensorFile
from workbench.hardware import free_memory
from workbench.models import ModelConfig
from workbench.schedules import Sequential
from workbench.serving import fits

ROOT = Path(__file__).parents[2]


def in_a_fresh_process(code: str, *arguments: object) -> str:
    """Earlier tests have left their mark on this one: caches, threads, freed memory that was kept."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr
    return done.stdout


# ---------------------------------------------------------------------------------------------- refused before reading


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of weights may be opened."""

    def refused(*_: Any) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(TensorFile, "__init__", refused)


@pytest.mark.parametrize("start", [wb.run, wb.start])
def test_what_is_more_than_a_control_group_leaves_is_refused_before_anything_is_read(
    start: Any, unread: None, tiny: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = scenario(tiny, requests((5, 9), 3), RUNNABLE["vslpipe"])
    found = fits(of, Sequential())
    needed = int(found.gpu.total + found.host.total)
    belongs(tmp_path, "0::/job")
    monkeypatch.setattr(runnable, "free_memory", partial(free_memory, tmp_path))
    folder = tmp_path / "sys/fs/cgroup/job"
    group(folder, 2 * needed, needed + needed // 2, 0, UNIFIED)
    with pytest.raises(EngineError) as caught:
        start(of, Sequential())
    told = str(caught.value)
    parts = f"takes {format_bytes(needed)} of memory", f"has {format_bytes(needed - needed // 2)} of", str(folder)
    for part in (*parts, "KV cache"):
        assert part in told, told
    assert "smaller kv_capacity" in told
    group(folder, 2 * needed, needed, 0, UNIFIED)
    with pytest.raises(AssertionError, match="a file was opened"):
        wb.run(of, Sequential())


# -------------------------------------------------------------------------------------------- what is really taken

MEDIUM = ModelConfig("medium", 2, 512, 1024, 8, 2, 64, 8, 2, 2000, 1024)
SLACK = 4e6
"""Bytes by which threads, stacks and pages that are not filled may differ."""

TAKEN = """
import gc, json, sys, tracemalloc
import workbench as wb
from tests.live.world import requests, scenario
from workbench.pipeline import fetch, gpu
from workbench.schedules import Sequential
from workbench.serving import fits
from workbench.stages import attention, experts, moe, out_proj, qkv
from workbench.engine.model.forward import Forward
from kernels_cpu.codegen.compiled import _PackageCache

load, warm_up, late, warm = _PackageCache.load_overload, Forward.warm_up, [], []

def seen_load(self, *signature):
    late.extend(str(self._py_func) for _ in warm)
    return load(self, *signature)

def seen_warm_up(self):
    warm.clear()
    warm_up(self)
    warm.append(True)

_PackageCache.load_overload, Forward.warm_up = seen_load, seen_warm_up

def bytes_of(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def run(of):
    warm.clear()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = bytes_of("VmRSS")
    wb.run(of, Sequential())
    return bytes_of("VmHWM") - before

model = wb.checkpoint(sys.argv[1])
resident = gpu(qkv, attention, out_proj, moe)
asked = requests((60, 120, 90, 200), 4, vocab=model.vocab_size)
found = {"late": late}
for weights in ("bf16", "int8", "int4"):
    for name, pipeline in (("resident", resident), ("streamed", fetch(experts.weights) | resident)):
        of = scenario(model, asked, pipeline, budget=512, precision="bf16")
        of = of.on(memory=wb.Memory(of.memory.kv_capacity, weights=weights, kv="bf16"))
        run(of)  # what is compiled, and rounded experts that are kept, are there from now on
        ledger = fits(of, Sequential())
        found[f"{weights} {name}"] = run(of), run(of), ledger.gpu.total + ledger.host.total
of = scenario(model, asked, resident, budget=512, precision="bf16")
for _ in range(4):
    run(of)
gc.collect()
tracemalloc.start()
begin = bytes_of("VmRSS")
peaks, traced = [], [0]
for _ in range(20):
    peaks.append(run(of))
    gc.collect()
    traced.append(tracemalloc.get_traced_memory()[0])
steps = [after - before for before, after in zip(traced, traced[1:])]
largest = max(steps)
grown = bytes_of("VmRSS") - begin
peaks = [peak - largest * (number >= steps.index(largest)) for number, peak in enumerate(peaks)]
found["grown"] = grown - largest, traced[-1] - largest, min(peaks[-5:]) - min(peaks[:5])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def taken(make_model: Any) -> dict[str, list[Any]]:
    """Bytes of two runs and of the ledger, by precision and place; and what twenty runs leave."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not tell a process's peak anew")
    found: dict[str, list[Any]] = json.loads(in_a_fresh_process(TAKEN, make_model(MEDIUM).path))
    return found


@pytest.mark.alone
@pytest.mark.parametrize("place", ["resident", "streamed"])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_a_run_takes_what_the_ledger_says(weights: str, place: str, taken: dict[str, list[Any]]) -> None:
    """Of the process's memory, pages of files that are mapped included."""
    first, second, total = taken[f"{weights} {place}"]
    assert abs(first - total) < 0.1 * total + SLACK
    assert abs(second - total) < 0.1 * total + SLACK


@pytest.mark.alone
def test_no_pass_waits_for_a_kernel_to_be_compiled(taken: dict[str, list[Any]]) -> None:
    """Warm-up has them all."""
    assert taken["late"] == []


@pytest.mark.alone
def test_twenty_runs_leave_nothing(taken: dict[str, list[Any]]) -> None:
    """The model has 55 MB; one run's plans and spans take 0.1 MB in Python.

    The run that allocated most is not counted: Python sometimes doubles its table of interned strings, by 4 MB.
    """
    resident, traced, peak = taken["grown"]
    assert resident < SLACK
    assert traced < 5e5
    assert peak < SLACK
