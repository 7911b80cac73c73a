"""The operations that a ``quantization_config`` quantises, and their bytes per weight."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.units import DTYPE_BYTES, is_whole
from workbench.models.config import ModelConfig
from workbench.models.family import TensorNames
from workbench.models.formats.stored import STORED_BYTES, Formats

_SCALE_BITS = 16
"""Bits of a group's scale in integer formats (AWQ, GPTQ, compressed-tensors)."""
_FLOAT_SCALE_BITS = 8
"""Bits of a group's scale in floats with small groups: 16 weights in NVFP4, 32 in MXFP4 and MXFP8."""
_SMALL_GROUP = 32
_ALGORITHMS = {
    "FP8": 1.0,
    "FP8_PB_WO": 1.0,
    "FP8_PER_CHANNEL_PER_TOKEN": 1.0,
    "MXFP8": 1.0 + 1 / 32,
    "NVFP4": STORED_BYTES["nvfp4"],
    "NVFP4_AWQ": STORED_BYTES["nvfp4"],
    "W4A16_NVFP4": STORED_BYTES["nvfp4"],
}
"""Bytes per weight by ``quant_algo`` of NVIDIA's modelopt."""
_MULTIMODAL = (
    ("model.", "language_model.model."),
    ("model.", "model.language_model."),
    ("lm_head", "language_model.lm_head"),
)
"""Beginnings of names, and what patterns of multimodal models have in their place."""
_LINEAR = "Linear"
"""The class of all modules that are quantised, in the place of a pattern."""


def grouped(bits: float, group: int | None, *, scale: float = _SCALE_BITS, zero: float = 0.0) -> float:
    """Bytes per weight if every group of so many weights has a scale and a zero point of so many bits.

        (bits + (scale + zero) / group) / 8

    Without a group, there are none.
    """
    return (bits + ((scale + zero) / group if group else 0.0)) / 8


@dataclass(frozen=True)
class Scheme:
    """One way in which some modules are quantised.

    Attributes
    ----------
    bytes : float
        Bytes per weight, scales included.
    targets : re.Pattern
        Names of modules to which it applies.
    """

    bytes: float
    targets: re.Pattern[str]


@dataclass(frozen=True)
class Quantisation:
    """The schemes of a ``quantization_config``, and the modules that none of them applies to."""

    schemes: tuple[Scheme, ...]
    ignored: re.Pattern[str]

    def bytes_of(self, module: str) -> float | None:
        """Bytes per weight of a module; None if it is not quantised."""
        names = (module, *(module.replace(plain, other, 1) for plain, other in _MULTIMODAL if module.startswith(plain)))
        if any(self.ignored.fullmatch(name) for name in names):
            return None
        for scheme in self.schemes:
            if any(scheme.targets.fullmatch(name) for name in names):
                return scheme.bytes
        return None


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    """An expression for the full names of modules that one of the patterns names, or that are in what it names.

    A pattern is ``re:`` and a regular expression for the beginning, or one or several parts of a name, with ``*``.
    """
    expressions = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            expressions.append(f"(?:{pattern[3:]}).*")
        else:
            part = re.escape(pattern).replace(r"\*", ".*")
            expressions.append(rf"(?:.*\.)?{part}(?:\..*)?")
    return re.compile("|".join(f"(?:{each})" for each in expressions) or r"(?!)")


_REMEDY = "remove it and set formats with dataclasses.replace"


def quantisation_of(config: Mapping[str, Any], name: str, *, remedy: str = _REMEDY) -> Quantisation:
    """The schemes of a ``quantization_config`` by AWQ, GPTQ, compressed-tensors or modelopt.

    Parameters
    ----------
    config : mapping
        The object ``quantization_config`` of a ``config.json``.
    name : str
        Name of the model, for errors.
    remedy : str
        What an error says is to be done.

    Raises
    ------
    CheckpointError
        If the method, or one of its settings, is not understood.

    Notes
    -----
    Sizes are those of the packed tensors that the methods' libraries write: integers have a scale of 16 bits per group,
    and AWQ and GPTQ a zero point of as many bits as a weight (general knowledge). Scales of whole rows, columns and
    blocks of 128 x 128 are left out.
    """
    method = config.get("quant_method")
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "modelopt": _modelopt}
    if method not in readers:
        raise CheckpointError(
            f"config.json of {name!r} has weights quantised by {short(method)}; known are fp8, mxfp4, "
            f"{', '.join(readers)}. Remove quantization_config and set formats with dataclasses.replace."
        )
    try:
        return readers[method](config)
    except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
        raise CheckpointError(
            f"config.json of {name!r} has a quantization_config that is not understood ({error}); {remedy}."
        ) from error


def _awq(config: Mapping[str, Any]) -> Quantisation:
    bits = _whole(config, "bits", "w_bit")
    zero = bits if config.get("zero_point", True) else 0
    each = grouped(bits, _group(config, "group_size", "q_group_size"), zero=zero)
    return Quantisation((_of_all(each),), _any_of(["lm_head", *_patterns(config, "modules_to_not_convert")]))


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    bits = _whole(config, "bits")
    rules = config.get("dynamic") or {}
    otherwise = [rule for rule in rules if not str(rule).startswith("-:")]
    if otherwise:
        raise ValueError(f"dynamic has {short(otherwise[0])}, a rule with other bits")
    skipped = [f"re:{rule[2:]}" for rule in rules]
    head = [] if config.get("lm_head") else ["lm_head"]
    scheme = _of_all(grouped(bits, _group(config, "group_size"), zero=bits))
    return Quantisation((scheme,), _any_of([*head, *skipped, *_patterns(config, "modules_to_not_convert")]))


def _compressed(config: Mapping[str, Any]) -> Quantisation:
    sparsity = (config.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise ValueError(f"its weights are sparse, in the format {short(sparsity)}")
    return Quantisation(_groups(config), _any_of(_patterns(config, "ignore")))


def _modelopt(config: Mapping[str, Any]) -> Quantisation:
    ignored = _any_of([*_patterns(config, "ignore"), *_patterns(config, "exclude_modules")])
    if config.get("config_groups"):
        return Quantisation(_groups(config), ignored)
    algorithm = config.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"quant_algo is {short(algorithm)}, not one of {', '.join(_ALGORITHMS)}")
    return Quantisation((_of_all(_ALGORITHMS[algorithm]),), ignored)


def _of_all(each: float) -> Scheme:
    """A scheme for all modules."""
    return Scheme(each, _any_of(["*"]))


def _groups(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Schemes of ``config_groups``; groups of activations alone are none."""
    found = []
    for group in config["config_groups"].values():
        weights = group.get("weights")
        if weights:
            targets = ["*" if each == _LINEAR else each for each in _patterns(group, "targets")]
            found.append(Scheme(_bytes_of_weights(weights), _any_of(targets or ["*"])))
    if not found:
        raise ValueError("config_groups has no group with weights")
    return tuple(found)


def _bytes_of_weights(weights: Mapping[str, Any]) -> float:
    bits = _whole(weights, "num_bits")
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise ValueError(f"type is {short(kind)}, not int or float")
    group = _group(weights, "group_size") if weights.get("group_size") else None
    if kind == "float":
        small = group is not None and group <= _SMALL_GROUP
        return grouped(bits, group, scale=_FLOAT_SCALE_BITS if small else _SCALE_BITS)
    return grouped(bits, group, zero=0 if weights.get("symmetric", True) else bits)


def _whole(config: Mapping[str, Any], *keys: str) -> int:
    """Bits of a weight, from the first of the keys that is there."""
    found = next((config[key] for key in keys if config.get(key) is not None), None)
    if not is_whole(found) or not 1 <= found <= 16:
        raise ValueError(f"{keys[0]} is {short(found)}, no number of bits from 1 to 16")
    return int(found)


def _group(config: Mapping[str, Any], *keys: str) -> int | None:
    """Weights that share a scale; None for whole rows, which are written as -1."""
    found = next((config[key] for key in keys if config.get(key) is not None), -1)
    if found == -1:
        return None
    if not is_whole(found) or found < 1:
        raise ValueError(f"{keys[0]} is {short(found)}, no number of weights")
    return int(found)


def _patterns(config: Mapping[str, Any], key: str) -> list[str]:
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{key} is {short(found)}, no list of names")
    return found


def stored_formats(quantisation: Quantisation, model: ModelConfig, names: TensorNames) -> tuple[Formats, ...]:
    """Bytes per weight of every layer's operations that are quantised in some layer, and of a quantised head.

    The mean counts where only some modules of an operation are quantised. Embedding and routers never are (general
    knowledge).

    Parameters
    ----------
    names : TensorNames
        Names of the modules in the model's checkpoints.
    """
    head = None if model.tie_word_embeddings else quantisation.bytes_of("lm_head")
    quantised = set() if head is None else {"head"}
    found: list[dict[str, float]] = []
    for layer, kind in enumerate(model.layer_kinds):
        formats = {} if head is None else {"head": head}
        for operation, modules in _modules(model.of_kind(kind), names, layer).items():
            each, any_quantised = _mean_of(modules, quantisation, DTYPE_BYTES[model.dtype])
            formats[operation] = each
            quantised |= {operation} if any_quantised else set()
        found.append(formats)
    return tuple(_only(quantised, formats) for formats in found)


def _only(operations: set[str], formats: Mapping[str, float]) -> Formats:
    return tuple((operation, each) for operation, each in formats.items() if operation in operations)


def _mean_of(modules: Sequence[tuple[str, float]], quantisation: Quantisation, usual: float) -> tuple[float, bool]:
    """Mean bytes per weight of some modules, and True if one of them is quantised."""
    sizes = [(quantisation.bytes_of(module), params) for module, params in modules]
    total = sum(params * (usual if each is None else each) for each, params in sizes)
    return total / sum(params for _, params in sizes), any(each is not None for each, _ in sizes)


Modules = dict[str, list[tuple[str, float]]]
"""Names of modules, with parameters that are right to a factor, by the operation that reads them."""


def _modules(model: ModelConfig, names: TensorNames, layer: int) -> Modules:
    """The modules of a layer, of a model whose layers are all of its kind."""
    begin = f"{names.layers}.{layer}"
    found = _attention_modules(model, names, f"{begin}.{names.attention}")
    network = f"{begin}.mlp" if model.dense_layers else f"{begin}.{names.mixture}.{names.shared or 'shared_experts'}"
    projections = (names.gate, names.up, names.down)
    if model.unrouted_params:
        found["shared_experts"] = [(f"{network}.{each}", 1.0) for each in projections]
    if not model.dense_layers:
        found["experts"] = [(f"{begin}.{names.expert(0)}.{each}", 1.0) for each in projections]
    return found


def _attention_modules(model: ModelConfig, names: TensorNames, begin: str) -> Modules:
    hidden = model.hidden_size
    out = (f"{begin}.{names.out}", float(model.attn_size * hidden))
    if not model.kv_lora_rank:
        if names.qkv:
            return {"qkv": [(f"{begin}.{names.qkv}", 1.0)], "out_proj": [out]}
        sizes = (("q_proj", model.q_size), ("k_proj", model.kv_size), ("v_proj", model.kv_size))
        return {"qkv": [(f"{begin}.{name}", float(size)) for name, size in sizes], "out_proj": [out]}
    latent = model.kv_lora_rank
    keys = latent * model.num_attention_heads * (model.qk_nope_head_dim or 0)
    before = [(f"{begin}.kv_a_proj_with_mqa", float(hidden * model.kv_elements)), (f"{begin}.kv_b_proj", float(keys))]
    rank = model.q_lora_rank
    if rank:
        before.append((f"{begin}.q_a_proj", float(hidden * rank)))
        before.append((f"{begin}.q_b_proj", float(rank * model.q_size)))
    else:
        before.append((f"{begin}.q_proj", float(hidden * model.q_size)))
    return {"qkv": before, "out_proj": [out, (f"{begin}.kv_b_proj", float(model.attn_size * latent))]}
