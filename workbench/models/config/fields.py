"""Fields of a model's description, their checks, and the models of its kinds of layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short
from typing import Self

import numpy as np
import numpy.typing as npt

from workbench.core.errors import ScenarioError
from workbench.core.units import DTYPE_BYTES, WEIGHT_BYTES, is_number, is_whole
from workbench.models.families import FAMILIES, RUNNABLE
from workbench.models.family import Family
from workbench.models.layers import Counted, LayerKind, Layers, Pattern, Recurrence, Sparse, contradiction, fold, unfold
from workbench.models.rope import PLAIN, Rope

LARGEST = 2**40
"""Largest value of any size: products of a few sizes then stay within floats."""
FORMATTED = ("embed", "qkv", "out_proj", "route", "experts", "shared_experts", "head")
"""Operations whose weights may have a format of their own."""


@dataclass(frozen=True, repr=False)
class ModelFields:
    """Fields of a `ModelConfig`, which explains them; the models of its kinds of layers."""

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
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int = 0
    windowed_layers: int = 0
    dtype: str = "bf16"
    expert_dtype: str | None = None
    other_dtype: str | None = None
    coverage: tuple[tuple[float, float], ...] = ()
    norm_topk_prob: bool = True
    architecture: str | None = None
    path: Path | None = None
    layers: Layers = ()
    rope: Rope = PLAIN
    attention_bias: bool = False
    use_qk_norm: bool = True
    lm_head_bias: bool = False
    clip_qkv: float | None = None
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    counted: Counted | None = None
    recurrence: Recurrence | None = None
    sparse: Sparse | None = None
    chunked: bool = False
    idle_experts: int = 0
    outside_params: int = 0
    formats: tuple[tuple[str, float], ...] = ()

    def __repr__(self) -> str:
        """The fields, later ones only if they are set: saved digests of scenarios are made of this text."""
        values = {known.name: getattr(self, known.name) for known in fields(self)}
        later = ("counted", "recurrence", "sparse", "chunked", "idle_experts", "outside_params", "formats")
        told = ", ".join(f"{name}={value!r}" for name, value in values.items() if value or name not in later)
        return f"ModelConfig({told})"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.default == 0 else 1
            optional = field.default is None and value is None
            if field.type.startswith("int") and not optional:
                if not is_whole(value) or not least <= value <= LARGEST:
                    told = f"{self.name} has {field.name}={short(value)}"
                    raise ScenarioError(f"{told}; give a whole number from {least} on, up to 2**40.")
                object.__setattr__(self, field.name, int(value))
            if field.type.startswith("float") and not optional and not (is_number(value) and 0 < value < math.inf):
                raise ScenarioError(f"{self.name} has {field.name}={short(value)}; give a positive number.")
        for name, most, what in (
            ("num_experts_per_tok", self.num_local_experts, "experts"),
            ("first_k_dense_replace", self.num_hidden_layers, "layers"),
            ("windowed_layers", self.num_hidden_layers, "layers"),
        ):
            if getattr(self, name) > most:
                raise ScenarioError(f"{self.name} has {name}={getattr(self, name)}; give at most its {most} {what}.")
        for name, known in (("dtype", DTYPE_BYTES), ("expert_dtype", WEIGHT_BYTES), ("other_dtype", WEIGHT_BYTES)):
            value = getattr(self, name)
            if value not in (*known, *((None,) if name != "dtype" else ())):
                raise ScenarioError(f"{self.name} has {name}={value!r}; give one of {', '.join(known)}.")

        if self.architecture not in (None, *RUNNABLE):
            raise ScenarioError(
                f"{self.name} has architecture={self.architecture!r}; give one of {', '.join(RUNNABLE)}."
            )
        tokens, shares = zip(*self.coverage, strict=True) if self.coverage else ((1,), (1,))
        if not (tokens[0] >= 1 and all(a < b for a, b in pairwise(tokens)) and min(shares) > 0 and max(shares) <= 1):
            raise ScenarioError(f"{self.name} has coverage={self.coverage}; give shares of 0 to 1 for rising tokens.")
        counts = {
            "num_hidden_layers": self.num_hidden_layers,
            "first_k_dense_replace": self.first_k_dense_replace,
            "windowed_layers": self.windowed_layers,
        }
        problem = contradiction(self.layers, counts) if self.layers else None
        if problem:
            raise ScenarioError(f"{self.name} has {problem}.")
        for op, each in self.formats:
            if op not in FORMATTED or not (is_number(each) and 0 < each < math.inf):
                raise ScenarioError(
                    f"{self.name} has formats=({op!r}, {each!r}); give bytes per weight of {', '.join(FORMATTED)}."
                )

    @cached_property
    def layer_kinds(self) -> Pattern:
        """Kind of every layer, in order."""
        if self.layers:
            return unfold(self.layers)
        dense = self.first_k_dense_replace
        windowed = self.windowed_layers
        return tuple(
            LayerKind.of(dense=layer < dense, windowed=layer < windowed) for layer in range(self.num_hidden_layers)
        )

    def of_kind(self, kind: LayerKind) -> Self:
        """The model with as many layers, all of this kind."""
        return replace(
            self,
            first_k_dense_replace=self.num_hidden_layers if kind.dense else 0,
            windowed_layers=self.num_hidden_layers if kind.windowed else 0,
            layers=(),
            **kind.own.given(),
        )

    @cached_property
    def unlike(self) -> tuple[tuple[Self, int], ...]:
        """A model of each kind of layers, and the number of such layers; empty if no kind has sizes of its own."""
        if not any(kind.own.given() for pattern, _ in self.layers for kind in pattern):
            return ()
        return tuple((self.of_kind(kind), count) for kind, count in Counter(self.layer_kinds).items())

    def _sum(self, size: str) -> float:
        """Sum of a size of one layer over all layers, of which some have sizes of their own."""
        return float(sum(count * getattr(model, size) for model, count in self.unlike))

    def _mean(self, size: str) -> float:
        """Mean of a size of one layer over such layers."""
        return self._sum(size) / self.num_hidden_layers

    def _mean_of(self, count: Callable[[Self], npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """Mean over the layers, of which some have sizes of their own, of what is counted for a model of one kind."""
        total: npt.NDArray[np.float64] = np.sum([layers * count(model) for model, layers in self.unlike], axis=0)
        return total / self.num_hidden_layers

    def first(self, layers: int) -> Self:
        """The model of its first layers alone."""
        kinds = self.layer_kinds[:layers]
        return replace(
            self,
            num_hidden_layers=layers,
            first_k_dense_replace=sum(kind.dense for kind in kinds),
            windowed_layers=sum(kind.windowed for kind in kinds),
            layers=fold(kinds) if self.layers else (),
        )

    @property
    def family(self) -> Family:
        """Options of its layers and names of its tensors: Mixtral's where no architecture is named."""
        return RUNNABLE[self.architecture] if self.architecture else FAMILIES["mixtral"]
