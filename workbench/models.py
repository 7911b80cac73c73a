"""Model configurations under their Hugging Face names; a checkpoint is a configuration that knows its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from workbench.catalogue import Catalogue
from workbench.display import html_table
from workbench.errors import CheckpointError
from workbench.units import DTYPE_BYTES

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_local_experts",
    "num_experts_per_tok",
    "vocab_size",
    "max_position_embeddings",
)
_TORCH_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder whose layers are attention followed by a mixture of experts (Mixtral's architecture).

    Field names are those of Hugging Face's ``config.json``; `dtype` is the precision the weights are kept in
    ("fp32" or "bf16") and `path` the folder of the weights, or None for a catalogue entry.
    """

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    tie_word_embeddings: bool = False
    dtype: str = "bf16"
    path: Path | None = None

    @property
    def q_size(self) -> int:
        """Elements of all query heads of one token (H D)."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all keys (or all values) of one token and layer (K D)."""
        return self.num_key_value_heads * self.head_dim

    @property
    def expert_params(self) -> int:
        """Parameters of one expert: gate, up and down projection."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention: Q, K, V and O projections."""
        return 2 * self.hidden_size * (self.q_size + self.kv_size)

    @property
    def layer_params(self) -> int:
        """Parameters of one layer, its two norms included."""
        router = self.num_local_experts * self.hidden_size
        return self.attention_params + router + self.num_local_experts * self.expert_params + 2 * self.hidden_size

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * self.layer_params + embeddings + self.hidden_size

    @property
    def shape(self) -> str:
        """Everything that decides how long one layer's operations take, and the head's."""
        heads = f"{self.num_attention_heads}/{self.num_key_value_heads}x{self.head_dim}"
        experts = f"{self.num_experts_per_tok}/{self.num_local_experts}x{self.intermediate_size}"
        return f"hidden {self.hidden_size}, heads {heads}, experts {experts}, vocabulary {self.vocab_size}"

    def kv_bytes_per_token(self, dtype: str) -> int:
        """KV cache of one token over all layers [B]."""
        return 2 * self.num_hidden_layers * self.kv_size * DTYPE_BYTES[dtype]

    def flops_per_token(self) -> float:
        """GEMM FLOP to push one token through the model, head included (SPEC's F_tok)."""
        router = self.num_local_experts * self.hidden_size
        active = self.attention_params + router + self.num_experts_per_tok * self.expert_params
        return 2.0 * (self.num_hidden_layers * active + self.vocab_size * self.hidden_size)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_hidden_layers} layers, {self.hidden_size} wide, "
            f"{self.num_experts_per_tok} of {self.num_local_experts} experts, {self.params / 1e9:.3g} B parameters"
        )

    def _repr_html_(self) -> str:
        return html_table((field.name, str(getattr(self, field.name))) for field in fields(self))


def checkpoint(path: str | Path) -> ModelConfig:
    """The configuration of a checkpoint folder in Hugging Face format; its weights are opened by `run`.

    Parameters
    ----------
    path : str or Path
        Folder with ``config.json`` and ``*.safetensors``.

    Raises
    ------
    CheckpointError
        If the folder, its configuration or its weights are missing, of an unknown architecture, or pickled.
    """
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"checkpoint {str(folder)!r} has no config.json; give the folder of a Hugging Face model."
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); restore it from where the model came.") from error
    _check_weight_files(folder)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is no JSON object; restore it from where the model came.")
    return config_from_hf(raw, name=folder.name, path=folder)


def _check_weight_files(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"checkpoint {folder.name!r} has only pickled weights ({pickled[0]}), which can run code when opened; "
            "convert them with save_pretrained(..., safe_serialization=True)."
        )
    raise CheckpointError(f"checkpoint {folder.name!r} has no *.safetensors file; copy the weights beside config.json.")


def config_from_hf(raw: Mapping[str, Any], *, name: str, path: Path | None = None) -> ModelConfig:
    """Translate a Mixtral ``config.json``; everything it asks for that the engine would not do is an error."""
    _check_architecture(raw, name)
    _check_sizes(raw, name)
    _check_supported(raw, name)
    rope = raw.get("rope_parameters") or {}
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    given = {field.name: raw[field.name] for field in fields(ModelConfig) if raw.get(field.name) is not None}
    given |= {"name": name, "path": path, "dtype": _TORCH_DTYPES[dtype]}
    given["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    given["rope_theta"] = float(raw.get("rope_theta") or rope.get("rope_theta", 1e6))
    return ModelConfig(**given)


def _check_architecture(raw: Mapping[str, Any], name: str) -> None:
    found = raw.get("architectures") or [raw.get("model_type")]
    if found not in (["MixtralForCausalLM"], ["mixtral"]):
        raise CheckpointError(f"checkpoint {name!r} has the architecture {found}; supported is MixtralForCausalLM.")


def _check_sizes(raw: Mapping[str, Any], name: str) -> None:
    sizes = [*_REQUIRED, *(["head_dim"] if raw.get("head_dim") is not None else [])]
    wrong = [key for key in sizes if type(raw.get(key)) is not int or raw[key] < 1]
    if wrong:
        raise CheckpointError(f"config.json of {name!r} needs positive integers for {', '.join(wrong)}; correct them.")
    rope = raw.get("rope_parameters")
    numbers = {key: raw[key] for key in ("rms_norm_eps", "rope_theta") if raw.get(key) is not None}
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        numbers["rope_theta in rope_parameters"] = rope["rope_theta"]
    wrong = [key for key, value in numbers.items() if type(value) not in (int, float) or not 0 < value < math.inf]
    if wrong:
        raise CheckpointError(f"config.json of {name!r} needs positive numbers for {', '.join(wrong)}; correct them.")
    heads, groups = raw["num_attention_heads"], raw["num_key_value_heads"]
    if heads % groups:
        raise CheckpointError(
            f"config.json of {name!r} has {heads} query heads, no multiple of its {groups} key-value heads; "
            "correct one of them."
        )
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"config.json of {name!r} has head_dim {head_dim}; RoPE turns pairs, make it even.")
    if raw["num_experts_per_tok"] > raw["num_local_experts"]:
        raise CheckpointError(f"config.json of {name!r} asks for more experts per token than it has; correct it.")


def _check_supported(raw: Mapping[str, Any], name: str) -> None:
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "sliding_window": (),
        "quantization_config": (),
        "dtype": tuple(_TORCH_DTYPES),
        "torch_dtype": tuple(_TORCH_DTYPES),
        "tie_word_embeddings": (True, False),
    }
    for key, values in supported.items():
        if raw.get(key) is not None and raw[key] not in values:
            raise CheckpointError(
                f"checkpoint {name!r} sets {key}={raw[key]!r}, which is unsupported; use a model without."
            )
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"checkpoint {name!r} sets {key}={rope!r}; it must be an object. Correct it.")
        kind = rope.get("rope_type", rope.get("type", "default"))
        unread = set(rope) - {"rope_type", "type", "rope_theta"}
        if kind != "default" or unread:
            raise CheckpointError(
                f"checkpoint {name!r} sets rope_type={kind!r} in {key}={rope!r}, which is unsupported; "
                "use a model with plain RoPE."
            )


def _from_catalogue(name: str, table: dict[str, Any]) -> ModelConfig:
    return ModelConfig(name=name, **{key: value for key, value in table.items() if key != "source"})


models: Catalogue[ModelConfig] = Catalogue("models.toml", _from_catalogue)
