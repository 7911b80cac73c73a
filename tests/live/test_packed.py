"""Routed experts of whole blocks are packed when the model is loaded, rounded if the memory says so, and held once."""

import importlib
import os
import shutil
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.live.world import QWEN2, RUNNABLE, STREAMED, TINY, requests, scenario
from workbench.core.errors import CheckpointError, EngineError, ScenarioError, StoppedError
from workbench.engine.devices.host import HostStream
from workbench.engine.lanes.control import Control
from workbench.engine.loading import stored
from workbench.engine.model import few_rows, ops
from workbench.engine.model.weights import WeightBuffer, WeightStore
from workbench.kernels import PackedExperts, fused_moe
from workbench.models import ModelConfig
from workbench.pipeline import cpu
from workbench.pipeline.stack_graph import stack_graph
from workbench.schedules import LayerStreaming, Sequential
from workbench.serving import fits, host_kernels
from workbench.stages import Precision, attention, combine, experts, out_proj, qkv, route, shared_experts

WIDE = replace(QWEN2, name="wide", hidden_size=64, moe_intermediate_size=128, num_hidden_layers=2)
ASKED = requests((1, 40, 7), (10, 8, 12), vocab=WIDE.vocab_size, seed=7)
PRECISIONS = {
    "fp32": Precision("fp32", "fp32"),
    "bf16": Precision("bf16", "bf16"),
    "int8": Precision("bf16", "bf16", "int8", group=64),
    "int4": Precision("fp32", "fp32", "int4", group=64),
}
BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 64, "int4": 0.5 + 4 / 64}
ERRORS = {"fp32": 1e-6, "bf16": 1e-2, "int8": 2e-2, "int4": 0.3}
"""Against the weights of the checkpoint in float64, relative to the whole."""


@pytest.fixture(scope="module", params=PRECISIONS)
def kind(request: Any) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(kind: str, make_model: Any) -> ModelConfig:
    dtype = PRECISIONS[kind].weights
    return make_model(replace(WIDE, name=f"wide-{dtype}", dtype=dtype), 7)


@pytest.fixture
def store(kind: str, model: ModelConfig) -> WeightStore:
    return WeightStore(model, PRECISIONS[kind], stack_graph(STREAMED, model))


def asked_of(kind: str, model: ModelConfig, pipeline: str = "all_cpu") -> wb.Scenario:
    of = scenario(model, ASKED, RUNNABLE[pipeline], precision=model.dtype)
    return of.on(memory=replace(of.memory, weights=kind))


def in_rows(model: ModelConfig, layer: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Gates and ups, and downs, of a store that does not pack."""
    with monkeypatch.context() as patch:
        patch.setattr("workbench.engine.loading.load.packed", lambda *_: False)
        plain = WeightStore(model, Precision(model.dtype, model.dtype), stack_graph(STREAMED, model))
    return [held.tensor for held in plain.sources(layer, experts)]


def test_packed_experts_compute_what_those_of_the_checkpoint_do(
    kind: str, model: ModelConfig, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = [matrices.double() for matrices in in_rows(model, 1, monkeypatch)]
    held = store.resident(1, experts)
    random = torch.Generator().manual_seed(0)
    h = torch.randn(40, 64, generator=random).to(torch.bfloat16 if model.dtype == "bf16" else torch.float32)
    ids = torch.randint(0, model.num_local_experts, (40, 2), generator=random)
    scales = torch.rand(40, 2, generator=random)
    found = ops.Ops(model).experts(None, {"h": h, "gates": torch.cat((ids, scales), 1)}, held)  # type: ignore[arg-type]
    assert found.dtype is h.dtype
    want = torch.zeros(40, 64, dtype=torch.float64)
    for t, row in enumerate(h.double()):
        for expert, scale in zip(ids[t], scales[t], strict=True):
            gate, up = (pair[0][expert] @ row).chunk(2)
            want[t] += scale * (pair[1][expert] @ (torch.nn.functional.silu(gate) * up))
    error = (found.double() - want).norm() / want.norm()
    assert error < ERRORS[kind], error
    assert error > ERRORS[kind] / 100 or kind == "fp32"


@pytest.mark.parametrize("rows", [1, 7, 100, 1500])
def test_packed_experts_take_no_more_than_the_ledger_says(
    rows: int, kind: str, model: ModelConfig, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numpy's arrays, which torch does not count; with many rows they are buffers of one part of the pairs."""
    for module, most in (
        (importlib.import_module("kernels_cpu.experts.fused_moe"), "_BUFFERED"),
        (host_kernels, "BUFFERED"),
    ):
        monkeypatch.setattr(module, most, 1 << 20)
    held = store.resident(1, experts)
    h = torch.randn(rows, 64).to(torch.bfloat16 if model.dtype == "bf16" else torch.float32)
    ids = torch.randint(0, model.num_local_experts, (rows, model.num_experts_per_tok))
    read = {"h": h, "gates": torch.cat((ids, torch.ones(ids.shape)), 1)}
    made = ops.Ops(model)
    made.experts(None, read, held)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made.experts(None, read, held)  # type: ignore[arg-type]
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    told = host_kernels.experts_bytes(model, PRECISIONS[kind], rows)
    assert taken < told + 20_000, "and what Python's own objects take"
    assert told < 3 * taken


def test_the_ledger_knows_the_kernels_numbers() -> None:
    kernel = importlib.import_module("kernels_cpu.experts.fused_moe")
    assert (host_kernels.BUFFERED, host_kernels.FEWEST) == (kernel._BUFFERED, kernel._FEWEST)
    assert host_kernels.UNIT == PackedExperts.UNIT


def test_packed_experts_are_held_once(kind: str, model: ModelConfig, store: WeightStore) -> None:
    size = sum(held.tensor.nbytes for held in store.sources(0, experts))
    assert size == model.num_local_experts * model.expert_params * BYTES[kind]
    assert sorted(store.tables) == ["embedding", "head", "norm norm"]
    keys = ["down_blocks", "down_scales", "gate_up_blocks", "gate_up_scales"]
    assert sorted(store.resident(0, experts)) == (keys if kind in ("int8", "int4") else keys[::2])
    with pytest.raises(KeyError):
        store.sources(0, experts)
    assert store.sources(1, experts)


@pytest.mark.parametrize("sizes", [(32, 64), (64, 96)])
def test_experts_of_other_sizes_stay_in_rows_and_cannot_be_rounded(sizes: tuple[int, int], make_model: Any) -> None:
    hidden, inner = sizes
    model = make_model(replace(TINY, name=f"odd-{inner}", hidden_size=hidden, intermediate_size=inner), 1)
    keys = [
        held.key
        for held in WeightStore(model, Precision("fp32", "fp32"), stack_graph(STREAMED, model)).sources(0, experts)
    ]
    assert keys == ["gate_up", "down"]
    with pytest.raises(ScenarioError, match=f"{hidden} x {inner}, which groups of 64 columns do not divide"):
        wb.run(asked_of("int8", model), Sequential())


def test_packed_experts_begin_on_a_line_in_a_slot_whatever_is_streamed_with_them(kind: str, model: ModelConfig) -> None:
    stack = stack_graph(STREAMED, model)
    store = WeightStore(model, PRECISIONS[kind], stack)
    buffer = WeightBuffer(store, stack, 4 * model.layer_params, 2)
    transfer = buffer.transfer(tuple((1, node) for node in stack.streamed(1)))
    transfer.make(HostStream())
    assert transfer.arrived is not None
    transfer.arrived()
    there = buffer.get(1, experts)
    for held in store.sources(1, experts):
        assert there[held.key].data_ptr() % 64 == 0
        assert torch.equal(there[held.key], held.tensor)


@pytest.mark.parametrize("name", ["all_gpu", "all_cpu"])
def test_streamed_and_resident_packed_experts_answer_alike(name: str, kind: str, model: ModelConfig) -> None:
    of = asked_of(kind, model, name)
    streamed = wb.run(of.on(pipeline=STREAMED), LayerStreaming())
    assert wb.run(of, Sequential()).tokens == streamed.tokens
    assert len(set(sum(streamed.tokens, ()))) > 5


def test_a_run_computes_packed_experts(kind: str, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def watched(x: torch.Tensor, experts: Any, *rest: Any, **how: Any) -> torch.Tensor:
        seen.add(experts.format.name.lower())
        return fused_moe(x, experts, *rest, **how)

    for module in (few_rows, ops):
        monkeypatch.setattr(module, "fused_moe", watched)
    result = wb.run(asked_of(kind, model), Sequential())
    assert seen == {kind}
    told = kind if kind == model.dtype else f"{kind} (experts) and {model.dtype}"
    assert told in result.facts["weights"]


@pytest.mark.parametrize("pipeline", ["all_gpu", "all_cpu", "streamed"])
def test_rounded_experts_are_in_the_ledger(pipeline: str, kind: str, model: ModelConfig) -> None:
    of = asked_of(kind, model, "all_gpu").on(pipeline=STREAMED if pipeline == "streamed" else RUNNABLE[pipeline])
    found = fits(of, LayerStreaming() if pipeline == "streamed" else Sequential())
    store = WeightStore(model, of.precision, stack_graph(of.stack, model))
    held = sum(
        one.tensor.nbytes
        for stage in of.layer.stages
        if stage.op.has_weights
        for layer in range(model.num_hidden_layers)
        for one in store.sources(layer, stage.op)
    )
    tables = sum(table.nbytes for table in store.tables.values())
    if pipeline == "all_gpu":
        assert found.gpu["weights"] == held + tables
    else:
        assert found.host["weights"] == held


def test_rounded_experts_pass_the_shipped_models_exam(tmp_path: Path) -> None:
    """Within 1 and 3 points of bf16, of 1,000 exercises; zeros in the place of the experts would fail it."""
    shipped = wb.data_path("models/tiny-moe")
    model = wb.checkpoint(shutil.copytree(shipped, tmp_path / "mine", ignore=shutil.ignore_patterns("experts-*")))
    exam = wb.make_exam(1000, wb.load_tokenizer(model), prompt_len=(0, 60))
    right = {}
    for form in ("bf16", "int8", "int4"):
        marks = exam.marks(wb.run(wb.LLM(model, weights=form).scenario(exam.workload), Sequential()))
        right[form] = sum(mark.right for mark in marks.values())
    assert right["bf16"] > 980
    assert right["int8"] >= right["bf16"] - 10
    assert right["int4"] >= right["bf16"] - 30


# ------------------------------------------------------------------------------------------------ kept beside the model


@pytest.fixture
def mine(make_model: Any, tmp_path: Path) -> ModelConfig:
    """A model in a folder of its own."""
    made = make_model(replace(WIDE, name="wide-bf16", dtype="bf16"), 7)
    return wb.checkpoint(shutil.copytree(made.path, tmp_path / "mine", ignore=shutil.ignore_patterns("experts-*")))


def held_by(model: ModelConfig) -> dict[str, torch.Tensor]:
    sources = WeightStore(model, PRECISIONS["int8"], stack_graph(STREAMED, model)).sources(1, experts)
    return {held.key: held.tensor for held in sources}


def kept(model: ModelConfig) -> list[Path]:
    assert model.path is not None
    return sorted((model.path / "experts-int8").glob("*"))


def without_rounding(patch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("rounded again")

    patch.setattr(stored, "pack_experts", refused)


def test_rounded_experts_are_kept_and_read_again(mine: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = held_by(mine)
    assert [path.name for path in kept(mine)] == ["00000.safetensors", "00001.safetensors"]
    without_rounding(monkeypatch)
    again = held_by(mine)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert wb.checkpoint(mine.path) == mine


def change_the_checkpoint(model: ModelConfig) -> None:
    """Other weights in a file of the same size, at another time."""
    assert model.path is not None
    for file in sorted(model.path.glob("*.safetensors")):
        tensors = {name: 2 * tensor for name, tensor in load_file(file).items()}
        before = file.stat()
        save_file(tensors, file, {"format": "pt"})
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


def cut(model: ModelConfig) -> None:
    for file in kept(model):
        os.truncate(file, file.stat().st_size // 2)


def reshape(model: ModelConfig) -> None:
    """Files of the right source with tensors of another model."""
    assert model.path is not None
    for file in kept(model):
        save_file({"down_blocks": torch.zeros(3)}, file, {"source": stored.fingerprint(stored.Checkpoint(model))})


@pytest.mark.parametrize("change", [change_the_checkpoint, cut, reshape])
def test_files_of_other_weights_or_damaged_ones_are_made_again(
    change: Any, mine: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = held_by(mine)
    change(mine)
    again = held_by(mine)
    factor = 2 if change is change_the_checkpoint else 1
    assert torch.equal(again["down_scales"], factor * first["down_scales"])
    without_rounding(monkeypatch)
    assert torch.equal(held_by(mine)["down_scales"], again["down_scales"])


def test_files_that_are_replaced_while_they_are_read_are_not_kept(
    mine: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else experts of the old files would be taken for those of the new ones."""
    packed = stored._packed
    one_at_a_time = threading.Lock()
    changed = []

    def replaced(*given: Any) -> Any:
        found = packed(*given)
        with one_at_a_time:  # before any layer is written
            changed.append(None if changed else change_the_checkpoint(mine))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(stored, "_packed", replaced)
        held_by(mine)
    assert kept(mine) == []


def test_kept_files_are_for_the_readers_of_the_checkpoint(mine: ModelConfig) -> None:
    assert mine.path is not None
    for file in mine.path.glob("*.safetensors"):
        file.chmod(0o640)
    held_by(mine)
    assert {file.stat().st_mode & 0o777 for file in kept(mine)} == {0o640}


def test_experts_that_are_not_finite_cannot_be_rounded(mine: ModelConfig) -> None:
    assert mine.path is not None
    file = mine.path / "model-00002.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("experts.3.down_proj.weight"))
    tensors[name][1, 1] = torch.inf
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts of layer 1 of 'mine' cannot be rounded to int8: down\[3\]"):
        held_by(mine)


def test_loading_can_be_stopped(mine: ModelConfig) -> None:
    control = Control()
    control.stop()
    with pytest.raises(StoppedError):
        WeightStore(mine, PRECISIONS["int8"], stack_graph(STREAMED, mine), control)
    assert kept(mine) == []


def test_only_built_in_experts_are_rounded(model: ModelConfig, kind: str) -> None:
    own = replace(experts, name="own", run=lambda h, gates: h, params=None)
    layer = cpu(qkv, attention, out_proj, route, own, shared_experts, combine)
    of = asked_of(kind, model).on(pipeline=layer)
    if kind in ("int8", "int4"):
        with pytest.raises(EngineError, match=rf"only the built-in experts compute in {kind}, and .* has none; give"):
            wb.run(of, Sequential())
    else:
        wb.run(of, Sequential())


def test_a_folder_that_cannot_be_written_is_left_as_it_is(mine: ModelConfig) -> None:
    assert mine.path is not None
    (mine.path / "experts-int8").write_text("in the way", encoding="utf-8")
    assert sorted(held_by(mine)) == ["down_blocks", "down_scales", "gate_up_blocks", "gate_up_scales"]
    assert (mine.path / "experts-int8").read_text(encoding="utf-8") == "in the way"
