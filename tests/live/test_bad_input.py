"""Bad input gives one clear error that names the object and the mend, before any lane has a thread."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.live.world import RUNNABLE, files_in_use, machine, requests, scenario
from tests.systems import VSL
from workbench.core.errors import (
    CapacityError,
    CheckpointError,
    EngineError,
    ScenarioError,
    ScheduleError,
    WorkbenchError,
    WorkloadError,
)
from workbench.engine.engine import Engine
from workbench.engine.lanes.lane import Lane
from workbench.engine.loading.checkpoint import open_checkpoint
from workbench.engine.model.weights import WeightStore
from workbench.models import ModelConfig
from workbench.pipeline import cpu, gpu, load, offload
from workbench.pipeline.stack_graph import stack_graph
from workbench.scheduler.block_manager import BlockCounts
from workbench.schedules import Sequential, VSLPipe
from workbench.serving import fits
from workbench.stages import Precision, attention, combine, experts, out_proj, qkv, route, shared_experts
from workbench.workload import Request, Workload

ASKED = requests((5, 1, 19), 4, seed=5)
LAYER = "model-00002.safetensors"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the lanes that were started; there must be none."""
    names: list[str] = []
    start = Lane.start

    def count(self: Lane) -> None:
        names.append(self.name)
        start(self)

    monkeypatch.setattr(Lane, "start", count)
    yield names
    assert not names, "a lane was started before the input was refused"


@pytest.fixture
def folder(tiny: ModelConfig, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    assert tiny.path is not None
    return Path(shutil.copytree(tiny.path, tmp_path / "mine"))


def run(folder: Path) -> wb.Result:
    return wb.run(scenario(wb.checkpoint(folder), ASKED), VSLPipe())


def refused(of: Callable[[], object], kind: type[WorkbenchError], *names: str) -> None:
    """One sentence, or two, that contain each of `names`; no object's address, no chained surprise on top."""
    with pytest.raises(WorkbenchError) as caught:
        of()
    message = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {message}"
    for name in names:
        assert name in message, f"{name!r} is not in: {message}"
    assert "\n" not in message.strip()
    assert " at 0x" not in message
    assert message.rstrip().endswith(".")
    assert len(message) < 500


# ----------------------------------------------------------------------------------------------------------- tensors


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], file: str = LAYER) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "missing": lambda t: t.pop(Q),
    "misshapen": lambda t: t.update({Q: t[Q][:-1].clone()}),
    "transposed shape": lambda t: t.update({Q: t[Q].reshape(2, -1).clone()}),
    "flat": lambda t: t.update({Q: t[Q].flatten().clone()}),
    "bf16": lambda t: t.update({Q: t[Q].bfloat16()}),
    "fp16": lambda t: t.update({Q: t[Q].half()}),
    "int8": lambda t: t.update({Q: t[Q].to(torch.int8)}),
    "renamed": lambda t: t.update({Q.replace("q_proj", "query"): t.pop(Q)}),
}


@pytest.mark.parametrize("fault", TENSORS)
def test_tensor(fault: str, folder: Path) -> None:
    rewrite(folder, TENSORS[fault])
    refused(lambda: run(folder), CheckpointError, Q, "mine")


def test_one_expert_missing(folder: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    rewrite(folder, lambda t: t.pop(name))
    refused(lambda: run(folder), CheckpointError, name)


def test_head_missing_where_it_is_not_tied(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("lm_head.weight"), "model-00000.safetensors")
    refused(lambda: run(folder), CheckpointError, "lm_head.weight")


# ------------------------------------------------------------------------------------------------------------- files


def cut(path: Path, keep: float) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])


FILES: dict[str, Callable[[Path], Any]] = {
    "data cut": lambda p: cut(p, 0.9),
    "one byte cut": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "header cut": lambda p: p.write_bytes(p.read_bytes()[:100]),
    "length cut": lambda p: p.write_bytes(p.read_bytes()[:5]),
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("<html>404 Not Found</html>"),
    "header too long": lambda p: p.write_bytes(struct.pack("<Q", 1 << 62) + p.read_bytes()[8:]),
    "header no json": lambda p: p.write_bytes(struct.pack("<Q", 8) + b"{{{{{{{{" + b"0" * 64),
    "bytes too many": lambda p: p.write_bytes(p.read_bytes() + b"0" * 16),
    "git lfs pointer": lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
}


@pytest.mark.parametrize("fault", FILES)
def test_safetensors_file(fault: str, folder: Path) -> None:
    FILES[fault](folder / LAYER)
    refused(lambda: run(folder), CheckpointError, LAYER, "fetch it again")


def test_a_folder_with_the_name_of_a_file(folder: Path) -> None:
    (folder / LAYER).unlink()
    (folder / LAYER).mkdir()
    refused(lambda: run(folder), CheckpointError, LAYER)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_pipe_in_place_of_weights_is_not_waited_for(folder: Path) -> None:
    (folder / LAYER).unlink()
    os.mkfifo(folder / LAYER)
    refused(lambda: run(folder), CheckpointError, LAYER)
    (folder / INDEX).unlink()
    refused(lambda: run(folder), CheckpointError, LAYER, "is no file")


def test_files_that_are_cut_or_rewritten_later_change_nothing(folder: Path) -> None:
    """A mapped file that is cut ends the process, one that is rewritten changes the answer; neither is mapped."""
    held = open_checkpoint(wb.checkpoint(folder))
    before = {name: tensor.clone() for name, tensor in held.items()}
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 0)
    assert not files_in_use(folder)
    assert all(held[name].equal(tensor) for name, tensor in before.items())


def test_weights_are_held_once(tiny: ModelConfig) -> None:
    store = WeightStore(tiny, Precision("fp32", "fp32"), stack_graph(VSL, tiny))
    resident = store.resident(1, experts)
    assert {key: len(matrices) for key, matrices in resident.items()} == dict.fromkeys(
        ("gate_up", "down"), tiny.num_local_experts
    )
    with pytest.raises(KeyError):
        store.sources(1, experts)
    assert store.sources(0, experts)


def test_a_pickle_inside_a_safetensors_name_is_not_opened(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (folder / "exploded",))

    (folder / LAYER).write_bytes(pickle.dumps(Bomb()))
    refused(lambda: run(folder), CheckpointError, LAYER)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_only_pickled_weights(name: str, folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    (folder / name).write_bytes(pickle.dumps({}))
    refused(lambda: run(folder), CheckpointError, "mine", name, "safe_serialization")


def test_no_weights_at_all(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    refused(lambda: run(folder), CheckpointError, "mine", "safetensors")


def test_weights_that_vanished_since(folder: Path) -> None:
    model = wb.checkpoint(folder)
    shutil.rmtree(folder)
    refused(lambda: wb.run(scenario(model, ASKED), VSLPipe()), CheckpointError, "mine")


def test_no_such_folder(tmp_path: Path) -> None:
    refused(lambda: wb.checkpoint(tmp_path / "nowhere"), CheckpointError, "nowhere", "config.json")


INDEX = "model.safetensors.index.json"
INDICES: dict[str, Any] = {
    "absent file": {"weight_map": {Q: "model-00009.safetensors"}},
    "a path outside": {"weight_map": {Q: "../mine/model-00002.safetensors"}},
    "an absolute path": {"weight_map": {Q: "/etc/passwd"}},
    "the folder itself": {"weight_map": {Q: "."}},
    "an empty name": {"weight_map": {Q: ""}},
    "no map": {"metadata": {}},
    "a list as map": {"weight_map": [LAYER]},
    "a list": [],
    "a number": 3,
    "null": None,
    "a number as file": {"weight_map": {Q: 3}},
    "a number beside names": {"weight_map": {Q: 3, "a": LAYER}},
    "a list as file": {"weight_map": {Q: [LAYER]}},
    "null as file": {"weight_map": {Q: None, "a": LAYER}},
    "a name longer than any": {"weight_map": {Q: "m" * 5000 + ".safetensors"}},
    "a name with a zero byte": {"weight_map": {Q: "model\0.safetensors"}},
}


@pytest.mark.parametrize("fault", INDICES)
def test_index(fault: str, folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps(INDICES[fault]))
    refused(lambda: run(folder), CheckpointError, INDEX, "fetch")


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe\x00", b'{"weight_map": ', b"[" * 5000], ids=len)
def test_index_that_is_no_json(raw: bytes, folder: Path) -> None:
    (folder / INDEX).write_bytes(raw)
    refused(lambda: run(folder), CheckpointError, INDEX, "fetch")


# ------------------------------------------------------------------------------------------------------------ config


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe\x00", b'{"architectures": ["MixtralFor'], ids=repr)
def test_config_that_is_no_json(raw: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(raw)
    refused(lambda: run(folder), CheckpointError, "config.json")


@pytest.mark.parametrize("raw", ["[]", "null", "3", '"mixtral"'])
def test_config_that_is_no_object(raw: str, folder: Path) -> None:
    (folder / "config.json").write_text(raw)
    refused(lambda: run(folder), CheckpointError, "config.json")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "another type": ({"architectures": None, "model_type": "qwen3_next"}, "qwen3_next"),
    "no architecture": ({"architectures": [], "model_type": None}, "architecture"),
    "an architecture that is no list": ({"architectures": "LlamaForCausalLM"}, "LlamaForCausalLM"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "rope scaling": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope"),
    "rope scaling, old spelling": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope"),
    "rope scaling without a factor": ({"rope_scaling": {"rope_type": "linear"}}, "rope"),
    "rope parameters": ({"rope_parameters": {"rope_type": "yarn", "factor": -2.0}}, "rope"),
    "rope of no object": ({"rope_parameters": "default"}, "rope"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "fp64": ({"torch_dtype": "float64"}, "float64"),
    "fp16, while its tensors are fp32": ({"torch_dtype": "float16"}, "torch.float16"),
    "a dtype of no string": ({"torch_dtype": ["float32"]}, "dtype"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "negative": ({"hidden_size": -32}, "hidden_size"),
    "text": ({"vocab_size": "97"}, "vocab_size"),
    "a fraction": ({"intermediate_size": 24.5}, "intermediate_size"),
    "true": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "missing": ({"num_local_experts": None}, "num_local_experts"),
    "uneven groups": ({"num_key_value_heads": 3}, "key-value"),
    "more chosen than there are": ({"num_experts_per_tok": 5}, "experts"),
    "negative head dim": ({"head_dim": -8}, "head_dim"),
    "head dim in text": ({"head_dim": "8"}, "head_dim"),
    "head dim that is no divisor": ({"head_dim": None, "hidden_size": 2, "num_attention_heads": 4}, "head"),
    "epsilon in text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    "theta in text": ({"rope_theta": "much"}, "rope_theta"),
    "tied in text": ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_config(fault: str, folder: Path) -> None:
    changes, name = CONFIGS[fault]
    raw = json.loads((folder / "config.json").read_text())
    raw.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    refused(lambda: run(folder), CheckpointError, "mine", name)


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": "much"}, {"rope_theta": -5.0}, {"full_attention": {"rope_type": "yarn", "factor": 2.0}}],
    ids=repr,
)
def test_rope_parameters(rope: dict[str, Any], folder: Path) -> None:
    """Inside rope_parameters too: no bare ValueError, no NaN angles, no scaling per kind of layer left unread."""
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**raw, "rope_parameters": rope}))
    refused(lambda: wb.checkpoint(folder), CheckpointError, "mine", "rope")


def test_odd_head_dim(make_model: Callable[..., ModelConfig]) -> None:
    """RoPE turns pairs: refused from the configuration, not by a shape error in a lane."""

    def run_odd() -> None:
        model = make_model(ModelConfig("odd-head", 2, 32, 24, 4, 2, 7, 4, 2, 97, 512, dtype="fp32"))
        wb.run(scenario(model, ASKED), VSLPipe())

    refused(run_odd, CheckpointError, "head_dim")


# ------------------------------------------------------------------------------- requests, machine, memory, stages


@pytest.mark.parametrize("token", [97, 98, 2**32, 2**40, 2**63 - 1])
def test_token_that_the_model_does_not_know(token: int, tiny: ModelConfig) -> None:
    asked = (*ASKED, Request((1, token, 2), 3))
    refused(lambda: wb.run(scenario(tiny, asked), VSLPipe()), EngineError, "request 3", str(token))


@pytest.mark.parametrize("token", [1.0, "a", None, 1.5, -1, -97, 2**63], ids=repr)
def test_token_that_no_model_knows(token: Any) -> None:
    refused(lambda: Request((1, token, 2), 3), WorkloadError, "token ids", repr(token))


def test_numpy_tokens_are_tokens() -> None:
    assert Workload.of([Request(tuple(np.arange(3)), 2)]).prompt_len.tolist() == [3]


def test_another_machine(tiny: ModelConfig) -> None:
    for other in (wb.machines["a40"], machine().__class__("far", machine().gpu, machine().cpu, machine().link, "far")):
        refused(
            lambda m=other: wb.run(scenario(tiny, ASKED, on=m), VSLPipe()), EngineError, other.name, "Machine.local()"
        )


def test_lengths_only(tiny: ModelConfig) -> None:
    of = scenario(tiny, ASKED).on(workload=Workload.lengths(5, 4, 3))
    refused(lambda: wb.run(of, VSLPipe()), EngineError, "lengths", "from_jsonl")


def test_a_model_without_weights() -> None:
    model = wb.models["mixtral-8x7b"]
    of = scenario(model, ASKED, precision="bf16", on=machine(memory=1e12))
    refused(lambda: wb.run(of, VSLPipe()), EngineError, "mixtral-8x7b", "wb.checkpoint")


@pytest.mark.parametrize("what", ["weights", "kv"])
def test_a_precision_that_only_the_models_know(what: str, tiny: ModelConfig) -> None:
    here = machine()
    here = replace(here, gpu=replace(here.gpu, flops=(*here.gpu.flops, ("fp16", 1e11))))
    of = scenario(tiny, ASKED, on=here)
    of = of.on(memory=replace(of.memory, **{what: "fp16"}))
    refused(lambda: wb.run(of, VSLPipe()), EngineError, f"run keeps {what} in fp32 or bf16, not in fp16", "Memory")


@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe()], ids=str)
def test_gpu_memory_below_the_ledger(schedule: Any, tiny: ModelConfig) -> None:
    of = scenario(tiny, ASKED)
    less = of.on(machine=machine().limit(gpu_memory=fits(of, schedule).gpu.total - 1))
    refused(lambda: wb.run(less, schedule), CapacityError, "weight slots", "here", "token_budget")


def test_gpu_memory_of_just_the_ledger_is_enough(tiny: ModelConfig, started: list[str]) -> None:
    of = scenario(tiny, ASKED)
    just = of.on(machine=machine().limit(gpu_memory=fits(of, VSLPipe()).gpu.total))
    assert wb.run(just, VSLPipe()).tokens == wb.run(of, VSLPipe()).tokens
    started.clear()


def test_host_memory(tiny: ModelConfig) -> None:
    refused(lambda: wb.run(scenario(tiny, ASKED, tokens=10**8), VSLPipe()), CapacityError, "here", "kv_capacity")


def test_prompt_longer_than_the_cache(tiny: ModelConfig) -> None:
    refused(lambda: scenario(tiny, ASKED, tokens=21, block=1), CapacityError, "request 2", "22", "kv_capacity")
    scenario(tiny, ASKED, tokens=22, block=1)


def test_schedule_that_does_not_fit(tiny: ModelConfig) -> None:
    refused(
        lambda: wb.run(scenario(tiny, ASKED, RUNNABLE["all_gpu"]), VSLPipe()), ScheduleError, "VSLPipe", "Sequential"
    )


def test_deferred_experts(tiny: ModelConfig) -> None:
    deferring = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=3) >> load >> gpu(combine)
    refused(lambda: scenario(tiny, ASKED, deferring), ScenarioError, "none of the 2 experts", "at most 1")


def test_shared_experts_of_a_model_without_any(tiny: ModelConfig) -> None:
    shared = gpu(qkv, attention, out_proj, route) >> (gpu(shared_experts) | gpu(experts)) >> gpu(combine)
    refused(lambda: wb.run(scenario(tiny, ASKED, shared), Sequential()), EngineError, "shared_experts", "remove")


@pytest.mark.parametrize("output", [2.5, float("nan"), None], ids=repr)
def test_output_length_that_is_no_integer(output: Any) -> None:
    """Never rounded in silence."""
    with pytest.raises(WorkloadError, match="output"):
        Workload.of([Request((1, 2), output)])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 4}, "latent attention"),
        ({"shared_expert_intermediate_size": 8}, "shared experts"),
        ({"attention_bias": True}, "attention biases"),
    ],
    ids=str,
)
def test_a_model_that_only_looks_like_a_checkpoint(change: dict[str, int], what: str, tiny: ModelConfig) -> None:
    of = replace(scenario(tiny, ASKED), model=replace(tiny, sliding_window=8, **change))
    refused(lambda: wb.run(of, Sequential()), EngineError, what, "run cannot execute", "Qwen2MoeForCausalLM")


def test_weights_in_a_format_that_run_does_not_keep(tiny: ModelConfig) -> None:
    of = scenario(tiny, ASKED)
    of = replace(of, model=replace(tiny, expert_dtype="fp8"), memory=replace(of.memory, weights=None))
    refused(lambda: wb.run(of, Sequential()), EngineError, "experts", "fp8")


def test_an_engine_refuses_blocks_that_are_only_counted():
    with pytest.raises(EngineError, match="needs the tables of a BlockManager, not BlockCounts"):
        Engine.begin(object.__new__(Engine), BlockCounts(4, 4, 1, 4))
