"""The gpu suite: it goes on behind what fails and where it was cut off, tells wrong answers, and rehearses anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels_triton
from workbench import kernels
from workbench.bench.gpu import bench as gpu
from workbench.bench.gpu import report as gpu_report
from workbench.bench.gpu.bench import CardLostError, Setting, bench_gpu
from workbench.bench.gpu.case import Call, Case, Size
from workbench.bench.gpu.cases import CASES
from workbench.hardware import Machine

ROOT = Path(__file__).parents[2]
ABSENT = ("psutil", "pandas", "matplotlib", "scipy", "tqdm", "safetensors", "tokenizers", "ipywidgets", "transformers")
RATES = {"copy": 4e12, "bf16": 7e14, "fp32": 5e13, "h2d": 5e10, "d2h": 5.1e10, "CPU reads": 2e11, "CPU fp32": 1e12}


def case(name, answer=1.0, calls=None):
    """A case whose true answer is 1; `answer` may be an exception."""

    def ours(backend):
        if calls is not None:
            calls.append(name)
        if isinstance(answer, BaseException):
            raise answer
        return torch.full((2,), answer)

    def make(size, device):
        return Call(ours, lambda: torch.ones(2).double(), flops=0, bytes=8, limit=1e-3, peers={"same": lambda: None})

    return Case(name, make)


@pytest.fixture
def no_tuning(monkeypatch):
    monkeypatch.setattr(gpu, "tune_attention", lambda device, rehearsal: iter(()))


def suite(tmp_path, *cases, **options):
    said = []
    rows = bench_gpu(out=tmp_path, dry_run=True, cases=cases, say=said.append, **options)
    return {row["step"]: row for row in rows}, said


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path, no_tuning):
    rows, said = suite(tmp_path, case("bad", ValueError("no such tile\nmore")), case("wrong", 1.1), case("right"))
    assert rows["bad: error"]["failed"] == "ValueError: no such tile"
    assert rows["wrong: error"]["failed"] == "wrong answer"
    assert "failed" not in rows["right: error"]
    assert rows["right: speed"]["floor"] == pytest.approx(8 / rows["memory"]["rates"]["copy"])
    assert said[-1] == f"3 of {len(rows)} steps failed"
    assert "FAILED wrong: error: wrong answer" in said


def test_nan_is_a_wrong_answer(tmp_path, no_tuning):
    rows, _ = suite(tmp_path, case("nan", float("nan")))
    assert rows["nan: error"]["failed"] == "wrong answer"


def test_a_second_run_does_what_the_first_did_not_reach(tmp_path, no_tuning):
    calls = []
    rows, said = suite(tmp_path, case("one", calls=calls), minutes=0)
    assert (rows, calls) == ({}, [])
    assert "not reached: the card, memory" in said[-2]
    suite(tmp_path, case("one", calls=calls))
    before = len(calls)
    rows, _ = suite(tmp_path, case("one", calls=calls), case("two", calls=calls))
    assert set(calls[before:]) == {"two"}
    assert {"one: error", "two: error"} <= set(rows)


def test_a_step_that_ended_the_process_twice_is_left_out(tmp_path, no_tuning):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            suite(tmp_path, case("fatal", KeyboardInterrupt()), case("after"))
    calls = []
    rows, said = suite(tmp_path, case("fatal", calls=calls), case("after"))
    assert rows["fatal: error"]["failed"] == "was cut off"
    assert "failed" not in rows["after: error"]
    assert any(line.startswith("FAILED fatal: error: was cut off") for line in said)


def test_another_card_or_version_begins_anew(tmp_path, no_tuning):
    suite(tmp_path, case("one"))
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another card"}))
    calls = []
    suite(tmp_path, case("one", calls=calls))
    assert calls


def test_a_lost_card_ends_the_process(monkeypatch, tmp_path):
    setting = Setting(torch.device("cpu"), rehearsal=False)
    monkeypatch.setattr(Setting, "card", "a card")

    def lost(_):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(CardLostError, match="a card answers no longer after one; start again with the same --out"):
        gpu._check_card(setting, gpu.Step("one", dict))


def test_without_a_gpu_the_error_says_how_to_go_on(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(gpu.WorkbenchError, match="pass --dry-run"):
        bench_gpu(out=tmp_path)


def test_the_measured_rates_are_a_machine_to_predict_with(tmp_path):
    setting = Setting(torch.device("cpu"), rehearsal=True)
    machine = gpu._machine(setting, RATES)
    loaded = Machine.load(machine.save(tmp_path / "machine.json"))
    assert loaded == machine
    assert (loaded.gpu.bandwidth, loaded.gpu.flop_rate("bf16"), loaded.link.d2h) == (4e12, 7e14, 5.1e10)
    assert loaded.cpu.bandwidth == 2e11
    assert gpu._machine(setting, {name: RATES[name] for name in ("copy", "bf16")}) is None


DOORS = {name for name, own in kernels_triton.operations().items() if own.work is not None}


@pytest.mark.parametrize("name", sorted(DOORS - {"grouped_gemm", "linear"} | {"append_kv"}))
def test_every_kernel_has_a_case(name, monkeypatch):
    """Each door is called by some case at the tiny size; what it would compute does not matter here.

    grouped_gemm is inside fused_moe, and linear is torch's own on a GPU.
    """
    called, original = [], getattr(kernels, name)
    monkeypatch.setattr(
        kernels, name, lambda *a, **k: called.append(k.get("backend")) or original(*a, **k), raising=False
    )
    for case in CASES:
        case.make(Size.TINY, torch.device("cpu")).ours("torch")
    assert "torch" in called


def test_what_has_no_peer_is_compared_with_our_own_torch(tmp_path, no_tuning):
    backends = []

    def make(size, device):
        return Call(
            lambda backend: backends.append(backend) or torch.ones(1), lambda: torch.ones(1).double(), 0, 8, 0.0
        )

    rows, _ = suite(tmp_path, Case("alone", make))
    assert list(rows["alone: speed"]["peers"]) == ["our torch"]
    assert set(backends) == {"triton-interpret", "torch"}


def test_table_and_picture_tell_shares_of_the_floor():
    rows = [
        {"step": "a: error", "case": "a", "error": 2e-3, "limit": 8e-3},
        {"step": "a: speed", "case": "a", "seconds": 2e-3, "floor": 1e-3, "peers": {"SDPA": 1e-3, "liger": "absent"}},
    ]
    lines = gpu_report.table(rows, {"copy": 4e12}, [])
    assert lines[0].split() == ["copy", "4000.0", "G/s"]
    assert lines[2].split() == ["a", "2.0e-03", "2.000", "1.000", "50%", "SDPA", "0.50"]
    assert ">50%</text>" in gpu_report.picture(rows, "card")
    assert gpu_report.ratios(rows)["a: times as fast as SDPA"]["median"] == 0.5


@pytest.mark.slow
def test_rehearsal_in_under_three_minutes_with_torch_triton_numba_and_numpy_alone(tmp_path):
    pytest.importorskip("triton")
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
    code += "from workbench.__main__ import main; sys.exit(main())"
    words = ["bench", "gpu", "--dry-run", "--minutes", "3", "--out", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row for row in rows if "failed" in row] == []
    assert {row["case"] for row in rows if "error" in row} == {case.name for case in CASES}
    assert "not reached" not in run.stdout
    assert run.stdout.splitlines()[-1] == f"0 of {len(rows)} steps failed"
    assert (tmp_path / "gpu.svg").read_text().startswith("<svg")
