"""The benchmark of runs on a card, from its first step to its record, on a simulated card."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from tests.device.rehearsal import Rehearsal, RehearsedDriver
from tests.device.streams import Adversary
from tests.live.world import TINY, machine
from workbench.bench.hybrid import bench, passes, tokens
from workbench.bench.live import overlap
from workbench.engine.devices import opening
from workbench.engine.tiny_model.synthesize import write_checkpoint
from workbench.hardware import Machine
from workbench.hardware.profile import Cores
from workbench.models import ModelConfig, checkpoint
from workbench.schedules import Sequential

WAY = tokens.Way("all on the GPU", tokens.PIPELINES["all on the GPU"], Sequential(), tokens.SCHEDULERS[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the benchmark writes; one tiny model takes the place of all, and calibrating invents rates."""
    model = checkpoint(write_checkpoint(replace(TINY, name="hybrid", head_dim=16), tmp_path / "hybrid"))
    card = Rehearsal(Adversary(), total=1 << 34)
    here = replace(machine(), cores=Cores.beside_card(2))
    monkeypatch.setattr(Machine, "local", classmethod(lambda cls, device="cpu", refresh=False: here))
    monkeypatch.setattr(bench, "calibrate", lambda model, device, refresh: here)
    monkeypatch.setattr(bench, "make_checkpoint", lambda name: model.path)
    monkeypatch.setattr(bench, "models", lambda folder: iter((model,)))
    monkeypatch.setattr(tokens, "ways", lambda: [WAY])
    monkeypatch.setattr(bench, "_apart", tokens.tokens_row)
    monkeypatch.setattr(bench, "SETTINGS", ((4, 32), (3, 40)))
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(passes, "SCHEDULES", (overlap.VSL, overlap.PREFETCH))
    monkeypatch.setattr(overlap, "STEADY", 2)
    monkeypatch.setattr(opening, "CudaDriver", lambda limit=None: RehearsedDriver(limit, cuda=card, name="sim"))
    return tmp_path / "out"


def measured(folder: Path, minutes: float = 5) -> tuple[bool, list[str]]:
    said = list[str]()
    right = bench.bench_hybrid("mix-b", gpu_memory="1GB", minutes=minutes, out=folder, say=said.append)
    return right, said


def test_every_step_is_made_and_kept(folder: Path) -> None:
    right, said = measured(folder)
    assert right, said
    rows = json.loads((folder / "hybrid.json").read_text())["rows"]
    steps = ["tokens of hybrid", "calibration for mix-b"]
    steps += ["passes of mix-b in 1GB, round 1", "passes of mix-b in 1GB, round 2"]
    assert [row["step"] for row in rows] == steps
    assert rows[0]["told"] == "1 of 1 ways gave the host's tokens, 0 were refused"
    for row in rows[2:]:
        found = row["schedules"]
        assert len({(each["schedule"], each["rows"], each["context"]) for each in found}) == len(found)
        assert len(found) == len(bench.SETTINGS) * len(passes.SCHEDULES)
        assert all(len(each["measured"]) == overlap.STEADY and each["link"] > 0 for each in found)
        assert all(0 < each["peak"] <= each["ledger"] for each in found)
        assert all(each["occupied"] > 0 for each in found)
    found = rows[2]["schedules"]
    assert said[-1].startswith(f"simulated over measured seconds of {len(found)} kinds of passes: off by ")
    _, again = measured(folder)
    assert again == said[-1:]


def test_what_there_is_no_time_for_is_told(folder: Path) -> None:
    right, said = measured(folder, minutes=0)
    assert not right
    assert len(said) == 2 + bench.ROUNDS
    assert all(line.endswith(": not reached") for line in said)


def test_wrong_tokens_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "differing", lambda model, way: 3)
    monkeypatch.setattr(bench, "ROUNDS", 0)
    right, said = measured(folder)
    assert not right
    assert said[0] == f"{WAY}: 3 requests got other tokens"


def test_tokens_are_compared_in_a_process_whose_end_is_told(tmp_path: Path) -> None:
    model = checkpoint(write_checkpoint(replace(TINY, name="apart", head_dim=16), tmp_path / "apart"))
    row = bench._apart(model)  # a process of its own sees no card here, which every way tells
    assert not row["right"]
    assert len(row["failed"]) + row["refused"] == len(list(tokens.ways()))
    assert all("torch finds no GPU here" in line for line in row["failed"])
    died = bench._made(partial(bench._apart, cast("ModelConfig", Deadly())))
    assert died is not None
    assert not died["right"]
    assert died["told"].startswith("BrokenProcessPool")


class Deadly:
    """Ends the process that receives it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (3,)
