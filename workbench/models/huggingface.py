"""Sources of model descriptions: the catalogue, a ``config.json``, a GGUF file, a checkpoint with weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

from workbench.core.catalogue import Catalogue
from workbench.core.errors import CheckpointError, ScenarioError
from workbench.core.records import is_file, is_folder, read_json
from workbench.core.units import is_number, is_whole
from workbench.models.built import built, hub_config
from workbench.models.config import LARGEST, ModelConfig
from workbench.models.executable import DTYPES, check_executable, check_sizes
from workbench.models.families import FAMILIES, runnable_family
from workbench.models.family import LATENT, Family, TensorNames
from workbench.models.formats import (
    REMEDY,
    Quantisation,
    int4_layout,
    is_int4,
    quantisation_of,
    stored_formats,
    with_formats,
)
from workbench.models.gguf import read_gguf
from workbench.models.layers import LayerKind, fold
from workbench.models.rope import KINDS, PLAIN, Rope

__all__ = ["ModelConfig", "checkpoint", "folder_of", "model", "models"]

_SIZES = (
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
_LATENT = tuple(key for key in LATENT if key != "q_lora_rank")
_OPTIONAL = (
    *("head_dim", "moe_intermediate_size", "q_lora_rank", "sliding_window", "n_group", "topk_group"),
    *("decoder_sparse_step", "moe_layer_interval"),
)
_COUNTS = (
    *("first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size"),
    "moe_layer_start_index",
)
_FACTORS = (
    *("rms_norm_eps", "clip_qkv", "routed_scaling_factor"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
)
_NUMBERS = (*_FACTORS, "rope_theta")
_FLAGS = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "use_qk_norm", "lm_head_bias")
_TAKEN = (
    *(*_SIZES, *_LATENT, "head_dim", "moe_intermediate_size", "q_lora_rank", "sliding_window", "n_group", "topk_group"),
    *(*_FACTORS, *_FLAGS),
)
"""Keys that become the field of the same name unchanged; every other field follows from several keys."""
_UNNAMED = {"num_experts_per_tok": ("num_experts_per_token", "moe_topk")}
"""Other keys for a number, used by families without a file; a ``config.json`` with them is read if it has no type."""
_FORMATS: dict[str | None, tuple[str | None, str | None]] = {
    None: (None, None),
    "fp8": ("fp8", "fp8"),
    "mxfp4": ("mxfp4", None),
}
"""Formats of the experts and of the other weights by quantisation method; see `quantisation_of` for other methods."""
_GGUF = ".gguf"
_UNPRICED = ("attn_layer_", "expert_layer_", "index_", "kv_channels", "linear_", "mamba_", "ssm_")
"""Beginnings of keys that belong to layers which a `ModelConfig` cannot describe: state spaces, linear or sparse
attention, mixtures of attention heads."""
_NO_ROPE = 4
"""Every so many layers, Llama 4 has one without RoPE, unless its config tells."""
_UNQUANTISED = ("modules_to_not_convert", "ignore", "exclude_modules")
"""Keys of ``quantization_config`` that list modules."""
_AT_THE_ENDS = re.compile(r"lm_head|embed|norm|gate$|gate\b(?!_)|router")
"""Modules that count as unquantised in any case."""
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
"""A name of a model on the Hugging Face hub."""
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_UNIFORM = {
    "moe_layer_freq": (1,),
    "interleave_moe_layer_step": (1,),
    "full_attention_interval": (1,),
    "attn_type_list": (),
    **dict.fromkeys(_FLAGS, (True, False)),
}
"""Values with which a config's layers are of kinds that a `ModelConfig` can describe; others are refused."""


def model(config: Mapping[str, Any] | str | Path, *, name: str | None = None) -> ModelConfig:
    """The model of a Hugging Face ``config.json`` or of a GGUF file, for predictions; `run` needs a `checkpoint`.

    Types of models in the key table (`workbench.models.families`) need nothing else. Any other type is built by
    transformers without memory, if that is installed (``pip install 'moe-workbench[models]'``), and counted tensor by
    tensor: linear attention, state spaces, sparse and chunked attention are priced by what they read and multiply. What
    neither understands is refused by its name. Layers that only predict further tokens are not counted: decoding one
    token after the other does not read them. Weights may be in fp8, MXFP4 or quantised by AWQ, GPTQ,
    compressed-tensors or modelopt.

    Parameters
    ----------
    config : mapping, str or Path
        The config as a dict, its path, the folder that holds it, or the name of a model on the Hugging Face hub, such
        as ``"Qwen/Qwen3-30B-A3B"``, whose config transformers fetches or has kept; or the path of a ``.gguf`` file, of
        which only the header is read, and whose operations then have the bytes that they have there, layer by layer.
    name : str, optional
        Name of the model; by default the folder's name, the config's own, or the GGUF file's.

    Raises
    ------
    CheckpointError
        If the file is missing or damaged, a size is missing or impossible, or the layers or the weights' format are of
        a kind that is not understood.
    """
    if isinstance(config, Mapping):
        return _understood(config, name or str(config.get("_name_or_path") or config.get("model_type") or "model"))
    if not isinstance(config, str | Path):
        raise CheckpointError(f"config is neither dict nor path but {short(config)}; give a Hugging Face config.json.")
    path = Path(config)
    if path.suffix == _GGUF:
        return _of_gguf(path, name)
    file = path / "config.json" if is_folder(path) else path
    if is_file(file):
        return _understood(_read(file), name or file.parent.name)
    if isinstance(config, str) and _ON_HUB.fullmatch(config):
        return _understood(hub_config(config), name or config.split("/")[1])
    raise CheckpointError(
        f"{str(file)!r} does not exist; give a Hugging Face config.json, its folder, its dict, or a name on the hub."
    )


def _understood(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The model by the key table, or else as transformers builds it."""
    raw = _flat(config)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or (kind in FAMILIES and _all_in_table(raw)):
        return _translate(config, name)
    kinds = raw.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list | tuple) or set(kinds) - {1}):
        raise CheckpointError(
            f"config.json of {name!r} sets attn_type_list={short(kinds)}, which transformers does not read; give "
            "layer_types in its place."
        )
    expert, other = _formats(raw, name)
    dtype = DTYPES[_dtype(raw)]
    _check_unquantised(raw, name)
    found = built({key: value for key, value in config.items() if key != "quantization_config"}, name)
    return _as_stored(replace(found, dtype=dtype, expert_dtype=expert, other_dtype=other), raw)


def _check_unquantised(raw: Mapping[str, Any], name: str) -> None:
    """Refuse lists of modules that are not quantised, of a model whose modules have names of their own."""
    config = _quantisation(raw)
    patterns = list[str]()
    for key in _UNQUANTISED:
        listed = config.get(key)
        patterns += map(str, listed if isinstance(listed, list | tuple) else ())
    inside = [pattern for pattern in patterns if not _AT_THE_ENDS.search(pattern)]
    if inside and config.get("quant_method") not in tuple(_FORMATS):
        raise CheckpointError(
            f"config.json of {name!r} leaves {short(inside[0])} unquantised, and the modules of its type are not known "
            "by name; remove quantization_config and set formats with dataclasses.replace."
        )


def _all_in_table(raw: Mapping[str, Any]) -> bool:
    """True if the key table describes all layers of a config of a type that it has."""
    others = [key for key, values in _UNIFORM.items() if raw.get(key) is not None and raw[key] not in values]
    count = raw.get("num_hidden_layers")
    listed = raw.get("moe_layers")
    every = listed is None or (isinstance(listed, list | tuple) and len(listed) == count)
    return not (_unpriced(raw) or others) and every


def checkpoint(path: str | Path) -> ModelConfig:
    """The configuration of a checkpoint folder in Hugging Face format; its weights are opened by `run`.

    Parameters
    ----------
    path : str or Path
        Folder with ``config.json`` and ``*.safetensors``.

    Raises
    ------
    CheckpointError
        If the folder, its configuration or its weights are missing or pickled, or need something that `run` cannot do.
    """
    folder = Path(path)
    if folder.suffix == _GGUF and not is_folder(folder):
        raise CheckpointError(
            f"{str(folder)!r} is a GGUF file, which run does not execute; predict with wb.model, or give a folder with "
            "safetensors."
        )
    file = folder / "config.json"
    if not is_file(file):
        raise CheckpointError(
            f"checkpoint {str(folder)!r} has no config.json; give the folder of a Hugging Face model."
        )
    raw = _read(file)
    _check_weight_files(folder)
    check_executable(_flat(raw), folder.name)
    found = _as_run(raw, folder.name)
    check_sizes(found)
    return replace(found, path=folder)


def _as_run(raw: dict[str, Any], name: str) -> ModelConfig:
    """The model as `run` holds its weights.

    Of those in INT4 by GPTQ and AWQ the experts stay, and all others are converted; what is in fp16 becomes bf16.
    """
    quantisation = raw.get("quantization_config")
    if not is_int4(quantisation):
        return _translate(raw, name)
    layout = int4_layout(quantisation, name)
    found = _translate({key: value for key, value in raw.items() if key != "quantization_config"}, name)
    dtype = "bf16" if found.dtype == "fp16" else found.dtype
    whole = _has_every_expert(quantisation_of(quantisation, name, remedy=REMEDY), found)
    return replace(found, dtype=dtype, expert_dtype=layout.name if whole else None)


def _has_every_expert(quantisation: Quantisation, model: ModelConfig) -> bool:
    """True if all experts are quantised, False if none is.

    Raises
    ------
    CheckpointError
        If some are.
    """
    names = model.family.tensors
    found = dict[bool, str]()
    for layer, kind in enumerate(model.layer_kinds):
        for expert in () if kind.dense else range(model.num_local_experts):
            for which in (names.gate, names.up, names.down):
                module = f"{names.layers}.{layer}.{names.expert(expert)}.{which}"
                found.setdefault(quantisation.bytes_of(module) is not None, module)
    if len(found) == 2:
        raise CheckpointError(
            f"config.json of {model.name!r} leaves {found[False]} as it was and has {found[True]} quantised; run reads "
            f"experts that are all in one format; {REMEDY}."
        )
    return True in found


def _of_gguf(file: Path, name: str | None) -> ModelConfig:
    found = read_gguf(file)
    try:
        described = _translate(found.config, name or found.name)
    except CheckpointError as error:
        raise CheckpointError(f"the metadata of {str(file)!r} describe no model: {error}") from error
    return with_formats(described, found.formats(described))


def folder_of(model: ModelConfig | str | Path) -> Path | None:
    """Folder of a checkpoint, given itself or as its model; None for a model without weights."""
    return model.path if isinstance(model, ModelConfig) else Path(model)


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = read_json(file)
    except ValueError as error:
        raise CheckpointError(f"{error}; restore it from where the model came.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is no JSON object; restore it from where the model came.")
    return raw


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


# ------------------------------------------------------------------------------------------- what can be predicted


def _translate(config: Mapping[str, Any], name: str) -> ModelConfig:
    raw = _flat(config)
    _check_kind(raw, name)
    family = runnable_family(raw)
    if family is not None:
        raw = {**family.defaults, **{key: value for key, value in raw.items() if value is not None}}
    own = FAMILIES[raw["model_type"]].keys if raw.get("model_type") in FAMILIES else {}
    for key, others in _keys_by_field().items():
        known = [own[key]] if key in own else []
        raw[key] = next((raw[other] for other in (*known, key, *others) if raw.get(other) is not None), None)
    if raw.get("kv_lora_rank") is not None:
        raw["num_key_value_heads"] = raw.get("num_attention_heads")
    if raw.get("use_sliding_window") is False:
        raw["sliding_window"] = None
    chunked = raw.get("attention_chunk_size") is not None
    if chunked:
        raw["sliding_window"] = raw["attention_chunk_size"]
    if raw.get("topk_method") == "greedy":
        raw["n_group"] = raw["topk_group"] = None
    if not raw.get("first_k_dense_replace") and raw.get("intermediate_size") is None:
        raw["intermediate_size"] = raw.get("moe_intermediate_size")
    _check_sizes(raw, name)
    _check_layers(raw, name)
    dense = _dense_layers(raw, name)
    given = {key: raw[key] for key in _TAKEN if raw.get(key) is not None}
    expert, other = _formats(raw, name)
    given |= {
        "name": name,
        "head_dim": _head_dim(raw),
        "dtype": DTYPES[_dtype(raw)],
        "expert_dtype": expert,
        "other_dtype": other,
        "shared_expert_intermediate_size": _shared_width(raw),
        "first_k_dense_replace": sum(dense),
        "chunked": chunked,
        **_windows(raw, dense, family, name),
        "rope_theta": _rope_theta(raw, family),
        "rope": _scaling(raw, name),
        "architecture": None if family is None else family.architecture,
    }
    return _as_stored(ModelConfig(**given), raw)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the keys of its inner objects: those of the text model as they are, DBRX's as ``outer.inner``."""
    text = config.get("text_config")
    raw = {**config, **text} if isinstance(text, Mapping) else dict(config)
    for outer in ("attn_config", "ffn_config"):
        inner = raw.get(outer)
        raw |= {f"{outer}.{key}": value for key, value in inner.items()} if isinstance(inner, Mapping) else {}
    return raw


def _keys_by_field() -> dict[str, tuple[str, ...]]:
    """Every other key that a family has for a number, by Mixtral's key for it."""
    found: dict[str, tuple[str, ...]] = dict(_UNNAMED)
    for family in FAMILIES.values():
        for field, key in family.keys.items():
            known = found.get(field, ())
            found[field] = known if key in known else (*known, key)
    return found


def _check_kind(raw: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose layers have components that would be left out."""
    kind = raw.get("model_type")
    if kind not in (None, *FAMILIES):
        raise CheckpointError(
            f"config.json of {name!r} is of the type {short(kind)}, whose layers are not understood; give one of "
            f"{', '.join(FAMILIES)}, or leave model_type out if the sizes tell all of its layers."
        )
    unpriced = _unpriced(raw)
    if unpriced:
        raise CheckpointError(
            f"config.json of {name!r} sets {short(unpriced[0])}, a key of layers that are not understood; "
            "use a model without."
        )


def _unpriced(raw: Mapping[str, Any]) -> list[str]:
    """Keys of layers that the key table does not describe."""
    return [key for key, value in raw.items() if value and str(key).startswith(_UNPRICED)]


def _dense_layers(raw: Mapping[str, Any], name: str) -> list[bool]:
    """True for every layer with an ordinary feed-forward network in the place of experts."""
    count = raw["num_hidden_layers"]
    kinds = raw.get("mlp_layer_types")
    if kinds is not None:
        found = kinds if isinstance(kinds, list | tuple) else ()
        if len(found) != count or any(kind not in ("dense", "sparse") for kind in found):
            raise CheckpointError(
                f"config.json of {name!r} sets mlp_layer_types={short(kinds)}, which is not understood; give 'dense' "
                f"or 'sparse' for each of its {count} layers."
            )
        return _some_sparse([kind == "dense" for kind in found], "mlp_layer_types", name)
    alone = raw.get("mlp_only_layers") or ()
    if not isinstance(alone, list | tuple) or not all(_is_whole(layer, 0) for layer in alone):
        raise CheckpointError(
            f"config.json of {name!r} sets mlp_only_layers={short(alone)}, no list of layers; correct it."
        )
    first = raw.get("first_k_dense_replace") or raw.get("moe_layer_start_index") or 0
    last = raw.get("moe_layer_end_index")
    last = count - 1 if last in (None, -1) else last
    if not _is_whole(last, 0):
        raise CheckpointError(f"config.json of {name!r} sets moe_layer_end_index={short(last)}; give a layer, or -1.")
    step = raw.get("decoder_sparse_step") or raw.get("moe_layer_interval") or 1
    sparse = [first <= layer <= last and layer not in alone and not (layer + 1) % step for layer in range(count)]
    return _some_sparse([not has for has in sparse], "first_k_dense_replace" if first else "the dense layers", name)


def _some_sparse(dense: list[bool], key: str, name: str) -> list[bool]:
    if all(dense):
        raise CheckpointError(f"config.json of {name!r} leaves no layer with experts; correct {key}.")
    return dense


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """RoPE's numbers, from one object or the older two places."""
    found: dict[str, Any] = {"partial_rotary_factor": raw.get("partial_rotary_factor")}
    for key in ("rope_scaling", "rope_parameters"):
        given = raw.get(key)
        found |= given if isinstance(given, Mapping) else {}
    trained = raw.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    return {"original_max_position_embeddings": trained, **found}


def _scaling(raw: Mapping[str, Any], name: str) -> Rope:
    """Scaling of RoPE; kinds that are not understood do not matter for predictions, and `run` refuses them."""
    found = _rope(raw)
    kind = found.get("rope_type") or found.get("type") or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        return PLAIN
    try:
        return Rope.of(found)
    except ScenarioError as error:
        raise CheckpointError(f"config.json of {name!r}, rope_parameters: {error}") from error


def _rope_theta(raw: Mapping[str, Any], family: Family | None) -> float:
    default = ModelConfig.rope_theta if family is None else family.rope_theta
    return float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or default)


def _head_dim(raw: Mapping[str, Any]) -> int:
    if raw.get("kv_lora_rank") is not None:
        return int(raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"])
    return int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])


def _dtype(raw: Mapping[str, Any]) -> Any:
    return raw.get("dtype") or raw.get("torch_dtype") or "float32"


def _check_sizes(raw: Mapping[str, Any], name: str) -> None:
    latent = raw.get("kv_lora_rank") is not None
    optional = [key for key in (*_OPTIONAL, *_LATENT) if raw.get(key) is not None]
    sizes = (*_SIZES, *(_LATENT if latent else ()), *optional)
    _refuse(sizes, lambda key: _is_whole(raw.get(key), 1), name, "positive integers")
    counts = [key for key in _COUNTS if raw.get(key) is not None]
    _refuse(counts, lambda key: _is_whole(raw[key], 0), name, "whole numbers")
    numbers = {key: raw[key] for key in _NUMBERS if raw.get(key) is not None}
    if "rope_theta" in _rope(raw):
        numbers["rope_theta in rope_parameters"] = _rope(raw)["rope_theta"]
    _refuse(numbers, lambda key: _is_positive(numbers[key]), name, "positive numbers")
    heads = raw["num_attention_heads"]
    groups = raw["num_key_value_heads"]
    if heads % groups:
        raise CheckpointError(
            f"config.json of {name!r} has {heads} query heads, no multiple of its {groups} key-value heads; "
            "correct one of them."
        )
    if _head_dim(raw) < 2 or _head_dim(raw) % 2:
        raise CheckpointError(f"config.json of {name!r} has head_dim {_head_dim(raw)}; RoPE turns pairs, make it even.")
    if raw["num_experts_per_tok"] > raw["num_local_experts"]:
        raise CheckpointError(f"config.json of {name!r} asks for more experts per token than it has; correct it.")


def _refuse(keys: Iterable[str], good: Callable[[str], bool], name: str, what: str) -> None:
    wrong = list(dict.fromkeys(key for key in keys if not good(key)))
    if wrong:
        raise CheckpointError(f"config.json of {name!r} needs {what} for {', '.join(wrong)}; correct them.")


def _is_whole(value: object, least: int) -> bool:
    return is_whole(value) and least <= value <= LARGEST


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 < value < math.inf


def _check_layers(raw: Mapping[str, Any], name: str) -> None:
    for key, values in _UNIFORM.items():
        if raw.get(key) is not None and raw[key] not in values:
            raise CheckpointError(
                f"config.json of {name!r} sets {key}={short(raw[key])}, which is not understood; use a model without."
            )


def _shared_width(raw: Mapping[str, Any]) -> int:
    width = raw.get("moe_intermediate_size") or raw["intermediate_size"]
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is not None and family.shared_in_code:
        return int(width)
    return int(raw.get("shared_expert_intermediate_size") or (raw.get("n_shared_experts") or 0) * width)


def _windows(raw: Mapping[str, Any], dense: Sequence[bool], family: Family | None, name: str) -> dict[str, Any]:
    """Fields for the order of the layers and their sliding windows."""
    windowed = _windowed(raw, family, name)
    given: dict[str, Any] = {"windowed_layers": sum(windowed)}
    usual = sorted(dense, reverse=True) == list(dense) and sum(windowed) in (0, len(windowed))
    if not usual:
        given["layers"] = fold(
            [LayerKind.of(dense=one, windowed=other) for one, other in zip(dense, windowed, strict=True)]
        )
    return given


def _windowed(raw: Mapping[str, Any], family: Family | None, name: str) -> list[bool]:
    """True for every layer with a sliding window."""
    kinds = raw.get("layer_types")
    if kinds is not None and not isinstance(kinds, list | tuple):
        raise CheckpointError(
            f"config.json of {name!r} sets layer_types={short(kinds)}, no list; give one for each layer."
        )
    if kinds is not None:
        unknown = [kind for kind in kinds if kind not in _ATTENTION]
        if unknown or len(kinds) != raw["num_hidden_layers"]:
            raise CheckpointError(
                f"config.json of {name!r} has {len(kinds)} layer_types, of unknown kinds {short(unknown)}; give one "
                f"for each layer, of {', '.join(_ATTENTION)}."
            )
    if kinds is None and raw.get("attention_chunk_size") is not None:
        return _chunked(raw, name)
    if raw.get("sliding_window") is None or raw.get("use_sliding_window") is False:
        return [False] * raw["num_hidden_layers"]
    everywhere = family is not None and family.window_everywhere
    if kinds is None and raw.get("use_sliding_window") and not everywhere:
        raise CheckpointError(f"config.json of {name!r} does not tell which layers have its window; add layer_types.")
    if kinds is None:
        return [True] * raw["num_hidden_layers"]
    return [kind != "full_attention" for kind in kinds]


def _chunked(raw: Mapping[str, Any], name: str) -> list[bool]:
    """True for every layer whose attention is limited to a chunk: those with RoPE (Llama 4)."""
    count = raw["num_hidden_layers"]
    rotated = raw.get("no_rope_layers")
    if rotated:
        if not isinstance(rotated, list | tuple) or len(rotated) != count:
            raise CheckpointError(f"config.json of {name!r} sets no_rope_layers={short(rotated)}; give one per layer.")
        return [bool(each) for each in rotated]
    step = raw.get("no_rope_layer_interval") or _NO_ROPE
    return [bool((layer + 1) % step) for layer in range(count)]


def _formats(raw: Mapping[str, Any], name: str) -> tuple[str | None, str | None]:
    """Formats of the experts and of the other weights, if each has one."""
    if _dtype(raw) not in tuple(DTYPES):
        raise CheckpointError(
            f"config.json of {name!r} has weights of {short(_dtype(raw))}; set dtype to one of {', '.join(DTYPES)}."
        )
    method = _quantisation(raw).get("quant_method")
    return _FORMATS[method] if method in tuple(_FORMATS) else (None, None)


def _quantisation(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    found = raw.get("quantization_config") or {}
    return found if isinstance(found, Mapping) else {"quant_method": found}


def _as_stored(model: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """The model with the formats of its operations, where those of experts and of others do not tell them."""
    config = _quantisation(raw)
    if config.get("quant_method") in tuple(_FORMATS):
        return model
    family = FAMILIES.get(str(raw.get("model_type")))
    names = TensorNames() if family is None else family.tensors
    return with_formats(model, stored_formats(quantisation_of(config, model.name), model, names))


def _from_catalogue(name: str, table: dict[str, Any]) -> ModelConfig:
    return model({key: value for key, value in table.items() if key not in ("source", "parameters")}, name=name)


models: Catalogue[ModelConfig] = Catalogue("models.toml", _from_catalogue)
