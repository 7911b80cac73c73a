"""`bench e2e`: engines in processes of their own answer the same requests, and what cannot be had is named."""

import json
import os
import shutil
import sys

import numpy as np
import pytest
from gguf import GGUFReader, quants
from safetensors import safe_open

import workbench as wb
from workbench.bench.e2e import bench
from workbench.bench.e2e.bench import BASELINE, LOADS, Load, Run, Timed, Worker, bench_e2e
from workbench.bench.e2e.gguf_file import as_gguf
from workbench.bench.e2e.shares import Shares
from workbench.bench.moe.roofs import Roofs
from workbench.core.errors import CheckpointError, WorkbenchError
from workbench.schedules import Sequential

SHIPPED = wb.data_path("models/tiny-moe")
SMALL = {"mixed": Load(6, 3, 20, 5), "one": Load(1, 8, 8, 7)}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "make_checkpoint", lambda name: SHIPPED)
    monkeypatch.setattr(bench, "LOADS", SMALL)


def test_a_load_gives_every_engine_the_same_prompts_of_its_lengths():
    model = wb.checkpoint(SHIPPED)
    prompts = LOADS["mixed"].prompts(model)
    assert prompts == LOADS["mixed"].prompts(model)
    lengths = [len(prompt) for prompt in prompts]
    assert len(lengths) == 64
    assert 32 <= min(lengths) < 60
    assert 220 < max(lengths) <= 256
    assert all(0 <= token < model.vocab_size for prompt in prompts for token in prompt)


def test_engines_answer_and_those_that_are_not_installed_are_named(small, tmp_path):
    said: list[str] = []
    path = tmp_path / "record.json"
    engines = (BASELINE, "workbench int8", "vllm")
    found = bench_e2e("tiny", loads=("mixed", "one"), engines=engines, pythons={}, rounds=2, json=path, say=said.append)
    assert [line for line in said if "left out: vllm" in line and "No module named 'vllm'" in line]
    answered = [(load, engine) for load, timed in found.items() for engine in timed]
    assert answered == [(load, engine) for load in SMALL for engine in engines[:2]]
    for load, timed in found.items():
        for one in timed.values():
            assert len(one.runs) == 2
            assert all(0 < run.core_seconds < 64 * run.seconds for run in one.runs)
        assert any(line.startswith(f"{load}: {SMALL[load].requests} requests") for line in said)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert all(0 < row[share] < 1 for row in record["rows"] for share in ("of_reading", "of_multiplying"))
    assert {(row["load"], row["engine"]) for row in record["rows"]} == {(a, b) for a in SMALL for b in engines[:2]}
    (ours, other) = (found["mixed"][engine] for engine in engines[:2])
    ratios = [b.seconds / a.seconds for a, b in zip(ours.runs, other.runs, strict=True)]
    told = record["ratios"][f"mixed: seconds of workbench int8 / {BASELINE}"]
    assert told["median"] == pytest.approx(np.median(ratios))


def test_shares_count_what_decodes_read_and_every_token_multiplies():
    """One request of a Mixtral reads two of eight experts per layer and new token; INT4 a quarter of bf16."""
    model = wb.models["mixtral-8x7b"]
    roofs = Roofs(100e9, 1e12)
    one = Shares.of(model, [[1] * 32], 64, "bf16", 10.0, roofs)
    active = model.always_bytes + model.routed_bytes / 4
    kv = (32 + 64 / 2) * model.kv_bytes_per_token("bf16")
    assert one.reading == pytest.approx(64 * (active + kv) / 10 / 100e9)
    products = 2 * model.active_params + 4 * model.num_attention_heads * model.head_dim * 64 * model.num_hidden_layers
    assert one.multiplying == pytest.approx((32 + 63) * products / 10 / 1e12, rel=1e-2)
    quarter = Shares.of(model, [[1] * 32], 64, "int4", 10.0, roofs)
    assert one.reading - quarter.reading == pytest.approx(64 * model.routed_bytes / 4 * 0.75 / 10 / 100e9)
    many = Shares.of(model, [[1] * 32] * 64, 64, "bf16", 10.0, roofs)
    whole = model.always_bytes + model.routed_bytes + 64 * kv
    assert many.reading == pytest.approx(64 * whole / 10 / 100e9, rel=1e-6)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The shipped checkpoint in a folder that files can be written beside."""
    return wb.checkpoint(shutil.copytree(SHIPPED, tmp_path_factory.mktemp("gguf") / "tiny"))


@pytest.mark.parametrize("form", ["bf16", "q8_0", "q4_0"])
def test_a_gguf_file_has_the_checkpoint_s_sizes_and_weights(form, copied):
    """Read by the package `gguf` and by this workbench; queries and keys have rows in another order."""
    path = as_gguf(copied, form)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    model = wb.model(path)
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
    more = ("num_local_experts", "num_experts_per_tok", "expert_width", "vocab_size", "rms_norm_eps")
    for size in (*sizes, *more):
        assert getattr(model, size) == pytest.approx(getattr(copied, size)), size

    def weights(name):
        return quants.dequantize(tensors[name].data, tensors[name].tensor_type)

    with safe_open(next(copied.path.glob("model*.safetensors")), "pt") as file:
        held = {name: file.get_tensor(name).float().numpy() for name in sorted(file.keys())}
    layer = "model.layers.1"
    downs = [held[f"{layer}.block_sparse_moe.experts.{number}.w2.weight"] for number in range(8)]
    error = {"bf16": 0, "q8_0": 0.01, "q4_0": 0.2}[form] * np.abs(downs).max()
    np.testing.assert_allclose(weights("blk.1.ffn_down_exps.weight"), downs, atol=error)
    assert np.abs(weights("blk.1.ffn_down_exps.weight") - downs).max() >= error / 100
    np.testing.assert_array_equal(weights("output.weight"), held["lm_head.weight"])
    np.testing.assert_array_equal(weights("blk.1.ffn_norm.weight"), held[f"{layer}.post_attention_layernorm.weight"])
    queries = held[f"{layer}.self_attn.q_proj.weight"].reshape(copied.num_attention_heads, 2, -1, copied.hidden_size)
    found = weights("blk.1.attn_q.weight").reshape(copied.num_attention_heads, -1, 2, copied.hidden_size)
    np.testing.assert_array_equal(found, np.moveaxis(queries, 1, 2))


def test_a_gguf_file_is_written_once_and_anew_after_the_checkpoint_s_files(copied):
    path = as_gguf(copied, "bf16")
    written = path.stat().st_mtime_ns
    assert as_gguf(copied, "bf16") == path
    assert path.stat().st_mtime_ns == written
    file = next(copied.path.glob("model*.safetensors"))
    os.utime(file, ns=(written + 10**9, written + 10**9))
    os.utime(path, ns=(written, written))
    assert as_gguf(copied, "bf16").stat().st_mtime_ns != written


def test_models_that_are_not_converted_are_named_and_left_out(small, monkeypatch):
    with pytest.raises(CheckpointError, match="no checkpoint of Mixtral's architecture"):
        as_gguf(wb.models["qwen3-30b-a3b"], "bf16")
    monkeypatch.setattr(bench, "checkpoint", lambda folder: wb.models["qwen3-30b-a3b"])
    said: list[str] = []
    given = {"loads": ("one",), "engines": ("llama.cpp bf16",), "pythons": {}, "rounds": 1, "json": None}
    bench_e2e("tiny", **given, say=said.append)
    assert any(line.startswith("left out: llama.cpp bf16: ") and "Mixtral" in line for line in said)


def test_the_best_of_several_roofs_counts():
    assert Roofs(1.0, 4.0).or_better(Roofs(2.0, 3.0)) == Roofs(2.0, 4.0)


def test_a_worker_gives_the_tokens_of_a_run():
    model = wb.checkpoint(SHIPPED)
    prompts = SMALL["mixed"].prompts(model)
    worker = Worker(sys.executable, "workbench", "bf16", SHIPPED)
    try:
        answer = worker.serve(prompts, 5)
    finally:
        worker.close()
    workload = wb.Workload.of([wb.Request(tuple(prompt), 5) for prompt in prompts])
    want = wb.run(wb.LLM(model, weights="bf16").scenario(workload), Sequential()).tokens
    assert answer["tokens"] == [list(tokens) for tokens in want]


def test_this_engine_itself_must_be_had(small, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "make_checkpoint", lambda name: SHIPPED)
    monkeypatch.setitem(bench.ENGINES, BASELINE, ("workbench", "int3"))
    said: list[str] = []
    with pytest.raises(WorkbenchError, match="this engine itself failed"):
        bench_e2e("tiny", loads=("one",), engines=(BASELINE,), pythons={}, rounds=1, json=None, say=said.append)
    assert any("Memory(weights='int3') is not supported" in line for line in said)


def test_an_engine_that_fails_later_is_left_out_and_the_others_are_told(small, monkeypatch):
    served: dict[str, int] = {}
    serve = Worker.serve

    def failing(self, prompts, new):
        if self.option == "int8":
            served["int8"] = served.get("int8", 0) + 1
            if served["int8"] == 3:
                self._process.kill()
                self._process.wait()
        return serve(self, prompts, new)

    monkeypatch.setattr(Worker, "serve", failing)
    said: list[str] = []
    engines = (BASELINE, "workbench int8")
    found = bench_e2e("tiny", loads=("one",), engines=engines, pythons={}, rounds=3, json=None, say=said.append)
    assert {engine: len(timed.runs) for engine, timed in found["one"].items()} == {BASELINE: 3, "workbench int8": 1}
    assert [line for line in said if line.startswith("left out from here on: workbench int8: the engine ended")]


def test_without_this_engine_nothing_is_compared(small):
    said: list[str] = []
    bench_e2e("tiny", loads=("one",), engines=("workbench int8",), pythons={}, rounds=1, json=None, say=said.append)
    assert not [line for line in said if "x " in line and "int8" in line]


def test_quiet_runs_count_where_there_are_enough():
    quiet = [Run(1.0, 2.0, True), Run(1.2, 2.2, True), Run(1.1, 2.1, True)]
    assert Timed([*quiet, Run(9.0, 9.0, False)]).seconds == 1.1
    assert Timed([*quiet[:2], Run(9.0, 9.0, False)]).core_seconds == 2.2


def test_what_cannot_begin_is_told(tmp_path):
    with pytest.raises(WorkbenchError, match=r"there is no interpreter '.*none'"):
        Worker(str(tmp_path / "none"), "workbench", "bf16", SHIPPED)
    with pytest.raises(WorkbenchError, match=r"there is no engine 'vlm'; there are 'workbench bf16'"):
        bench_e2e("tiny", loads=("one",), engines=("vlm",), pythons={}, rounds=1, json=None)
    with pytest.raises(WorkbenchError, match=r"no engine 'vlm' to give an interpreter; there are llama.cpp, transf"):
        bench_e2e("tiny", loads=("one",), engines=(BASELINE,), pythons={"vlm": "x"}, rounds=1, json=None)
    worker = Worker(sys.executable, "workbench", "bf16", tmp_path)
    try:
        assert "config.json" in worker.failure
    finally:
        worker.close()
