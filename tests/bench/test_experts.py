"""The benchmark of routed experts: implementations compute the same, what is told was measured, errors are in order."""

import json

import numpy as np
import pytest
import torch

from workbench.bench.experts import bench as experts
from workbench.bench.experts.bench import EXACT, INT4, INT8, ROUNDED, Call, ExpertWeights, measure_experts
from workbench.bench.experts.peers import TORCH, TORCH_INT4, TORCH_INT8, TORCH_INT8_WEIGHTS
from workbench.bench.experts.speeds import ExpertRun
from workbench.kernels import Format, fused_moe, fused_moe_work


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return experts.random_experts(128, 96, experts=3)


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_the_implementations_compute_the_same(weights, tokens):
    call = Call.of(weights, tokens)
    assert call.experts == {1: 3, 7: 3, 70: 1}[tokens]
    exact = call.compute(EXACT, 2)
    assert exact.shape == (call.experts * tokens, 128)
    allowed = {EXACT: 1e-6, ROUNDED: 1e-2, TORCH: 1e-2, INT8: 5e-2, INT4: 0.4}
    allowed |= {TORCH_INT8: 8e-2, TORCH_INT8_WEIGHTS: 5e-2, TORCH_INT4: 0.2}
    for name in call.implementations():
        error = np.linalg.norm(call.compute(name, 2) - exact) / np.linalg.norm(exact)
        assert error < allowed[name], name


def test_rounding_is_an_implementation_where_it_differs(weights):
    assert ROUNDED not in Call.of(weights, 4).implementations()
    many = Call.of(weights, 5)
    ids = np.repeat(np.arange(many.experts), 5)[:, None]
    sums = np.ones(ids.shape, np.float32)
    own, exact = (fused_moe(many.h, weights.packed["bf16"], ids, sums, exact=exact) for exact in (False, True))
    assert (ROUNDED in many.implementations()) == (not np.array_equal(own, exact))
    np.testing.assert_array_equal(many.compute(EXACT, 1), exact)
    np.testing.assert_array_equal(many.compute(ROUNDED, 1), own)


def test_times_are_per_expert(weights, monkeypatch):
    monkeypatch.setattr(experts, "_timed", lambda _: (6.0, 12.0))
    timed = [(EXACT, Call.of(weights, tokens)) for tokens in (1, 70)]
    seen = experts._round(timed, np.ones(60, np.int8), 1, np.random.default_rng(0))
    assert seen == experts._Round({(EXACT, 1): ExpertRun(2.0, 10.0), (EXACT, 70): ExpertRun(6.0, 10.0)}, 2.0)


def test_what_is_measured_is_what_was_asked_for(weights):
    before = torch.get_num_threads()
    speeds = measure_experts(weights, threads=1, tokens=(1, 8), seconds=0)
    assert torch.get_num_threads() == before
    assert (speeds.model_dim, speeds.expert_dim, speeds.threads) == (128, 96, 1)
    assert speeds.contenders[0] == EXACT
    assert {len(runs) for runs in speeds.runs.values()} == {3}
    assert all(run.seconds > 0 and run.read > 1e8 for runs in speeds.runs.values() for run in runs)
    flops, _ = fused_moe_work(128, 96, 8, 1, 1, Format.BF16.weight_bytes())
    assert speeds.flops(8) == flops
    for name, format in ((EXACT, "bf16"), (INT8, "int8"), (INT4, "int4")):
        assert speeds.tokens(name) == (1, 8)
        assert speeds.weight_bytes[name] == weights.packed[format].nbytes // 3
    numbers = 3 * 128 * 96
    rows = 128 + 2 * 96
    assert speeds.weight_bytes[TORCH] == numbers * (2 if "BF16" in TORCH else 4)
    assert speeds.weight_bytes[TORCH_INT8] == numbers + 4 * rows
    assert speeds.weight_bytes[TORCH_INT8_WEIGHTS] == numbers + 2 * rows
    assert speeds.weight_bytes[TORCH_INT4] == numbers // 2 + 4 * numbers // 32


def test_errors_are_of_computing_and_of_the_format(weights):
    errors = experts.expert_errors(weights)
    assert errors[EXACT]["computing"] < 2e-6
    assert errors[EXACT]["with the format"] == errors[EXACT]["computing"]
    assert errors[TORCH]["with the format"] < 1e-2
    assert errors[TORCH_INT8]["with the format"] < 6e-2 < errors[TORCH_INT4]["with the format"] < 0.2
    assert errors[INT8]["computing"] < errors[INT8]["with the format"] < errors[INT4]["with the format"]
    assert errors[INT4]["computing"] < 3e-2 < errors[INT4]["with the format"] < 0.4


def test_the_command_reports_and_records(tmp_path, monkeypatch):
    monkeypatch.setattr(experts, "MODEL", 128)
    monkeypatch.setattr(experts, "INNER", 96)
    said: list[str] = []
    found = experts.bench_experts(seconds=0, json=tmp_path / "experts.json", say=said.append)
    kept = json.loads((tmp_path / "experts.json").read_text())
    assert said[0].startswith("experts 128 x 96, 1 thread, 3 rounds")
    assert [line.split()[0] for line in said if "tokens  " in line][: len(experts.TOKENS)] == [
        *map(str, experts.TOKENS)
    ]
    assert kept["ratios"]["INT4, 1 tokens, 1 threads: times as fast as torch, INT4"]["runs"] == 3
    row = next(row for row in kept["rows"] if row.get("contender") == INT4 and row["tokens"] == 512)
    assert row["flop_rate"] == pytest.approx(found[0].flop_rate(INT4, 512))
    assert set(kept["rows"][-1]["errors"]) >= {EXACT, INT8, INT4, TORCH}
