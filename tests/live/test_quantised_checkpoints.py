"""Checkpoints in FP8 and MXFP4, written here, run as transformers reads them.

It reads MXFP4 with `dequantize=True`. For FP8 it would need accelerate, so that it is given the numbers themselves.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.live.world import OF_SYSTEMS, RUNNABLE, WIRED, requests, scenario
from workbench.core.errors import CheckpointError, EngineError
from workbench.models import ModelConfig
from workbench.schedules import Schedule, Sequential

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


READ = {"deepseek_v3, fp8": of_fp8, "gpt_oss, mxfp4": of_mxfp4, "gpt_oss, mxfp4 of blocks": of_mxfp4}


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


@pytest.fixture(scope="module")
def held(quantised: Any) -> ModelConfig:
    """A model whose experts stay in MXFP4."""
    return wb.checkpoint(quantised("gpt_oss, mxfp4 of blocks"))


def as_stored(model: ModelConfig, pipeline: str) -> wb.Scenario:
    """The scenario of weights as they are stored."""
    of = scenario(model, ASKED, WIRED[pipeline], precision="fp32")
    return of.on(memory=replace(of.memory, weights=None))


def test_experts_in_mxfp4_are_held_so_and_compute_what_transformers_reads(held: ModelConfig, tmp_path: Path) -> None:
    """Activations are rounded to bytes, so that a token may be another one that is about as good."""
    pytest.importorskip("transformers")
    found = wb.run(as_stored(held, "all_cpu"), Sequential())
    theirs = of_mxfp4(held.path or tmp_path, tmp_path)
    for request, made in zip(ASKED, found.tokens, strict=True):
        with torch.no_grad():
            scores = theirs(torch.tensor([(*request.prompt, *made)])).logits[0, len(request.prompt) - 1 : -1]
        short = scores.amax(dim=-1) - scores.gather(1, torch.tensor(made)[:, None])[:, 0]
        assert (short / scores.std(dim=-1) < 0.2).all()
    assert len(set(sum(found.tokens, ()))) > 5


@pytest.mark.parametrize(("pipeline", "schedule"), [*OF_SYSTEMS, ("experts_on_cpu", Sequential())])
def test_tokens_are_the_same_wherever_experts_in_mxfp4_are(
    held: ModelConfig, pipeline: str, schedule: Schedule
) -> None:
    """The engine compares its memory with the ledger's to the byte at each start."""
    assert wb.run(as_stored(held, pipeline), schedule).tokens == wb.run(as_stored(held, "all_cpu"), Sequential()).tokens


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
        ({"quant_method": "gptq"}, "'gptq'}, which is unsupported; use one in FP8"),
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


def test_an_llm_converts_by_itself(quantised: Any) -> None:
    model = wb.checkpoint(quantised("gpt_oss, mxfp4"))
    (made,) = wb.LLM(model).generate([ASKED[1].prompt], max_tokens=4)
    (told,) = wb.LLM(model, weights="bf16").generate([ASKED[1].prompt], max_tokens=4)
    assert made.tokens == told.tokens
    assert len(made.tokens) == 4
