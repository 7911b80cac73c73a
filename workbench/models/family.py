"""Model families: their keys in ``config.json``, the options of their layers, and the names of their tensors."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class HeadNorm(enum.Enum):
    """The RMSNorm of queries and keys before RoPE."""

    EACH = "each head"
    """Every head alone, with one weight of the head's width for all."""
    WHOLE = "all heads"
    """All heads of a token together, with a weight of their whole width."""


@dataclass(frozen=True)
class TensorNames:
    """Names of a layer's tensors in a checkpoint that differ among families; the defaults are those of most families.

    Attributes
    ----------
    mixture : str
        The mixture of experts.
    gate, up, down : str
        The projections of an expert.
    """

    mixture: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def expert(self, number: int) -> str:
        """Name of one routed expert."""
        return f"{self.mixture}.experts.{number}"

    @property
    def shared_expert(self) -> str:
        """Name of the shared expert; its gate has the same name with ``_gate`` added."""
        return f"{self.mixture}.shared_expert"


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face decoders whose layers are attention and a mixture of experts.

    A family with an `architecture` can be run; any other can only be predicted.

    Attributes
    ----------
    model_type : str
        The ``model_type`` in ``config.json``.
    architecture : str or None
        Name of the class in transformers, if `run` executes it.
    keys : mapping of str to str
        Keys of ``config.json`` by Mixtral's name for the same number, if the two differ.
    defaults : mapping
        Values of keys that a ``config.json`` may leave out.
    rope_theta : float
        RoPE's base where ``config.json`` has none.
    shared_in_code : bool
        True if every layer has one shared expert, as wide as a routed one, that ``config.json`` does not mention.
    tensors : TensorNames
    own_keys : tuple of str
        Keys of its ``config.json`` beside those of all families.
    qkv_bias : bool
        True if queries, keys and values have biases.
    qk_norm : HeadNorm or None
        RMSNorm of queries and keys before RoPE.
    shared_gate : bool
        True if the shared expert's output is multiplied by the sigmoid of a gate.
    only : mapping of str to tuple
        Values of keys that `run` can execute, beside an absent key; a checkpoint with another value is refused.
    example : mapping
        Fields of a small `ModelConfig` that show the family's options; the tests of all families run such a model.
    """

    model_type: str
    architecture: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 1e6
    shared_in_code: bool = False
    tensors: TensorNames = TensorNames()
    own_keys: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: HeadNorm | None = None
    shared_gate: bool = False
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
