"""Checkpoints in FP8, MXFP4, and INT4 by GPTQ and AWQ, written here, run as transformers reads them.

It reads MXFP4 with `dequantize=True`. For FP8 it would need accelerate, and for INT4 other libraries, so that it is
given the numbers themselves.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from kernels_cpu.experts.weights import unpacked
from tests.live.made import INT4
from tests.live.world import OF_SYSTEMS, RUNNABLE, WIRED, requests, scenario
from workbench.core.errors import CheckpointError, EngineError
from workbench.engine.loading.stored import packed_of
from workbench.engine.model.weights import WeightStore
from workbench.models import ModelConfig
from workbench.pipeline.stack_graph import stack_graph
from workbench.schedules import Schedule, Sequential
from workbench.serving import fits
from workbench.stages import experts

ASKED = requests((1, 19, 7), 8, vocab=211, seed=7)


def of_fp8(folder: Path, plain: Path) -> Any:
    """The model that transformers reads of the numbers in an FP8 checkpoint."""
    from transformers import AutoModelForCausalLM

    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if name.endswith("_scale_inv")]:
        factors = held.pop(name)
        weight = held[name.removesuffix("_scale_inv")].float()
        for row, column in itertools.product(*map(range, factors.shape)):
            weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128] *= factors[row, column]
        held[name.removesuffix("_scale_inv")] = weight
    save_file(held, plain / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({key: raw[key] for key in raw if key != "quantization_config"}))
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")


def of_mxfp4(folder: Path, plain: Path) -> Any:
    """The model that transformers reads of an MXFP4 checkpoint."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, experts_implementation="eager"
    ).float()


def of_int4(folder: Path, plain: Path) -> Any:
    """The model that transformers reads of the numbers in a checkpoint in INT4, each worked out by itself."""
    from transformers import AutoModelForCausalLM

    raw = json.loads((folder / "config.json").read_text())
    told = raw.pop("quantization_config")
    held = {}
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        stem, _, what = name.rpartition(".")
        if what == "qweight":
            parts = {each: tensors[f"{stem}.{each}"].numpy() for each in ("qweight", "qzeros", "scales")}
            held[f"{stem}.weight"] = torch.from_numpy(numbers_of(told, **parts))
        elif what not in ("qzeros", "scales", "g_idx"):
            held[name] = tensor.float()
    save_file(held, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(raw))
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")


def numbers_of(told: dict[str, Any], qweight: Any, qzeros: Any, scales: Any) -> Any:
    """The matrix (outputs, inputs) of three tensors."""
    groups, outputs = scales.shape
    row, column = np.indices((groups * told["group_size"], outputs))
    own = row // told["group_size"]
    along = column % 8
    if told["quant_method"] == "awq":
        along = np.array([0, 4, 1, 5, 2, 6, 3, 7])[along]
        codes = qweight[row, column // 8] >> 4 * along & 15
    else:
        codes = qweight[row // 8, column] >> 4 * (row % 8) & 15
    words = (qzeros.astype(np.int64) + (0x11111111 if told.get("checkpoint_format") == "gptq" else 0)) & 0xFFFFFFFF
    zeros = words[own, column // 8] >> 4 * along & 15
    return np.ascontiguousarray(((codes - zeros) * scales[own, column].astype(np.float32)).T)


READ = {
    "deepseek_v3, fp8": of_fp8,
    "gpt_oss, mxfp4": of_mxfp4,
    "gpt_oss, mxfp4 of blocks": of_mxfp4,
    **dict.fromkeys(INT4, of_int4),
}
STAY = ("gpt_oss, mxfp4 of blocks", *INT4)
"""Checkpoints whose experts stay as they are."""


def ran(model: ModelConfig) -> wb.Result:
    return wb.run(scenario(model, ASKED, RUNNABLE["all_gpu"], precision="fp32"), Sequential())


@pytest.mark.parametrize("name", READ)
def test_tokens_are_those_of_the_numbers_that_transformers_reads(name: str, quantised: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = quantised(name)
    theirs = READ[name](path, tmp_path)
    model = wb.checkpoint(path)
    assert (model.expert_dtype or "none") in name
    tokens = ran(model).tokens
    assert len(set(sum(tokens, ()))) > 5
    for request, made in zip(ASKED, tokens, strict=True):
        with torch.no_grad():
            scores = theirs(torch.tensor([(*request.prompt, *made)])).logits[0, len(request.prompt) - 1 : -1]
        assert scores.argmax(dim=-1).tolist() == list(made)


def test_without_a_precision_the_error_tells_which_to_give(quantised: Any) -> None:
    of = scenario(wb.checkpoint(quantised("gpt_oss, mxfp4")), ASKED, RUNNABLE["all_gpu"], precision="bf16")
    with pytest.raises(EngineError, match=r"multiples of 64, and those of .* are 64 x 32; give Memory\(weights="):
        wb.run(of.on(memory=wb.Memory(kv_capacity="1MB")), Sequential())


@pytest.fixture(scope="module", params=STAY)
def held(request: Any, quantised: Any) -> ModelConfig:
    """A model whose experts stay as they are stored."""
    return wb.checkpoint(quantised(request.param))


def as_stored(model: ModelConfig, pipeline: str) -> wb.Scenario:
    """The scenario of weights as they are stored."""
    of = scenario(model, ASKED, WIRED[pipeline], precision="fp32")
    return of.on(memory=replace(of.memory, weights=None))


@pytest.mark.parametrize("name", STAY)
def test_experts_are_held_as_stored_and_compute_what_transformers_reads(
    name: str, quantised: Any, tmp_path: Path
) -> None:
    """Activations are rounded to bytes, so that a token may be another one that is about as good."""
    pytest.importorskip("transformers")
    path = quantised(name)
    found = wb.run(as_stored(wb.checkpoint(path), "all_cpu"), Sequential())
    theirs = READ[name](path, tmp_path)
    for request, made in zip(ASKED, found.tokens, strict=True):
        with torch.no_grad():
            scores = theirs(torch.tensor([(*request.prompt, *made)])).logits[0, len(request.prompt) - 1 : -1]
        short = scores.amax(dim=-1) - scores.gather(1, torch.tensor(made)[:, None])[:, 0]
        assert (short / scores.std(dim=-1) < 0.2).all()
    assert len(set(sum(found.tokens, ()))) > 5


def in_bytes(x: torch.Tensor, group: int) -> torch.Tensor:
    """Numbers as multiples of each group's largest magnitude over 127."""
    grouped = x.unflatten(-1, (-1, group))
    scales = grouped.abs().amax(-1, keepdim=True) / 127
    return ((grouped / torch.where(scales > 0, scales, 1.0)).round() * scales).flatten(-2)


def test_tokens_are_transformers_where_it_rounds_activations_as_the_kernel(
    quantised: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the token: all else is in fp32 on both sides."""
    pytest.importorskip("transformers")
    name = "qwen3_moe, gptq int4_g32"

    def forward(self: Any, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(h)
        for t, row in enumerate(h):
            for expert, weight in zip(ids[t], weights[t], strict=True):
                gate, up = (self.gate_up_proj[expert] @ in_bytes(row, 32)).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                out[t] += weight * (self.down_proj[expert] @ in_bytes(inner, 32))
        return out

    found = wb.run(as_stored(wb.checkpoint(quantised(name)), "all_cpu"), Sequential())
    theirs = of_int4(quantised(name), tmp_path)
    monkeypatch.setattr(type(theirs.model.layers[0].mlp.experts), "forward", forward)
    for request, made in zip(ASKED, found.tokens, strict=True):
        with torch.no_grad():
            scores = theirs(torch.tensor([(*request.prompt, *made)])).logits[0, len(request.prompt) - 1 : -1]
        assert scores.argmax(dim=-1).tolist() == list(made)


@pytest.mark.parametrize(("pipeline", "schedule"), [*OF_SYSTEMS, ("experts_on_cpu", Sequential())])
def test_tokens_are_the_same_wherever_experts_are_that_stay_as_stored(
    held: ModelConfig, pipeline: str, schedule: Schedule
) -> None:
    """The engine compares its memory with the ledger's to the byte at each start."""
    assert wb.run(as_stored(held, pipeline), schedule).tokens == wb.run(as_stored(held, "all_cpu"), Sequential()).tokens


@pytest.mark.parametrize("name", INT4)
def test_experts_in_int4_take_their_bits_and_a_scale_per_group(name: str, quantised: Any) -> None:
    model = wb.checkpoint(quantised(name))
    group = int(name.rpartition("_g")[2])
    of = as_stored(model, "all_cpu")
    store = WeightStore(model, of.precision, stack_graph(of.stack, model))
    size = sum(each.tensor.nbytes for each in store.sources(1, experts))
    assert size == model.num_local_experts * model.expert_params * (4 + 32 / group) / 8
    wanted = fits(of, Sequential()).host["weights"]
    ops = {stage.op for stage in of.stages if stage.op.has_weights}
    pairs = [(layer, op) for op in ops for layer, kind in enumerate(model.layer_kinds) if op.is_in(model, kind)]
    assert wanted == sum(each.tensor.nbytes for layer, op in pairs for each in store.sources(layer, op))


@pytest.mark.parametrize("name", INT4)
def test_experts_in_int4_keep_every_number(name: str, quantised: Any) -> None:
    path = quantised(name)
    model = wb.checkpoint(path)
    told = json.loads((path / "config.json").read_text())["quantization_config"]
    tensors = load_file(path / "model.safetensors")
    names = model.family.tensors
    for expert, (gate_up, down) in enumerate(zip(*packed_in(model), strict=True)):
        found = dict(zip((names.gate, names.up), np.split(gate_up, 2), strict=True)) | {names.down: down}
        for which, own in found.items():
            stem = f"{names.layers}.1.{names.expert(expert)}.{which}"
            parts = {what: tensors[f"{stem}.{what}"].numpy() for what in ("qweight", "qzeros", "scales")}
            np.testing.assert_array_equal(own, numbers_of(told, **parts))


def packed_in(model: ModelConfig) -> list[Any]:
    """The numbers of the experts of a layer, as they are held: gates and ups, and downs."""
    of = as_stored(model, "all_cpu")
    found = packed_of(WeightStore(model, of.precision, stack_graph(of.stack, model)).resident(1, experts))
    return [unpacked(matrices, range(len(found))) for matrices in (found.gate_up, found.down)]


@pytest.mark.parametrize(
    "settings", [{"checkpoint_format": "gptq_v2"}, {"checkpoint_format": None, "format": "GPTQ_v2"}]
)
def test_zero_points_of_gptq_v2_are_stored_as_they_are(settings: Any, quantised: Any, tmp_path: Path) -> None:
    """As libraries turn one format into the other: by a sum of whole words."""
    path = quantised("qwen2_moe, gptq uint4_g32")
    model = changed(path, tmp_path, "qzeros", lambda words: words + 0x11111111, **settings)
    for own, wanted in zip(packed_in(model), packed_in(wb.checkpoint(path)), strict=True):
        np.testing.assert_array_equal(own, wanted)


@pytest.mark.parametrize("stored", [7, 8])
def test_the_zero_point_of_symmetric_gptq_is_eight_whatever_the_format_is_called(
    stored: int, quantised: Any, tmp_path: Path
) -> None:
    """Some libraries store it as 8 and call that format gptq, in which 7 means 8."""
    model = changed(quantised("qwen3_moe, gptq int4_g32"), tmp_path, "qzeros", lambda one: one.fill_(all_of(stored)))
    of = as_stored(model, "all_cpu")
    wanted = wb.run(as_stored(wb.checkpoint(quantised("qwen3_moe, gptq int4_g32")), "all_cpu"), Sequential())
    assert wb.run(of, Sequential()).tokens == wanted.tokens


def all_of(number: int) -> int:
    """The word of 32 bits, with a sign, of eight times a number of 4 bits."""
    word = 0x11111111 * number
    return word - (1 << 32) if number > 7 else word


def changed(path: Path, folder: Path, what: str, change: Any, **settings: Any) -> ModelConfig:
    """A checkpoint with other tensors of a kind, and other settings of its quantisation."""
    held = load_file(path / "model.safetensors")
    for name in [name for name in held if name.endswith(f".{what}")]:
        held[name] = change(held[name]).contiguous()
    save_file(held, folder / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(raw))
    return wb.checkpoint(folder)


FAULTS: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "groups out of order": ("g_idx", lambda one: one.flip(0), {}, "inputs into groups out of order .desc_act=True"),
    "another zero point": ("qzeros", lambda one: one + 1, {}, "has zero points other than 8, .* correct it to False"),
    "zero points of the other format": (
        "qzeros",
        lambda one: one,
        {"checkpoint_format": "gptq_v2", "sym": False},
        r"is not in the checkpoint_format gptq_v2: its codes are \+1\.\d+ from .* correct checkpoint_format to gptq",
    ),
    "half the scales": ("scales", lambda one: one[:1], {}, r"is \(1, \d+\) torch.float16, its config.json asks for"),
    "scales that are whole": ("scales", lambda one: one.int(), {}, "torch.int32, its config.json asks for"),
    "larger groups": (
        "scales",
        lambda one: one,
        {"group_size": 128},
        "128 inputs in a group, and .* use another model",
    ),
    "endless scales": ("scales", lambda one: one * torch.inf, {}, r"cannot be read: .*_scales\[0\] must be finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_checkpoint_in_int4_are_named(fault: str, quantised: Any, tmp_path: Path) -> None:
    what, change, settings, words = FAULTS[fault]
    model = changed(quantised("qwen3_moe, gptq int4_g32"), tmp_path, what, change, **settings)
    with pytest.raises(CheckpointError, match=words):
        wb.run(as_stored(model, "all_cpu"), Sequential())


def test_an_expert_that_is_not_in_int4_is_named(quantised: Any, tmp_path: Path) -> None:
    path = quantised("mixtral, awq uint4_g64")
    of_int4(path, tmp_path)
    numbers = load_file(tmp_path / "model.safetensors")
    held = load_file(path / "model.safetensors")
    stem = "model.layers.1.block_sparse_moe.experts.3.w2"
    for what in ("qweight", "qzeros", "scales"):
        del held[f"{stem}.{what}"]
    held[f"{stem}.weight"] = numbers[f"{stem}.weight"].half()
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    model = wb.checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=f"tensor {stem}.weight of .* is not in INT4, .*; give Memory"):
        wb.run(as_stored(model, "all_cpu"), Sequential())
    assert ran(model).tokens == ran(wb.checkpoint(path)).tokens


UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "two formats": (
        {"format": "gptq_v2"},
        "sets checkpoint_format='gptq' and 'gptq_v2' in its quantization_config, and run reads gptq or gptq_v2; use",
    ),
    "a format by its other name": ({"checkpoint_format": None, "format": "marlin"}, "sets checkpoint_format='marlin'"),
    "a list": ({"bits": [4]}, r"sets bits=\[4\] in its quantization_config, and run reads 4; use one quantised so"),
    "other words": ({"pack_dtype": "int64"}, "sets pack_dtype='int64' .*, and run reads int32; use one quantised so"),
    "one expert left": (
        {"dynamic": {"-:.*experts.1..*": {}}},
        r"leaves .*experts\.1\.gate_proj as it was",
    ),
    "another rule": ({"dynamic": {"lm_head": {"bits": 8}}}, "is not understood .*; use one quantised so, or the model"),
}


@pytest.mark.parametrize("what", UNREAD)
def test_settings_of_int4_that_run_does_not_read_are_named(what: str, quantised: Any, tmp_path: Path) -> None:
    settings, words = UNREAD[what]
    with pytest.raises(CheckpointError, match=words):
        changed(quantised("qwen3_moe, gptq int4_g32"), tmp_path, "scales", lambda one: one, **settings)


def test_settings_that_are_null_are_those_that_are_left_out(quantised: Any, tmp_path: Path) -> None:
    nothing = {"sym": None, "desc_act": None, "checkpoint_format": None}
    model = changed(quantised("qwen3_moe, gptq int4_g32"), tmp_path, "scales", lambda one: one, **nothing)
    assert model.expert_dtype == "int4_g32"


def test_experts_that_were_left_as_they_were_are_not_in_int4(quantised: Any, tmp_path: Path) -> None:
    left = {"dynamic": {"-:.*experts.*": {}}}
    model = changed(quantised("qwen3_moe, gptq int4_g32"), tmp_path, "scales", lambda one: one, **left)
    assert model.expert_dtype is None


def test_a_model_of_another_format_than_its_files_is_refused(quantised: Any) -> None:
    model = replace(wb.checkpoint(quantised("qwen2_moe, gptq uint4_g32")), expert_dtype="int4_g32")
    with pytest.raises(CheckpointError, match=r"has experts in int4_g32, the config.json in .* says uint4_g32"):
        wb.run(as_stored(model, "all_cpu"), Sequential())


def test_no_loss_is_told_of_int4_that_is_not_rounded(quantised: Any) -> None:
    model = wb.checkpoint(quantised("mixtral, awq uint4_g64"))
    for stored, told in (("int4_g64", False), ("int4_g128", True)):
        of = scenario(replace(model, expert_dtype=stored), ASKED, RUNNABLE["all_gpu"], precision="fp32")
        of = of.on(memory=replace(of.memory, weights="int4"))
        assert of.precision.group == 64
        assert ("rounding" in wb.simulate(of, Sequential()).facts) == told


def test_a_scale_of_another_shape_is_refused(quantised: Any, tmp_path: Path) -> None:
    path = quantised("gpt_oss, mxfp4")
    held = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    held[name] = held[name][:, :-1].contiguous()
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"tensor {name} of .* the two do not belong together"):
        ran(wb.checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'}, which is unsupported; use one in FP8"),
        (
            {"quant_method": "gptq", "group_size": 64},
            "in GPTQ sets bits=None in its quantization_config, and run reads 4; use one",
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, "in GPTQ sets bits=8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
            "sets group_size=-1 in .*, and run reads 128 or 64 or 32",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
            "desc_act=True in .*, and run reads False",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "checkpoint_format='marlin' in .*, and run reads gptq or gptq_v2",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "in AWQ sets version='gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "in AWQ sets zero_point=False"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "which is unsupported; use one in FP8"),
        ({"quant_method": "fp8"}, "which is unsupported; use one in FP8"),
    ],
)
def test_other_quantised_checkpoints_are_refused(
    change: dict[str, Any], words: str, quantised: Any, tmp_path: Path
) -> None:
    path = quantised("deepseek_v3, fp8")
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": change}))
    with pytest.raises(CheckpointError, match=words):
        wb.checkpoint(tmp_path)


def test_experts_in_one_tensor_are_refused_in_int4(quantised: Any, tmp_path: Path) -> None:
    path = quantised("gpt_oss, mxfp4")
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    told = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": told}))
    with pytest.raises(CheckpointError, match=r"in GPTQ has all experts of a layer in one tensor, .*; use a model"):
        wb.checkpoint(tmp_path)


@pytest.mark.parametrize("name", INT4)
def test_an_llm_leaves_experts_in_int4_as_they_are(name: str, quantised: Any) -> None:
    llm = wb.LLM(wb.checkpoint(quantised(name)))
    workload = wb.Workload.of([ASKED[1]])
    found = wb.run(llm.scenario(workload), Sequential())
    form = name.rpartition(" ")[2].rpartition("_g")[0]
    assert f"{form} (experts) and {'bf16' if 'awq' in name else 'fp32'}" in found.facts["weights"]


def test_an_llm_converts_by_itself(quantised: Any) -> None:
    model = wb.checkpoint(quantised("gpt_oss, mxfp4"))
    (made,) = wb.LLM(model).generate([ASKED[1].prompt], max_tokens=4)
    (told,) = wb.LLM(model, weights="bf16").generate([ASKED[1].prompt], max_tokens=4)
    assert made.tokens == told.tokens
    assert len(made.tokens) == 4
