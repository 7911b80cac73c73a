"""The command that tunes: what it says where there is no GPU."""

import pytest
import torch

from kernels_triton.moe import tuning
from workbench.__main__ import main
from workbench.bench.gpu import moe_tiles as command
from workbench.core.errors import EngineError


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_there_is_one_clear_error(capsys):
    with pytest.raises(EngineError, match="on a GPU, and there is none: run it where there is one, or add --dry-run"):
        command.tune()
    assert main(["tune"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_dry_run_lists_all_candidates(capsys):
    assert main(["tune", "--dry-run", "--weights", "16-bit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    layers = [tuning.Layer(4096, 14336, 8, 2), tuning.Layer(2048, 768, 128, 8)]
    total = sum(len(list(tuning.candidates(shape))) for shape in tuning.tuned_shapes(90, layers, ["16-bit"]))
    assert lines[-1] == f"{total} candidates in 8 cases"
    assert sum(line.startswith("  ") for line in lines) == total
