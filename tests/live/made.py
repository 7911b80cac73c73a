"""Checkpoints that transformers itself writes: two odd random configurations of every family."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
SQUARE: dict[str, Any] = BASE | {"hidden_size": 36, "head_dim": 6}
"""Heads as wide together as the model, for families without a head_dim of their own."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 1e4,
}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
LONG = {  # longer contexts than the original ones get the short factors too in transformers 5.23
    "rope_type": "longrope",
    "factor": 8.0,
    "original_max_position_embeddings": 120,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 9.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "rope_theta": 1e4,
}
_DBRX: dict[str, Any] = {"vocab_size": 211, "n_layers": 3, "max_seq_len": 160}
_GLM: dict[str, Any] = BASE | {"num_hidden_layers": 4, "intermediate_size": 52, "moe_intermediate_size": 20}
_DEEPSEEK: dict[str, Any] = {key: value for key, value in _GLM.items() if key != "head_dim"} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", BASE | {"intermediate_size": 44, "num_local_experts": 5, "sliding_window": 9}),
    "mixtral, packed": (
        "mixtral",
        BASE | {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 7, "rope_parameters": LINEAR},
    ),
    "olmoe": ("olmoe", SQUARE | {"intermediate_size": 20, "num_experts": 9, "rope_parameters": LLAMA3}),
    "olmoe, tied": (
        "olmoe",
        SQUARE
        | {"intermediate_size": 28, "num_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True}
        | {"norm_topk_prob": True},
    ),
    "qwen2_moe, dense and windowed": (
        "qwen2_moe",
        SQUARE
        | {"num_hidden_layers": 5, "intermediate_size": 44, "moe_intermediate_size": 20, "num_experts": 7}
        | {"shared_expert_intermediate_size": 28, "decoder_sparse_step": 2, "use_sliding_window": True}
        | {"sliding_window": 11, "max_window_layers": 4},
    ),
    "qwen2_moe, packed": (
        "qwen2_moe",
        SQUARE
        | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 44, "moe_intermediate_size": 64}
        | {"num_experts": 6, "shared_expert_intermediate_size": 28, "rope_parameters": YARN},
    ),
    "qwen3_moe, dense": (
        "qwen3_moe",
        BASE
        | {"num_hidden_layers": 4, "intermediate_size": 44, "moe_intermediate_size": 20, "num_experts": 9}
        | {"mlp_only_layers": [0, 2], "norm_topk_prob": True},
    ),
    "qwen3_moe, windowed": (
        "qwen3_moe",
        BASE
        | {"intermediate_size": 44, "moe_intermediate_size": 28, "num_experts": 8, "num_experts_per_tok": 3}
        | {"use_sliding_window": True, "sliding_window": 7, "rope_parameters": YARN},
    ),
    "granitemoe": (
        "granitemoe",
        SQUARE
        | {"intermediate_size": 20, "num_local_experts": 7, "num_experts_per_tok": 3, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.5, "attention_bias": True},
    ),
    "granitemoe, packed": (
        "granitemoe",
        SQUARE
        | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "num_local_experts": 6}
        | {"attention_multiplier": 0.25, "tie_word_embeddings": True},
    ),
    "dbrx": (
        "dbrx",
        _DBRX
        | {"d_model": 36, "n_heads": 6, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 7, "moe_top_k": 3}},
    ),
    "dbrx, packed": (
        "dbrx",
        _DBRX
        | {"d_model": 64, "n_heads": 4, "attn_config": {"kv_n_heads": 4, "clip_qkv": 1.5, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 5, "moe_top_k": 2}},
    ),
    "gpt_oss": (
        "gpt_oss",
        BASE | {"intermediate_size": 28, "num_local_experts": 7, "sliding_window": 8, "rope_parameters": YARN},
    ),
    "gpt_oss, wide": (
        "gpt_oss",
        BASE
        | {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 3}
        | {"sliding_window": 5, "num_hidden_layers": 4, "rope_parameters": YARN | {"truncate": False}},
    ),
    "glm4_moe": (
        "glm4_moe",
        _GLM
        | {"n_routed_experts": 9, "n_group": 3, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.7},
    ),
    "glm4_moe, packed": (
        "glm4_moe",
        _GLM
        | {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 6, "n_shared_experts": 2}
        | {"first_k_dense_replace": 2, "norm_topk_prob": False, "rope_parameters": LINEAR},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        _GLM | {"moe_num_experts": 9, "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    "ernie4_5_moe, every other": (
        "ernie4_5_moe",
        _GLM
        | {"hidden_size": 64, "moe_intermediate_size": 64, "moe_num_experts": 5, "moe_k": 2}
        | {"moe_num_shared_experts": 1, "moe_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "phimoe": (
        "phimoe",
        SQUARE
        | {"intermediate_size": 20, "num_local_experts": 7, "attention_bias": True, "lm_head_bias": True}
        | {"rope_parameters": LONG},
    ),
    "phimoe, packed": (
        "phimoe",
        SQUARE
        | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "num_local_experts": 5}
        | {"sliding_window": 11},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _DEEPSEEK
        | {"n_routed_experts": 9, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"}
        | {"n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 18, "routed_scaling_factor": 1.3}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "deepseek_v2, packed": (
        "deepseek_v2",
        _DEEPSEEK
        | {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 6, "n_shared_experts": 1}
        | {"first_k_dense_replace": 2, "q_lora_rank": None},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _DEEPSEEK
        | {"n_routed_experts": 9, "n_group": 3, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"q_lora_rank": 18, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3, packed": (
        "deepseek_v3",
        _DEEPSEEK
        | {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
        | {"n_shared_experts": 1, "first_k_dense_replace": 2, "q_lora_rank": None, "v_head_dim": 16},
    ),
    "deepseek_v3, fp8": (
        "deepseek_v3",
        _DEEPSEEK
        | {"hidden_size": 256, "num_attention_heads": 4, "moe_intermediate_size": 128, "intermediate_size": 128}
        | {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    ),
    "gpt_oss, mxfp4": (
        "gpt_oss",
        BASE
        | {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 5, "sliding_window": 8}
        | {"rope_parameters": YARN},
    ),
    "gpt_oss, mxfp4 of blocks": (
        "gpt_oss",
        BASE
        | {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 5, "num_experts_per_tok": 3}
        | {"sliding_window": 8, "rope_parameters": YARN},
    ),
    "qwen3_moe, gptq int4_g32": (
        "qwen3_moe",
        BASE
        | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 6}
        | {"norm_topk_prob": True},
    ),
    "qwen2_moe, gptq uint4_g32": (
        "qwen2_moe",
        SQUARE
        | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 96}
        | {
            "moe_intermediate_size": 64,
            "num_experts": 5,
            "shared_expert_intermediate_size": 96,
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral, awq uint4_g64": (
        "mixtral",
        BASE
        | {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 64}
        | {"num_local_experts": 5},
    ),
}
"""By name: the type of the model, and its configuration."""


SEEDS = {
    "qwen2_moe, dense and windowed": 1,
    "granitemoe": 8,
    "gpt_oss": 2,
    "gpt_oss, wide": 8,
    "glm4_moe": 3,
    "phimoe": 1,
    "phimoe, packed": 1,
    "gpt_oss, mxfp4": 4,
    "gpt_oss, mxfp4 of blocks": 11,
    "qwen2_moe, gptq uint4_g32": 1,
}
"""Other seeds where the first gives few different tokens, or logits too close to tell rounding from a fault."""


def write(name: str, folder: Path, *, seed: int | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model of random weights that decide clearly; the scores of its router are further apart than others.

    The seed is that of `SEEDS` or 0, if none is given.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, given = CONFIGS[name]
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    generator = torch.Generator().manual_seed(SEEDS.get(name, 0) if seed is None else seed)
    held = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    with torch.no_grad():
        for key, tensor in sorted(held.items()):
            if "inv_freq" not in key:
                tensor.copy_(_spread(key, tensor) * torch.randn(tensor.shape, generator=generator))
                tensor += 1.0 if _is_gain(key, tensor) else 0.0
    made.to(dtype).save_pretrained(folder)
    return folder


def _spread(key: str, tensor: torch.Tensor) -> float:
    """Standard deviation of a tensor's numbers."""
    if _is_gain(key, tensor):
        return 0.1
    if "embed" in key or "wte" in key:
        return 0.05
    if tensor.ndim == 1 or "bias" in key:
        return 0.1 if "correction" in key else 0.5
    factor = 4.0 if "gate.weight" in key or "router" in key else 2.0 if "lm_head" in key else 1.0
    return factor * float(tensor.shape[-1]) ** -0.5


def _is_gain(key: str, tensor: torch.Tensor) -> bool:
    """True for the weight of a norm."""
    return tensor.ndim == 1 and "norm" in key and key.endswith("weight")


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def _rewritten(folder: Path, tensors: dict[str, torch.Tensor], quantised: dict[str, Any]) -> Path:
    """The checkpoint with other tensors."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantised}))
    return folder


def _in_fp8(folder: Path) -> Path:
    """Projections of attention and experts in FP8, with factors that differ from block to block."""
    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        held[name] = tensor
        if tensor.ndim == 2 and "proj" in name:
            rows, columns = (-(-size // 128) for size in tensor.shape)
            factors = 0.01 * (1 + torch.arange(rows * columns, dtype=torch.float32)).view(rows, columns)
            grid = factors.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
            held[name] = (tensor.float() / grid).clamp(-448, 448).to(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"] = factors
    return _rewritten(folder, held, _FP8)


def _in_mxfp4(folder: Path) -> Path:
    """The matrices of all experts in MXFP4: random codes, exponents that keep them about as large as they were."""
    generator = torch.Generator().manual_seed(0)
    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            held[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        held[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
    return _rewritten(folder, held, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _words(numbers: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Numbers of 4 bits, eight in a row along a dimension in a word, the first of an order in its lowest bits."""
    eights = numbers.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    words = sum(eights[..., one] << 4 * place for place, one in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32).movedim(-1, dim)


def _in_groups(matrix: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (outputs, inputs), scales and zero points (outputs, groups) of a matrix; all 16 codes are there.

    Where it is not symmetric, the first two outputs have only numbers above and below 0, and so zero points of 0 and
    15; they are small, or these outputs would be larger than all others.
    """
    grouped = matrix.float().unflatten(1, (-1, group))
    if not symmetric:
        grouped[0], grouped[1] = grouped[0].abs() / 8, -grouped[1].abs() / 8
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = (torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15).half()
    zeros = torch.full_like(scales, 8) if symmetric else (-low / scales.float()).round().clamp(0, 15)
    codes = (grouped / scales.float()[..., None]).round() + zeros.float()[..., None]
    return codes.clamp(0, 15).flatten(1), scales, zeros


def _in_int4(
    folder: Path, group: int, config: dict[str, Any], *, symmetric: bool, of_others: torch.dtype = torch.float32
) -> Path:
    """Projections of attention, experts and shared experts in INT4; all else in another type."""
    awq = config["quant_method"] == "awq"
    one_less = config.get("checkpoint_format") == "gptq"
    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim < 2 or not any(part in name for part in ("_proj.", ".w1.", ".w2.", ".w3.")):
            held[name] = tensor.to(of_others)
            continue
        codes, scales, zeros = _in_groups(tensor, group, symmetric)
        stem = name.removesuffix(".weight")
        held[f"{stem}.scales"] = scales.T
        if awq:
            held[f"{stem}.qweight"] = _words(codes.T, 1, _AWQ_ORDER)
            held[f"{stem}.qzeros"] = _words(zeros.T, 1, _AWQ_ORDER)
            continue
        held[f"{stem}.qweight"] = _words(codes.T, 0)
        words = _words(zeros.T, 1)
        held[f"{stem}.qzeros"] = words - 0x11111111 if one_less else words
        held[f"{stem}.g_idx"] = torch.arange(tensor.shape[1], dtype=torch.int32) // group
    _rewritten(folder, held, {"bits": 4, "group_size": group, **config})
    raw = json.loads((folder / "config.json").read_text())
    told = str(of_others).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(raw | {"dtype": told}))
    return folder


def _in_gptq(folder: Path) -> Path:
    config = {"quant_method": "gptq", "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
    return _in_int4(folder, 32, config, symmetric=True)


def _in_asymmetric_gptq(folder: Path) -> Path:
    config = {"quant_method": "gptq", "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
    return _in_int4(folder, 32, config, symmetric=False)


def _in_awq(folder: Path) -> Path:
    config = {"quant_method": "awq", "zero_point": True, "version": "gemm", "modules_to_not_convert": ["gate"]}
    return _in_int4(folder, 64, config, symmetric=False, of_others=torch.float16)


INT4 = {
    "qwen3_moe, gptq int4_g32": _in_gptq,
    "qwen2_moe, gptq uint4_g32": _in_asymmetric_gptq,
    "mixtral, awq uint4_g64": _in_awq,
}
"""Checkpoints in INT4, of which the name has the format of the experts."""
QUANTISED = {
    "deepseek_v3, fp8": _in_fp8,
    "gpt_oss, mxfp4": _in_mxfp4,
    "gpt_oss, mxfp4 of blocks": _in_mxfp4,
    **INT4,
}
"""What makes a quantised checkpoint of the one that transformers wrote."""
