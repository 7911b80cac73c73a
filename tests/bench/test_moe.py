"""The benchmark of a layer's routed experts: contenders compute the same, and what is told was measured."""

import json

import pytest
import torch

from workbench.bench import moe
from workbench.bench.moe import GROUPED, LOOP, OURS, PAIRS
from workbench.errors import EngineError
from workbench.kernels import fused_moe_work
from workbench.moe_speeds import MoeShape, MoeSpeeds

TINY = MoeShape("tiny", 64, 48, experts=8, chosen=3)


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_the_contenders_compute_the_same(tokens):
    layer, of = moe.random_layer(TINY), moe.random_tokens(TINY, tokens)
    answers = {name: moe._CONTENDERS[name](layer, of) for name in (OURS, GROUPED, LOOP, PAIRS)}
    moe._agree(answers)
    with pytest.raises(EngineError, match="fused_moe and loop of mm are 1 of the answer apart"):
        moe._agree(answers | {LOOP: 0 * answers[LOOP]})


def test_what_is_measured_is_what_was_asked_for():
    before = torch.get_num_threads()
    speeds = moe.measure_moe(TINY, threads=1, tokens=(1, 9), contenders=(OURS, PAIRS), seconds=0)
    assert torch.get_num_threads() == before
    assert (speeds.shape, speeds.where, speeds.contenders) == (TINY, "1 thread", (OURS, PAIRS))
    assert {key: len(runs) for key, runs in speeds.runs.items()} == dict.fromkeys(speeds.runs, 3)
    assert speeds.tokens(PAIRS) == (1, 9)
    assert speeds.touched[1] == 3
    assert min(*(second for runs in speeds.runs.values() for second in runs), speeds.read, speeds.multiply) > 0


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


def test_ratios_are_against_the_best_of_the_same_repetition():
    runs = {(OURS, 4): (2.0, 4.0), (GROUPED, 4): (1.0, 8.0), (LOOP, 4): (4.0, 6.0)}
    speeds = MoeSpeeds(TINY, "1 thread", 1e9, 1e9, {4: 8}, runs)
    assert speeds.faster(OURS, 4, (GROUPED, LOOP)) == [0.5, 1.5]
    assert moe._ratios(speeds)["tiny, 4 tokens, 1 thread: times as fast as the better of torch's"]["median"] == 1.0


def test_the_command_reports_and_records(tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "NARROW", TINY)
    monkeypatch.setattr(moe, "QWEN3", MoeShape("second", 32, 32, experts=4, chosen=1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said: list[str] = []
    found = moe.bench_moe(seconds=0, json=tmp_path / "moe.json", say=said.append)
    kept = json.loads((tmp_path / "moe.json").read_text())
    assert said[0].startswith("tiny, 8 experts of 64 x 48, top 3; ")
    assert [line.split()[0] for line in said[2 : 2 + len(moe.TOKENS)]] == [*map(str, moe.TOKENS)]
    assert {row["shape"] for row in kept["rows"]} == {str(speeds.shape) for speeds in found}
    row = next(row for row in kept["rows"] if row["contender"] == OURS and row["tokens"] == 64)
    assert row["flop_rate"] == pytest.approx(found[0].flop_rate(OURS, 64))
