"""One layer: each of its tensors counts for the operation that reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.models.built.mixing import OUT, Mixer, mixing
from workbench.models.layers import Counted, LayerKind

_MIXERS = ("self_attn", "linear_attn", "self_attention", "attention", "attn", "mamba", "conv", "mixer")
"""Names of the modules that mix the tokens of a sequence."""
_ATTENTION = ("self_attn", "self_attention", "attention", "attn")
_ROUTED = re.compile(r"(^|\.)experts\.|^(mlp|block_sparse_moe|feed_forward)\.(in|out)put_linear\.")
_NUMBERED = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_SHARED = re.compile(r"(^|\.)shared_\w+\.")
_ROUTER = re.compile(r"^\w+\.(gate|router)(\.|$)")
_DENSE = re.compile(
    r"^(mlp|mlps\.\d+|feed_forward|ffn|mixer)\."
    r"(gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3|input_linear|output_linear)\.weight$"
)
_BEFORE = re.compile(r"^(attn_hc\.fn|input_layernorm\.mlp\.fc\d\.weight|attention_input\.query)$")
"""Matrices of the residual stream before attention: hyper-connections, gated norms, attention to earlier blocks."""
_BEHIND = re.compile(r"^(ffn_hc\.fn|post_attention_layernorm\.mlp\.fc\d\.weight|mlp_input\.query)$")
"""The same behind attention."""
_SMALL = re.compile(r"A_log|position_bias|static_weight|scale$")
"""Tensors of several dimensions that are no matrices."""


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer.

    Attributes
    ----------
    shapes : mapping of str to tuple of int
    mixers : mapping of str to module
        The modules that mix tokens.
    layer : module
    """

    shapes: Mapping[str, tuple[int, ...]]
    mixers: Mapping[str, Any]
    layer: Any

    @classmethod
    def of(cls, layer: Any) -> LayerTensors:
        """The tensors of a layer of transformers."""
        shapes = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
        named = {name: getattr(layer, name, None) for name in _MIXERS}
        mixers = {name: module for name, module in named.items() if module is not None and not _is_network(module)}
        return cls(shapes, mixers, layer)

    @cached_property
    def routed(self) -> dict[str, tuple[int, ...]]:
        """The tensors of routed experts."""
        return {
            name: shape
            for name, shape in self.shapes.items()
            if _ROUTED.search(name) and not _SHARED.search(name) and self.mixer_of(name) is None
        }

    @property
    def expert_counts(self) -> set[int]:
        """Numbers of experts: of tensors that hold all of them, and of those that each expert has."""
        stacked = {shape[0] for shape in self.routed.values() if len(shape) == 3}
        numbered = [int(found[1]) for found in map(_NUMBERED.search, self.routed) if found]
        return stacked | ({max(numbered) + 1} if numbered else set())

    @property
    def idle_choices(self) -> int:
        """Choices of the router that compute nothing."""
        counts = [
            module.num_router_classes - module.num_experts
            for module in self.layer.modules()
            if hasattr(module, "num_router_classes")
        ]
        return max(counts, default=0)

    def mixer_of(self, tensor: str) -> str | None:
        """The module that mixes tokens which a tensor is in."""
        return next((name for name in self.mixers if tensor.startswith(f"{name}.")), None)


def _is_network(module: Any) -> bool:
    """True if a module is a feed-forward network, dense or of experts."""
    return hasattr(module, "experts") or hasattr(module, "up_proj")


def kind_of_layer(tensors: LayerTensors, config: Any, number: int, experts: int, name: str) -> LayerKind:
    """Kind of a layer with so many experts, with all of its sizes.

    Raises
    ------
    CheckpointError
        If it has tensors or settings that are not understood.
    """
    what = f"layer {number} of {name!r} ({type(tensors.layer).__name__})"
    if any(hasattr(getattr(tensors.layer, part, None), "experts") for part in _ATTENTION):
        raise CheckpointError(f"{what} has experts in its attention, which is not understood; use another model.")
    counts = dict.fromkeys(("qkv", "out_proj", "route", "unrouted", "expert", "expert_vectors", "vectors"), 0)
    for tensor, shape in tensors.shapes.items():
        place = _place(tensors, tensor, shape)
        if place is None:
            raise CheckpointError(
                f"{what} has {tensor} of the shape {shape}, which is not understood; use another model, or describe "
                "it with ModelConfig."
            )
        counts[place] += math.prod(shape)
    counts["expert"] //= experts
    kinds = getattr(config, "layer_types", None)
    words = kinds[number] if kinds else None
    mixers = [Mixer.of(part, module, tensors.shapes) for part, module in tensors.mixers.items()]
    own = mixing(mixers, config, words, what)
    windowed = own.sliding_window is not None
    return LayerKind(not tensors.routed, windowed, replace(own, counted=Counted(**counts)))


def _place(tensors: LayerTensors, tensor: str, shape: tuple[int, ...]) -> str | None:
    """The place in `Counted` of a tensor; None if it is not understood."""
    if tensor in tensors.routed:
        return "expert_vectors" if "bias" in tensor else "expert"
    each_alone = len(shape) == 3 and shape[1] == 1  # a convolution of every channel alone
    if len(shape) == 1 or each_alone or _SMALL.search(tensor):
        return "vectors"
    mixer = tensors.mixer_of(tensor)
    if mixer is not None:
        part = tensor.removeprefix(f"{mixer}.").split(".")[0]
        return "out_proj" if part in OUT else "qkv"
    if _SHARED.search(tensor) or _DENSE.search(tensor):
        return "unrouted"
    if tensors.routed and _ROUTER.search(tensor):
        return "route" if len(shape) == 2 else None
    if _BEFORE.search(tensor):
        return "qkv"
    return "out_proj" if _BEHIND.search(tensor) else None
