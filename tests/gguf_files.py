"""Small GGUF files of several architectures, written with the package `gguf`; every number is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

HIDDEN = 256
HEADS = 4
GROUPS = 2
HEAD_DIM = 64
WIDTH = 256
EXPERTS = 4
VOCABULARY = 320
LATENT = 256
NOPE = 64
ROTATED = 32
VALUES = 64

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape, inputs first, and type by name."""
SIZES = {
    "context_length": 1024,
    "embedding_length": HIDDEN,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": GROUPS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": 1e4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": WIDTH,
}


def write(path: Path, architecture: str, values: Mapping[str, Any], tensors: Tensors, **options: Any) -> Path:
    """A file with these metadata and tensors; `options` are the writer's, such as `split_max_tensors`."""
    writer = GGUFWriter(path, architecture, **options)
    writer.add_token_list([f"token {number}" for number in range(VOCABULARY)])
    for key, value in values.items():
        name = key if key.startswith("general.") else f"{architecture}.{key}"
        add(writer, name, value)
    for name, (shape, kind) in tensors.items():
        writer.add_tensor(name, stored(shape, kind), raw_dtype=GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, list(value))


def stored(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Zeros in a type: rounded by the package where it can, else as many bytes as its blocks have."""
    rows = np.zeros(shape[::-1], dtype=np.float32)
    if kind in ("f32", "q8_0", "q4_0", "bf16"):
        return quants.quantize(rows, GGMLQuantizationType[kind.upper()])
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return np.zeros((*shape[:0:-1], shape[0] // weights * size), dtype=np.uint8)


def outside(kind: str = "q4_k", head: str | None = "q6_k") -> Tensors:
    """Embedding, last norm and head."""
    found: Tensors = {
        "token_embd.weight": ((HIDDEN, VOCABULARY), kind),
        "output_norm.weight": ((HIDDEN,), "f32"),
    }
    if head:
        found["output.weight"] = ((HIDDEN, VOCABULARY), head)
    return found


def grouped(layer: int, kind: str, values: str) -> Tensors:
    """Attention with grouped queries, and the two norms."""
    begin = f"blk.{layer}"
    return {
        f"{begin}.attn_norm.weight": ((HIDDEN,), "f32"),
        f"{begin}.attn_q.weight": ((HIDDEN, HEADS * HEAD_DIM), kind),
        f"{begin}.attn_k.weight": ((HIDDEN, GROUPS * HEAD_DIM), kind),
        f"{begin}.attn_v.weight": ((HIDDEN, GROUPS * HEAD_DIM), values),
        f"{begin}.attn_output.weight": ((HEADS * HEAD_DIM, HIDDEN), kind),
        f"{begin}.ffn_norm.weight": ((HIDDEN,), "f32"),
    }


def mixture(layer: int, kind: str, down: str) -> Tensors:
    """Router and routed experts."""
    begin = f"blk.{layer}"
    return {
        f"{begin}.ffn_gate_inp.weight": ((HIDDEN, EXPERTS), "f32"),
        f"{begin}.ffn_gate_exps.weight": ((HIDDEN, WIDTH, EXPERTS), kind),
        f"{begin}.ffn_up_exps.weight": ((HIDDEN, WIDTH, EXPERTS), kind),
        f"{begin}.ffn_down_exps.weight": ((WIDTH, HIDDEN, EXPERTS), down),
    }


def network(layer: int, suffix: str, kind: str, width: int) -> Tensors:
    """A dense network, or with the suffix ``_shexp`` shared experts."""
    begin = f"blk.{layer}"
    return {
        f"{begin}.ffn_gate{suffix}.weight": ((HIDDEN, width), kind),
        f"{begin}.ffn_up{suffix}.weight": ((HIDDEN, width), kind),
        f"{begin}.ffn_down{suffix}.weight": ((width, HIDDEN), kind),
    }


def mixtral(path: Path, **options: Any) -> Path:
    """Two layers, with more bits in the first one's values and down projections; Mixtral's metadata have few sizes."""
    tensors = outside()
    for layer in range(2):
        more = "q6_k" if layer == 0 else "q4_k"
        tensors |= grouped(layer, "q4_k", "q8_0") | mixture(layer, "q4_k", more)
    left_out = ("attention.key_length", "attention.value_length", "expert_feed_forward_length")
    values = {key: value for key, value in SIZES.items() if key not in left_out}
    return write(path, "llama", {**values, "block_count": 2}, tensors, **options)


def old_mixtral(path: Path) -> Path:
    """Mixtral with a tensor for each expert, as files of early 2024 have them."""
    tensors = outside()
    for number in range(EXPERTS):
        tensors |= {
            f"blk.0.ffn_gate.{number}.weight": ((HIDDEN, WIDTH), "q4_k"),
            f"blk.0.ffn_up.{number}.weight": ((HIDDEN, WIDTH), "q4_k"),
            f"blk.0.ffn_down.{number}.weight": ((WIDTH, HIDDEN), "q6_k"),
        }
    tensors |= grouped(0, "q4_0", "q4_0")
    tensors["blk.0.ffn_gate_inp.weight"] = ((HIDDEN, EXPERTS), "f32")
    return write(path, "llama", {**SIZES, "block_count": 1}, tensors)


def qwen3moe(path: Path, **options: Any) -> Path:
    """Six layers in the order of Q4_K_M: more bits in the first layers and in some later ones; the head is tied."""
    tensors = outside("q6_k", head=None)
    for layer in range(6):
        more = "q6_k" if layer in (0, 1, 4) else "q4_k"
        tensors |= grouped(layer, "q4_k", more) | mixture(layer, "q4_k", more)
        tensors[f"blk.{layer}.attn_q_norm.weight"] = ((HEAD_DIM,), "f32")
        tensors[f"blk.{layer}.attn_k_norm.weight"] = ((HEAD_DIM,), "f32")
    return write(path, "qwen3moe", {**SIZES, "block_count": 6}, tensors, **options)


DEEPSEEK = {
    **SIZES,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": LATENT,
    "attention.kv_lora_rank": LATENT,
    "attention.key_length": LATENT + ROTATED,
    "attention.value_length": LATENT,
    "attention.key_length_mla": NOPE + ROTATED,
    "attention.value_length_mla": VALUES,
    "rope.dimension_count": ROTATED,
    "leading_dense_block_count": 1,
    "expert_shared_count": 2,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "block_count": 3,
}


def latent(layer: int, kind: str) -> Tensors:
    """Latent attention with the two expansions apart, and the two norms."""
    begin = f"blk.{layer}"
    return {
        f"{begin}.attn_norm.weight": ((HIDDEN,), "f32"),
        f"{begin}.attn_q_a.weight": ((HIDDEN, LATENT), kind),
        f"{begin}.attn_q_a_norm.weight": ((LATENT,), "f32"),
        f"{begin}.attn_q_b.weight": ((LATENT, HEADS * (NOPE + ROTATED)), kind),
        f"{begin}.attn_kv_a_mqa.weight": ((HIDDEN, LATENT + ROTATED), kind),
        f"{begin}.attn_kv_a_norm.weight": ((LATENT,), "f32"),
        f"{begin}.attn_k_b.weight": ((NOPE, LATENT, HEADS), "q8_0"),
        f"{begin}.attn_v_b.weight": ((LATENT, VALUES, HEADS), kind),
        f"{begin}.attn_output.weight": ((HEADS * VALUES, HIDDEN), kind),
        f"{begin}.ffn_norm.weight": ((HIDDEN,), "f32"),
    }


def deepseek(path: Path) -> Path:
    """A dense layer, and two with experts, two shared ones among them."""
    tensors = outside()
    for layer in range(3):
        tensors |= latent(layer, "q5_k")
    tensors |= network(0, "", "q3_k", 2 * WIDTH)
    for layer in (1, 2):
        tensors |= mixture(layer, "iq2_xs", "iq3_s") | network(layer, "_shexp", "q5_k", 2 * WIDTH)
        tensors[f"blk.{layer}.exp_probs_b.bias"] = ((EXPERTS,), "f32")
    return write(path, "deepseek2", {**DEEPSEEK, "feed_forward_length": 2 * WIDTH}, tensors)


def old_deepseek(path: Path) -> Path:
    """DeepSeek-V2-Lite as files of 2024 have it: the expansions together, queries without a latent."""
    absorbed = ("attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla", "expert_gating_func")
    values = {key: value for key, value in DEEPSEEK.items() if key not in absorbed}
    values |= {"attention.head_count_kv": HEADS, "attention.key_length": NOPE + ROTATED}
    values |= {"attention.value_length": VALUES, "block_count": 1}
    tensors = outside() | latent(0, "q4_k") | mixture(0, "q4_k", "q4_k") | network(0, "_shexp", "q4_k", 2 * WIDTH)
    for name in ("attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight", "attn_k_b.weight", "attn_v_b.weight"):
        del tensors[f"blk.0.{name}"]
    tensors["blk.0.attn_q.weight"] = ((HIDDEN, HEADS * (NOPE + ROTATED)), "q4_k")
    tensors["blk.0.attn_kv_b.weight"] = ((LATENT, HEADS * (NOPE + VALUES)), "q6_k")
    return write(path, "deepseek2", values, tensors)


def gpt_oss(path: Path) -> Path:
    """Two layers with experts in MXFP4, biases and sinks, one of which has a sliding window."""
    tensors = outside("q8_0", "q8_0")
    for layer in range(2):
        begin = f"blk.{layer}"
        tensors |= grouped(layer, "q8_0", "q8_0") | mixture(layer, "mxfp4", "mxfp4")
        tensors[f"{begin}.post_attention_norm.weight"] = tensors.pop(f"{begin}.ffn_norm.weight")
        tensors |= {
            f"{begin}.attn_sinks.weight": ((HEADS,), "f32"),
            f"{begin}.attn_q.bias": ((HEADS * HEAD_DIM,), "f32"),
            f"{begin}.attn_k.bias": ((GROUPS * HEAD_DIM,), "f32"),
            f"{begin}.attn_v.bias": ((GROUPS * HEAD_DIM,), "f32"),
            f"{begin}.attn_output.bias": ((HIDDEN,), "f32"),
            f"{begin}.ffn_gate_inp.bias": ((EXPERTS,), "f32"),
            f"{begin}.ffn_gate_exps.bias": ((WIDTH, EXPERTS), "f32"),
            f"{begin}.ffn_up_exps.bias": ((WIDTH, EXPERTS), "f32"),
            f"{begin}.ffn_down_exps.bias": ((HIDDEN, EXPERTS), "f32"),
        }
    return write(path, "gpt-oss", {**SIZES, "block_count": 2, "attention.sliding_window": 128}, tensors)


def glm(path: Path) -> Path:
    """A dense layer, one with experts, and one that only predicts further tokens."""
    tensors = outside()
    for layer in range(3):
        tensors |= grouped(layer, "q4_k", "q4_k")
        tensors[f"blk.{layer}.post_attention_norm.weight"] = tensors.pop(f"blk.{layer}.ffn_norm.weight")
        for name, size in (("q", HEADS * HEAD_DIM), ("k", GROUPS * HEAD_DIM), ("v", GROUPS * HEAD_DIM)):
            tensors[f"blk.{layer}.attn_{name}.bias"] = ((size,), "f32")
    tensors |= network(0, "", "q4_k", 2 * WIDTH)
    for layer in (1, 2):
        tensors |= mixture(layer, "q4_k", "q4_k") | network(layer, "_shexp", "q4_k", WIDTH)
        tensors[f"blk.{layer}.exp_probs_b.bias"] = ((EXPERTS,), "f32")
    tensors["blk.2.nextn.eh_proj.weight"] = ((2 * HIDDEN, HIDDEN), "q4_k")
    values = {**SIZES, "block_count": 3, "nextn_predict_layers": 1, "rope.dimension_count": HEAD_DIM // 2}
    return write(path, "glm4moe", values, tensors)


def dbrx(path: Path) -> Path:
    """One projection to queries, keys and values; layer norms, the second with the name of an output's."""
    begin = "blk.0"
    tensors = outside() | mixture(0, "q4_k", "q4_k")
    tensors |= {
        f"{begin}.attn_norm.weight": ((HIDDEN,), "f32"),
        f"{begin}.attn_qkv.weight": ((HIDDEN, (HEADS + 2 * GROUPS) * HEAD_DIM), "q5_k"),
        f"{begin}.attn_output.weight": ((HEADS * HEAD_DIM, HIDDEN), "q4_k"),
        f"{begin}.attn_output_norm.weight": ((HIDDEN,), "f32"),
    }
    values = {**SIZES, "block_count": 1, "attention.clamp_kqv": 8.0, "attention.layer_norm_epsilon": 1e-5}
    return write(path, "dbrx", values, tensors)


def ernie(path: Path) -> Path:
    """A dense layer, and one with shared experts and a bias for the choice; its router stays in fp32."""
    tensors = outside() | grouped(0, "q4_k", "q4_k") | network(0, "", "q4_k", 2 * WIDTH)
    tensors |= grouped(1, "q4_k", "q4_k") | mixture(1, "q4_k", "q4_k") | network(1, "_shexp", "q6_k", 2 * WIDTH)
    tensors["blk.1.exp_probs_b.bias"] = ((EXPERTS,), "f32")
    return write(path, "ernie4_5-moe", {**SIZES, "block_count": 2}, tensors)


def llama4(path: Path) -> Path:
    """Experts in every other layer, with a shared one."""
    tensors = outside() | grouped(0, "q4_k", "q4_k") | network(0, "", "q4_k", 2 * WIDTH)
    tensors |= grouped(1, "q4_k", "q4_k") | mixture(1, "q3_k", "q4_k") | network(1, "_shexp", "q4_k", WIDTH)
    values = {**SIZES, "block_count": 2, "interleave_moe_layer_step": 2, "feed_forward_length": [2 * WIDTH, WIDTH]}
    return write(path, "llama4", values, tensors)


def minimax(path: Path) -> Path:
    """Norms over all heads, a bias for the choice, and a factor that is 0 where there is none."""
    tensors = outside() | grouped(0, "iq4_xs", "q5_k") | mixture(0, "iq4_xs", "iq4_xs")
    tensors["blk.0.attn_q_norm.weight"] = ((HEADS * HEAD_DIM,), "f32")
    tensors["blk.0.attn_k_norm.weight"] = ((GROUPS * HEAD_DIM,), "f32")
    tensors["blk.0.exp_probs_b.bias"] = ((EXPERTS,), "f32")
    return write(path, "minimax-m2", {**SIZES, "block_count": 1, "expert_weights_scale": 0.0}, tensors)


def phimoe(path: Path) -> Path:
    """Biases of norms, attention and head, and factors of LongRoPE; its window is as long as its context."""
    tensors = outside() | grouped(0, "q4_k", "q4_k") | mixture(0, "q4_k", "q4_k")
    tensors |= {
        "output.bias": ((VOCABULARY,), "f32"),
        "output_norm.bias": ((HIDDEN,), "f32"),
        "rope_factors_long.weight": ((HEAD_DIM // 2,), "f32"),
        "rope_factors_short.weight": ((HEAD_DIM // 2,), "f32"),
        "blk.0.attn_norm.bias": ((HIDDEN,), "f32"),
        "blk.0.ffn_norm.bias": ((HIDDEN,), "f32"),
        "blk.0.attn_q.bias": ((HEADS * HEAD_DIM,), "f32"),
        "blk.0.attn_k.bias": ((GROUPS * HEAD_DIM,), "f32"),
        "blk.0.attn_v.bias": ((GROUPS * HEAD_DIM,), "f32"),
        "blk.0.attn_output.bias": ((HIDDEN,), "f32"),
    }
    values = {**SIZES, "block_count": 1, "attention.sliding_window": 1024, "rope.scaling.type": "longrope"}
    return write(path, "phimoe", values, tensors)


def qwen2moe(path: Path) -> Path:
    """Biases before attention, and a shared expert behind a gate; RoPE scaled by YaRN."""
    tensors = outside() | grouped(0, "q4_k", "q4_k") | mixture(0, "q4_k", "q8_0") | network(0, "_shexp", "q4_k", 512)
    tensors["blk.0.ffn_gate_inp_shexp.weight"] = ((HIDDEN,), "f32")
    for name, size in (("q", HEADS * HEAD_DIM), ("k", GROUPS * HEAD_DIM), ("v", GROUPS * HEAD_DIM)):
        tensors[f"blk.0.attn_{name}.bias"] = ((size,), "f32")
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256}
    return write(path, "qwen2moe", {**SIZES, **scaling, "block_count": 1}, tensors)


def granite(path: Path) -> Path:
    """Granite with a shared expert, and a fused projection of gate and up."""
    tensors = outside("q4_k", None) | grouped(0, "q4_k", "q4_k") | mixture(0, "q4_k", "q4_k")
    tensors |= network(0, "_shexp", "q4_k", WIDTH)
    del tensors["blk.0.ffn_gate_exps.weight"]
    del tensors["blk.0.ffn_up_exps.weight"]
    tensors["blk.0.ffn_gate_up_exps.weight"] = ((HIDDEN, 2 * WIDTH, EXPERTS), "q4_k")
    factors = {"attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0}
    return write(path, "granitemoe", {**SIZES, **factors, "block_count": 1}, tensors)


FILES = {
    "mixtral": mixtral,
    "old_mixtral": old_mixtral,
    "qwen3moe": qwen3moe,
    "deepseek": deepseek,
    "old_deepseek": old_deepseek,
    "gpt_oss": gpt_oss,
    "glm": glm,
    "dbrx": dbrx,
    "ernie": ernie,
    "llama4": llama4,
    "minimax": minimax,
    "phimoe": phimoe,
    "qwen2moe": qwen2moe,
    "granite": granite,
}
"""Writers of all files, by name."""
