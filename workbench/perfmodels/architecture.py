"""What the closed-form models need to know of a model: parameters by part, KV elements, bytes per parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from workbench.catalogue import Catalogue
from workbench.models import ModelConfig
from workbench.perfmodels.spans import Number, within
from workbench.units import DTYPE_BYTES

_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_MXFP4_BYTES = 4.25 / 8  # 4-bit values, one 8-bit scale for 32 of them


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder with mixture-of-experts layers; biases and norms are left out (below 0.1 % of the total).

    Attributes
    ----------
    layers, dense_layers : int
        All decoder layers, and those of them that have an ordinary feed-forward network.
    attention_params : int
        Projections of one layer, latent ones included.
    expert_params, shared_params, dense_params : int
        One routed expert, all shared experts of a layer, the feed-forward network of one dense layer.
    head_params, embedding_params : int
        LM head; input embeddings, 0 where they are the head's.
    kv_elements : int
        KV-cache elements of one token and layer.
    query_group : float
        Multiply-adds per KV element and query token: H / K for grouped queries; for latent attention, whose latent
        serves as K and as V, H (2 d_c + d_r) / (d_c + d_r).
    window, windowed_layers : int
        Tokens that a sliding-window layer attends to, and how many layers have one.
    expert_bytes, other_bytes, kv_bytes : float
        Bytes per parameter of routed experts, of everything else, and per KV element.
    """

    name: str
    layers: int
    hidden: int
    attention_params: int
    experts: int
    top_k: int
    expert_params: int
    head_params: int
    kv_elements: int
    query_group: float
    dense_layers: int = 0
    shared_params: int = 0
    dense_params: int = 0
    embedding_params: int = 0
    window: int = 0
    windowed_layers: int = 0
    expert_bytes: float = 2.0
    other_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers

    @property
    def router_params(self) -> int:
        """Router of one MoE layer."""
        return self.experts * self.hidden

    @property
    def routed_params(self) -> int:
        """All routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_params

    @property
    def always_params(self) -> int:
        """What every pass reads whatever the router says: attention, routers, shared and dense parts, head."""
        moe = self.moe_layers * (self.router_params + self.shared_params)
        return self.layers * self.attention_params + moe + self.dense_layers * self.dense_params + self.head_params

    @property
    def params(self) -> int:
        """The whole model."""
        return self.always_params + self.routed_params + self.embedding_params

    @property
    def active_params(self) -> int:
        """What one token is multiplied with; the embedding, a look-up, is not."""
        return self.always_params + self.moe_layers * self.top_k * self.expert_params

    @property
    def routed_bytes(self) -> float:
        """All routed experts of all layers [B]."""
        return self.routed_params * self.expert_bytes

    @property
    def weight_bytes(self) -> float:
        """The whole model [B]."""
        return self.routed_bytes + (self.always_params + self.embedding_params) * self.other_bytes

    def kv_tokens(self, context: ArrayLike) -> Number:
        """Cached tokens that one query token attends to, summed over the layers; windows cap it.

        Raises
        ------
        ValueError
            If the context is negative.
        """
        tokens = within("context", context, 0, mend="give the cached tokens of one sequence")
        full = (self.layers - self.windowed_layers) * tokens
        seen: Number = full + self.windowed_layers * np.minimum(tokens, self.window)
        return seen


def of(model: ModelConfig) -> Architecture:
    """The sizes of a model that the engine knows; its precision is the checkpoint's."""
    size = float(DTYPE_BYTES[model.dtype])
    head = model.vocab_size * model.hidden_size
    return Architecture(
        name=model.name,
        layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        attention_params=model.attention_params,
        experts=model.num_local_experts,
        top_k=model.num_experts_per_tok,
        expert_params=model.expert_params,
        head_params=head,
        kv_elements=2 * model.kv_size,
        query_group=model.num_attention_heads / model.num_key_value_heads,
        embedding_params=0 if model.tie_word_embeddings else head,
        expert_bytes=size,
        other_bytes=size,
        kv_bytes=size,
    )


def from_hf(config: Mapping[str, Any] | str | Path, *, name: str = "") -> Architecture:
    """The sizes in a Hugging Face ``config.json``, given as a dict, as its path or as the folder that holds it.

    Grouped-query and DeepSeek's latent attention, shared experts, dense first layers, sliding windows, fp8 and MXFP4
    weights are understood.

    Raises
    ------
    ValueError
        If a size is missing or no positive integer, or the weights are in a format whose size is not known.
    """
    raw = _read(config)
    name = name or str(raw.get("_name_or_path") or raw.get("model_type") or "model")
    layers, hidden = _size(raw, name, "num_hidden_layers"), _size(raw, name, "hidden_size")
    experts, top_k = _size(raw, name, *_EXPERTS), _size(raw, name, *_TOP_K)
    if top_k > experts:
        raise ValueError(f"config of {name!r} routes to {top_k} of {experts} experts; correct one of them.")
    width = _size(raw, name, "moe_intermediate_size", "intermediate_size")
    shared = raw.get("shared_expert_intermediate_size") or (raw.get("n_shared_experts") or 0) * width
    dense = min(raw.get("first_k_dense_replace") or 0, layers)
    head = _size(raw, name, "vocab_size") * hidden
    attention, kv_elements, group = _attention(raw, name, hidden)
    windowed = _windowed_layers(raw, layers)
    expert_bytes, other_bytes = _weight_bytes(raw, name)
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        attention_params=attention,
        experts=experts,
        top_k=top_k,
        expert_params=3 * hidden * width,
        head_params=head,
        kv_elements=kv_elements,
        query_group=group,
        dense_layers=dense,
        shared_params=3 * hidden * shared,
        dense_params=3 * hidden * _size(raw, name, "intermediate_size") if dense else 0,
        embedding_params=0 if raw.get("tie_word_embeddings") else head,
        window=raw["sliding_window"] if windowed else 0,
        windowed_layers=windowed,
        expert_bytes=expert_bytes,
        other_bytes=other_bytes,
    )


def _read(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{str(file)!r} does not exist; give a Hugging Face config.json, its folder or its dict.")
    raw = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError(f"{str(file)!r} is no JSON object; restore it from where the model came.")
    return raw


def _size(raw: Mapping[str, Any], name: str, *keys: str) -> int:
    found = next((raw[key] for key in keys if raw.get(key) is not None), None)
    if type(found) is not int or found < 1:
        raise ValueError(f"config of {name!r} needs a positive integer for {' or '.join(keys)}; add it.")
    return found


def _attention(raw: Mapping[str, Any], name: str, hidden: int) -> tuple[int, int, float]:
    """Parameters of one layer, KV elements per token and layer, multiply-adds per KV element and query token."""
    heads = _size(raw, name, "num_attention_heads")
    if raw.get("kv_lora_rank") is None:
        groups = raw.get("num_key_value_heads") or heads
        dim = raw.get("head_dim") or hidden // heads
        return 2 * hidden * (heads + groups) * dim, 2 * groups * dim, heads / groups
    latent, rope = _size(raw, name, "kv_lora_rank"), _size(raw, name, "qk_rope_head_dim")
    nope, value = _size(raw, name, "qk_nope_head_dim"), _size(raw, name, "v_head_dim")
    rank = raw.get("q_lora_rank")
    queries = heads * (nope + rope)
    query = rank * (hidden + queries) if rank else hidden * queries
    params = query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return params, latent + rope, heads * (2 * latent + rope) / (latent + rope)


def _windowed_layers(raw: Mapping[str, Any], layers: int) -> int:
    if raw.get("sliding_window") is None or raw.get("use_sliding_window") is False:
        return 0
    kinds = raw.get("layer_types")
    return layers if kinds is None else sum(kind == "sliding_attention" for kind in kinds)


def _weight_bytes(raw: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Bytes per parameter of experts and of everything else; scales of fp8 blocks (0.02 %) are left out."""
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if dtype not in _DTYPE_BYTES or method not in (None, "fp8", "mxfp4"):
        raise ValueError(
            f"config of {name!r} has weights of {dtype} quantised by {method!r}; known are float32, bfloat16, float16, "
            "fp8 and mxfp4. Remove quantization_config and set expert_bytes and other_bytes with dataclasses.replace."
        )
    plain = _DTYPE_BYTES[dtype]
    return {None: (plain, plain), "fp8": (1.0, 1.0), "mxfp4": (_MXFP4_BYTES, plain)}[method]


def _from_catalogue(name: str, table: dict[str, Any]) -> Architecture:
    return from_hf(table, name=name)


architectures: Catalogue[Architecture] = Catalogue("architectures.toml", _from_catalogue)
