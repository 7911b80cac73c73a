"""The settings of a ``config.json`` with which the engine executes a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.models.config import ModelConfig
from workbench.models.families import RUNNABLE, runnable_family
from workbench.models.family import LATENT, Family
from workbench.models.formats import int4_layout, is_int4
from workbench.models.rope import KINDS, READ

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Our names of number formats by those of ``config.json``."""
_WITHOUT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size"), (0,)),
    **dict.fromkeys(("attention_bias", "lm_head_bias", "use_qk_norm"), (False,)),
    **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "decoder_sparse_step"), (1,)),
    **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "clip_qkv"), ()
    ),
    **dict.fromkeys(LATENT, ()),
    "mlp_only_layers": ([],),
}
"""Keys of options, and their values in a family that lacks them; an absent key does as well."""


def check_executable(raw: Mapping[str, Any], name: str) -> None:
    """Refuse a config with any setting that the engine does not execute."""
    family = runnable_family(raw)
    if family is None:
        found = short(raw.get("architectures") or [raw.get("model_type")])
        raise CheckpointError(
            f"checkpoint {name!r} has the architecture {found}; run supports "
            f"{', '.join(RUNNABLE)}. To predict only, give wb.model(folder)."
        )
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "dtype": tuple(DTYPES),
        "torch_dtype": tuple(DTYPES),
        "text_config": (),
        **_options(family),
        **family.only,
    }
    for key, values in supported.items():
        if raw.get(key) is not None and raw[key] not in values:
            raise CheckpointError(
                f"checkpoint {name!r} sets {key}={short(raw[key])}, which is unsupported; use a model without."
            )
    for key in family.never_null:
        if key in raw and raw[key] is None:
            raise CheckpointError(f"checkpoint {name!r} sets {key}=None, which is unsupported; use a model without.")
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and "chunked_attention" in kinds:
        raise CheckpointError(
            f"checkpoint {name!r} has chunked_attention in layer_types, which is unsupported; use a model without."
        )
    _check_rope(raw, name)
    _check_quantised(raw, family, name)


def _check_quantised(raw: Mapping[str, Any], family: Family, name: str) -> None:
    """Refuse quantised weights other than FP8 in blocks of 128 x 128, MXFP4, and INT4 of GPTQ and AWQ."""
    found = raw.get("quantization_config")
    if found is None:
        return
    if is_int4(found):
        int4_layout(found, name)
        if family.tensors.gate_up:
            raise CheckpointError(
                f"checkpoint {name!r} in {found['quant_method'].upper()} has all experts of a layer in one tensor, and "
                "run reads those of which each has its own; use a model that is not quantised so."
            )
        return
    told = found if isinstance(found, Mapping) else {}
    fp8 = told.get("quant_method") == "fp8" and told.get("weight_block_size") == [128, 128]
    if not fp8 and told.get("quant_method") != "mxfp4":
        raise CheckpointError(
            f"checkpoint {name!r} sets quantization_config={short(found)}, which is unsupported; use one in FP8 with "
            "weight_block_size [128, 128], in MXFP4, in INT4 by GPTQ or AWQ, or not quantised."
        )


def _options(family: Family) -> dict[str, tuple[Any, ...]]:
    """Values of the keys of options that the layers of a family do not have."""
    return {key: values for key, values in _WITHOUT.items() if key not in family.options}


def _check_rope(raw: Mapping[str, Any], name: str) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"checkpoint {name!r} sets {key}={short(rope)}; it must be an object. Correct it.")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in tuple(KINDS) or set(rope) - READ:
            raise CheckpointError(
                f"checkpoint {name!r} sets rope_type={short(kind)} in {key}={short(rope)}, which is unsupported; "
                f"use a model with RoPE of the kinds {', '.join(KINDS)}, and the keys {', '.join(sorted(READ))}."
            )


def check_sizes(model: ModelConfig) -> None:
    """Refuse groups that do not part the experts evenly, or of which too few are kept, and halves of rotated pairs."""
    if model.rotated_dims < 2 or model.rotated_dims % 2:
        raise CheckpointError(
            f"config.json of {model.name!r} rotates {model.rotated_dims} of {model.head_dim} dims; RoPE turns pairs, "
            "correct partial_rotary_factor."
        )
    count = model.num_local_experts
    kept = model.topk_group * (count // model.n_group)
    if count % model.n_group or model.topk_group > model.n_group or kept < model.num_experts_per_tok:
        raise CheckpointError(
            f"config.json of {model.name!r} chooses {model.num_experts_per_tok} experts from {model.topk_group} of "
            f"{model.n_group} groups of its {count} experts; correct n_group and topk_group."
        )
