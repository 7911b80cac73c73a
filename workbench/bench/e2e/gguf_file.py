"""A checkpoint of Mixtral's architecture as a GGUF file, which llama.cpp reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from workbench.core.errors import CheckpointError
from workbench.models import ModelConfig

_Numbers = npt.NDArray[np.float32]
_AROUND = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_OF_EXPERT = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def as_gguf(model: ModelConfig, form: str) -> Path:
    """The checkpoint's weights in bf16, with the routed experts in a format of GGUF ("bf16", "q8_0" or "q4_0").

    Router and norms are in fp32. The file is written beside the checkpoint's folder, once.

    Raises
    ------
    CheckpointError
        If the model has another architecture, or the package `gguf` is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("the package gguf is missing: pip install 'moe-workbench[models]'.") from error
    folder = model.path
    if folder is None or model.family.model_type != "mixtral":
        raise CheckpointError(f"{model.name!r} is no checkpoint of Mixtral's architecture, the one that is converted.")
    path = folder.with_name(f"{folder.name}-{form}.gguf")
    if path.exists() and path.stat().st_mtime >= max(file.stat().st_mtime for file in _files(folder)):
        return path
    partial = path.with_suffix(f".{os.getpid()}.partial")
    writer: Any = gguf.GGUFWriter(partial, "llama")
    _describe(writer, model)
    try:
        for name, numbers in _tensors(folder, model):
            kind = gguf.GGMLQuantizationType[_form_of(name, numbers, form).upper()]
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _form_of(name: str, numbers: _Numbers, experts: str) -> str:
    """The format of a tensor, where routed experts have a given one."""
    if "_exps" in name:
        return experts
    kept = numbers.ndim == 1 or "gate_inp" in name
    return "f32" if kept else "bf16"


def _describe(writer: Any, model: ModelConfig) -> None:
    """Write the sizes, and that there is no tokenizer."""
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_hidden_layers)
    writer.add_feed_forward_length(model.expert_width)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_expert_count(model.num_local_experts)
    writer.add_expert_used_count(model.num_experts_per_tok)
    writer.add_tokenizer_model("no_vocab")


def _tensors(folder: Path, model: ModelConfig) -> Iterator[tuple[str, _Numbers]]:
    """Every tensor by GGUF's name; those of a layer's experts are one."""
    experts: dict[str, dict[int, _Numbers]] = {}
    for name, numbers in _stored(folder):
        if name in _AROUND:
            yield _AROUND[name], numbers
            continue
        _, _, layer, rest = name.split(".", 3)
        rest = rest.removesuffix(".weight")
        if rest in _OF_LAYER:
            heads = {"attn_q": model.num_attention_heads, "attn_k": model.num_key_value_heads}.get(_OF_LAYER[rest])
            yield f"blk.{layer}.{_OF_LAYER[rest]}.weight", numbers if heads is None else _interleaved(numbers, heads)
            continue
        _, _, expert, matrix = rest.split(".")
        joined = f"blk.{layer}.{_OF_EXPERT[matrix]}.weight"
        of_matrix = experts.setdefault(joined, {})
        of_matrix[int(expert)] = numbers
        if len(of_matrix) == model.num_local_experts:
            yield joined, np.stack([of_matrix[number] for number in range(model.num_local_experts)])
            del experts[joined]


def _stored(folder: Path) -> Iterator[tuple[str, _Numbers]]:
    for path in _files(folder):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name).float().numpy()


def _interleaved(rows: _Numbers, heads: int) -> _Numbers:
    """Rows of queries or keys as llama.cpp rotates them: the two of a pair are neighbours, not half a head apart."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)
