"""Bytes per weight of number formats, and models whose layers are stored in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from reprlib import repr as short

from workbench.core.errors import ScenarioError
from workbench.core.units import GROUPS, QUANTISED, WEIGHT_BYTES
from workbench.models.config import ModelConfig
from workbench.models.layers import fold

Formats = tuple[tuple[str, float], ...]
"""Bytes per weight by operation, as `ModelConfig.formats` has them."""

GGUF_BLOCKS = {
    "f64": (1, 8),
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "i64": (1, 8),
    "i32": (1, 4),
    "i16": (1, 2),
    "i8": (1, 1),
    "q1_0": (128, 18),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q8_1": (32, 40),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "q8_k": (256, 292),
    "iq1_s": (256, 50),
    "iq1_m": (256, 56),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq2_s": (256, 82),
    "iq3_xxs": (256, 98),
    "iq3_s": (256, 110),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
    "mxfp4": (32, 17),
    "nvfp4": (64, 36),
}
"""Weights of a block, and its bytes, of every type in GGUF files; scales included (GGML_QUANT_SIZES of the package
`gguf` 0.19.0)."""
STORED_BYTES: dict[str, float] = {
    **{name: size / weights for name, (weights, size) in GGUF_BLOCKS.items()},
    **WEIGHT_BYTES,
    **{f"{name}_g{group}": WEIGHT_BYTES[name] + 4 / group for name in QUANTISED for group in GROUPS},
}
"""Bytes per weight by name. ``int4_g128`` has a scale in fp32 per 128 weights; scales of larger blocks (0.02 %) are
left out."""


def bytes_per_weight(name: str) -> float:
    """Bytes per weight of a format, its scales included: 0.5625 for ``q4_k``.

    Raises
    ------
    ScenarioError
        If no format has this name.
    """
    if name not in STORED_BYTES:
        raise ScenarioError(f"the format {short(name)} is unknown; give one of {', '.join(STORED_BYTES)}.")
    return STORED_BYTES[name]


def with_formats(model: ModelConfig, layers: Sequence[Formats]) -> ModelConfig:
    """The model whose layers have these bytes per weight.

    Layers of other formats are of other kinds. An operation that a layer lacks gets the mean of the others there, which
    is also the model's own.
    """
    if len(set(layers)) == 1:
        return replace(model, formats=layers[0])
    found: dict[str, list[float]] = {}
    for formats in layers:
        for operation, each in formats:
            found.setdefault(operation, []).append(each)
    mean = {operation: sum(values) / len(values) for operation, values in found.items()}
    kinds = []
    for kind, formats in zip(model.layer_kinds, layers, strict=True):
        own = replace(kind.own, formats=tuple({**mean, **dict(formats)}.items()))
        kinds.append(replace(kind, own=own))
    return replace(model, formats=tuple(mean.items()), layers=fold(kinds))
