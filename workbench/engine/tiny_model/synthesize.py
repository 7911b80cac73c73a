"""Seeded random checkpoints whose router and head decide clearly, so that faults show."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm.auto import tqdm

from workbench.core.catalogue import cache_path
from workbench.core.errors import CheckpointError
from workbench.engine.loading.checkpoint import STORED_DTYPES
from workbench.engine.loading.tensors import every_source
from workbench.models import ModelConfig
from workbench.models.family import LATENT

_HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_CONFIG_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)

_OF_DEEPSEEK = (
    *LATENT,
    "moe_intermediate_size",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
)

RECIPES = {
    "mix-s": ModelConfig("mix-s", 8, 512, 1024, 8, 2, 64, 8, 2, 8000, 4096),
    "mix-m": ModelConfig("mix-m", 4, 1024, 2048, 16, 4, 64, 8, 2, 8000, 4096),
    "mix-b": ModelConfig("mix-b", 16, 1024, 3584, 16, 4, 64, 8, 2, 32000, 4096),
    "mix-w": ModelConfig("mix-w", 8, 4096, 7168, 32, 8, 128, 8, 2, 32000, 4096),
    "qwen-s": ModelConfig(
        *("qwen-s", 8, 512, 1024, 8, 2, 64, 16, 4, 8000, 4096),
        moe_intermediate_size=512,
        shared_expert_intermediate_size=1024,
        norm_topk_prob=False,
        architecture="Qwen2MoeForCausalLM",
    ),
    "deepseek-s": ModelConfig(
        *("deepseek-s", 8, 512, 1024, 8, 8, 96, 16, 4, 8000, 4096),
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=128,
        q_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        architecture="DeepseekV3ForCausalLM",
    ),
    "odd-mixtral": ModelConfig("odd-mixtral", 12, 768, 1536, 12, 4, 64, 6, 2, 16000, 4096),
    "odd-deep": ModelConfig("odd-deep", 24, 320, 640, 10, 2, 32, 8, 2, 6000, 4096, dtype="fp32"),
    "odd-qwen2": ModelConfig(
        *("odd-qwen2", 10, 640, 1280, 10, 2, 64, 12, 4, 12000, 4096),
        moe_intermediate_size=384,
        shared_expert_intermediate_size=1280,
        norm_topk_prob=False,
        architecture="Qwen2MoeForCausalLM",
    ),
    "odd-qwen3": ModelConfig(
        *("odd-qwen3", 8, 512, 1024, 16, 4, 48, 32, 8, 9000, 4096),
        moe_intermediate_size=192,
        norm_topk_prob=True,
        architecture="Qwen3MoeForCausalLM",
        dtype="fp32",
    ),
}
"""Recipes of checkpoints: usual shapes, and some that are not: many thin layers, many small experts, shared experts,
single precision."""


def write_checkpoint(model: ModelConfig, folder: str | Path, *, seed: int = 0) -> Path:
    """Write a checkpoint in Hugging Face format, one file per layer, unless it is there already.

    Parameters
    ----------
    model : ModelConfig
        Sizes and precision of the model; its name and path are not used.
    folder : str or Path
    seed : int
        The same seed gives the same weights.

    Notes
    -----
    If it is killed, it leaves a folder without config.json, which no reader opens and the next call completes.
    Standard deviations: embedding 0.05; projections, experts and head 1/sqrt(fan in), the router four times that so
    that few top-2 choices are near ties, the head twice; biases 0.5. The small embedding makes position and attention
    matter.
    """
    if not (model.family.example or model.family.model_type in ("mixtral", "deepseek_v3")):
        raise CheckpointError(
            f"{model.name!r} is of {model.family.model_type}, which is not made here; use transformers."
        )
    folder = Path(folder)
    stamp = json.dumps({"seed": seed, **hf_config(model)}, sort_keys=True)
    done = folder / "complete.json"
    if done.is_file() and done.read_bytes() == stamp.encode():
        return folder
    if (folder / "config.json").exists() and not done.is_file():
        raise CheckpointError(f"{folder} holds another model; give an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    done.write_text("", encoding="utf-8")
    (folder / "config.json").unlink(missing_ok=True)  # a folder without it is no checkpoint; it is written last
    for stale in folder.glob("model-*.safetensors"):
        stale.unlink()
    generator = torch.Generator().manual_seed(seed)
    groups = _by_file(model)
    for file, names in tqdm(groups.items(), desc=f"make {model.name}", unit="file", delay=1, mininterval=1):
        save_file(
            {name: _draw(name, shape, model, generator) for name, shape in names}, folder / file, {"format": "pt"}
        )
    index = {"metadata": {}, "weight_map": {name: file for file, names in groups.items() for name, _ in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(hf_config(model), indent=1), encoding="utf-8")
    done.write_text(stamp, encoding="utf-8")
    return folder


def make_checkpoint(name: str, folder: str | Path | None = None, *, seed: int = 0) -> Path:
    """Make one of the recipes, in the user's cache unless a folder is given.

    They are "mix-s" (0.23 GB), "mix-m" (0.46 GB), "mix-b" (3.0 GB) and "mix-w" (12.5 GB, in layers of 1.5 GB) of
    Mixtral's architecture; "qwen-s" (0.25 GB) of Qwen2-MoE's, which has shared experts; "deepseek-s" (0.22 GB) of
    DeepSeek-V3's, which has latent attention too; and the four odd ones that `bench sim` draws from (0.3 to 0.6 GB
    each).

    Raises
    ------
    CheckpointError
        If there is no recipe of that name.
    """
    if name not in RECIPES:
        raise CheckpointError(f"there is no recipe {name!r} for a checkpoint; there are {', '.join(RECIPES)}.")
    return write_checkpoint(RECIPES[name], folder or cache_path(f"models/{name}-seed{seed}"), seed=seed)


def _by_file(model: ModelConfig) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    shapes = {source.name: source.shape for source in every_source(model)}
    for name, shape in sorted(shapes.items(), key=lambda named: _turn(named[0], model)):
        words = name.split(".")
        layer = int(words[2]) + 1 if words[1] == "layers" else 0
        groups.setdefault(f"model-{layer:05d}.safetensors", []).append((name, shape))
    return groups


def _turn(name: str, model: ModelConfig) -> tuple[int, ...]:
    """The place of a tensor in the order in which weights are drawn: the same seed gives the same weights."""
    names = model.family.tensors
    parts = (
        *(names.embedding, names.attention_norm, names.mixture_norm),
        *(f"{letter}_proj.{kind}" for kind in ("weight", "bias") for letter in "qkv"),
        *("q_norm", "k_norm", names.out, f".{names.router}.", ".experts.", ".shared_expert.", ".shared_expert_gate."),
        *(names.final_norm, "lm_head", "q_a_", "q_b_", "kv_a_", "kv_b_", ".shared_experts.", f".{names.mixture}."),
    )
    matrices = (names.gate, names.down, names.up)
    words = name.split(".")
    numbers = [int(word) for word in words if word.isdigit()]
    place = next(place for place, part in enumerate(parts) if part in name)
    matrix = next((place for place, part in enumerate(matrices) if part in words), 0)
    return numbers[0] if numbers else -1, place, numbers[-1] if numbers else 0, matrix


def _draw(name: str, shape: tuple[int, ...], model: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    if name.endswith(".bias"):
        weights = 0.5 * torch.randn(shape, generator=generator)
    elif len(shape) == 1:
        weights = 1.0 + 0.1 * torch.randn(shape, generator=generator)
    else:
        spread = 0.05 if "embed_tokens" in name else shape[1] ** -0.5
        spread *= 4.0 if ".gate." in name else 2.0 if "lm_head" in name else 1.0
        weights = spread * torch.randn(shape, generator=generator)
    return weights.to(STORED_DTYPES[model.dtype])


def hf_config(model: ModelConfig) -> dict[str, object]:
    """A model's config.json."""
    if model.kv_lora_rank:  # where ``head_dim`` would be that of the rotated keys
        keys = [key for key in (*_CONFIG_KEYS, *_OF_DEEPSEEK) if key != "head_dim"]
        shared = {"n_shared_experts": model.shared_expert_intermediate_size // model.expert_width}
    else:
        keys = [*_CONFIG_KEYS, *model.family.own_keys]
        shared = {}
    return {
        "architectures": [model.family.architecture],
        "model_type": model.family.model_type,
        "hidden_act": "silu",
        "sliding_window": None,
        "torch_dtype": _HF_DTYPES[model.dtype],
        "bos_token_id": None,
        "eos_token_id": None,
        **{key: getattr(model, key) for key in keys},
        **shared,
        model.family.keys.get("num_local_experts", "num_local_experts"): model.num_local_experts,
    }
