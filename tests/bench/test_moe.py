"""The benchmark of a layer's routed experts: implementations compute the same, and what is told was measured."""

import json
from dataclasses import replace

import pytest
import torch

from workbench.bench.moe import bench as moe
from workbench.bench.moe.bench import GROUPED, LOOP, OURS, PAIRS
from workbench.bench.moe.speeds import MoeRun, MoeShape, MoeSpeeds, recorded_speeds
from workbench.core.errors import EngineError
from workbench.kernels import fused_moe_work
from workbench.models import models

TINY = MoeShape("tiny", 64, 48, experts=8, chosen=3)


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_the_implementations_compute_the_same(tokens):
    layer, of = moe.random_layer(TINY), moe.random_tokens(TINY, tokens)
    answers = {name: moe._IMPLEMENTATIONS[name](layer, of) for name in (OURS, GROUPED, LOOP, PAIRS)}
    moe._agree(answers)
    with pytest.raises(EngineError, match="fused_moe and loop of mm are 1 of the answer apart"):
        moe._agree(answers | {LOOP: 0 * answers[LOOP]})


def test_what_is_measured_is_what_was_asked_for():
    before = torch.get_num_threads()
    speeds = moe.measure_moe(TINY, threads=1, tokens=(1, 9), contenders=(OURS, PAIRS), seconds=0)
    assert torch.get_num_threads() == before
    assert (speeds.shape, speeds.where, speeds.contenders) == (TINY, "1 thread", (OURS, PAIRS))
    assert speeds.tokens == (1, 9)
    counts = [len(run.seconds) for run in speeds.runs]  # those that other programs disturbed are dropped
    assert len(counts) == 4
    assert all(3 <= count <= 15 for count in counts)
    assert speeds.run(PAIRS, 1).touched == 3
    assert min(*(second for run in speeds.runs for second in run.seconds), speeds.read, speeds.multiply) > 0


def test_work_is_what_the_kernel_declares():
    for tokens, touched in ((1, 3), (9, 8)):
        declared = fused_moe_work(64, 48, tokens, chosen=3, touched=touched, weight_bytes=2, itemsize=2)
        assert (TINY.flops(tokens), TINY.bytes(tokens, touched)) == declared
    assert TINY.bytes(1) == pytest.approx(TINY.bytes(1, touched=3))


def test_the_roof_turns_at_the_ridge():
    ridge = TINY.ridge(read=1e9, multiply=300e9)
    assert ridge == 300 * 8 / 3
    wide = MoeShape("wide", 4096, 1 << 20, experts=8, chosen=3)  # so wide that activations do not count
    assert wide.roof(0.99 * ridge, 1e9, 300e9) < 300e9
    assert wide.roof(1.01 * ridge, 1e9, 300e9) == 300e9


def test_ratios_are_of_one_repetition_against_who_is_best_in_the_median():
    times = {OURS: (2.0, 4.0), GROUPED: (1.0, 8.0), LOOP: (4.0, 6.0)}
    runs = tuple(MoeRun(name, 4, 8, seconds) for name, seconds in times.items())
    speeds = MoeSpeeds(TINY, "1 thread", 1e9, 1e9, runs)
    assert speeds.faster(OURS, 4, (GROUPED, LOOP)) == [0.5, 2.0]
    assert moe._ratios(speeds)["tiny, 4 tokens, 1 thread: times as fast as the better of torch's"]["median"] == 1.25


def test_the_command_reports_and_records(tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "NARROW", TINY)
    monkeypatch.setattr(moe, "QWEN3", MoeShape("second", 32, 32, experts=4, chosen=1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said: list[str] = []
    found = moe.bench_moe(seconds=0, json=tmp_path / "moe.json", say=said.append)
    kept = json.loads((tmp_path / "moe.json").read_text())
    if moe.PLAIN is torch.float32:
        assert said.pop(0).startswith("torch's own compute in fp32")
    assert said[0].startswith("tiny, 8 experts of 64 x 48, top 3; ")
    assert [line.split()[0] for line in said[2 : 2 + len(moe.TOKENS)]] == [*map(str, moe.TOKENS)]
    assert kept["ratios"]["tiny, 64 tokens, " + found[0].where + ": times as fast as loop of mm"]["runs"] >= 3
    again = recorded_speeds(tmp_path / "moe.json")
    assert [replace(speeds, recorded="") for speeds in again] == found
    assert f"; recorded {kept['date'][:10]} on " in str(again[0])


def test_what_fusing_saves_between_the_products():
    gathered, both, inner, answers = 64, 2 * 48, 48, 64  # numbers per pair
    assert TINY.between_bytes(5, fused=True) == 5 * 3 * 2 * 2 * (inner + answers)
    assert TINY.between_bytes(5, fused=False) == 5 * 3 * 2 * 2 * (gathered + both + inner + 2 * answers)


def test_a_models_shape():
    assert str(MoeShape.of(models["qwen3-30b-a3b"])) == "qwen3-30b-a3b, 128 experts of 2048 x 768, top 8"
