"""One model family: its keys in ``config.json``, the options of its layers, and the names of its tensors."""

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
    """Names of a layer's tensors in a checkpoint, where families differ; those of most families unless given.

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
        """Name of the shared expert; its gate has the same name and ``_gate``."""
        return f"{self.mixture}.shared_expert"


@dataclass(frozen=True)
class Family:
    """A decoder of Hugging Face's whose layers are attention and a mixture of experts.

    A family with an `architecture` can be run; any other can be predicted only.

    Attributes
    ----------
    model_type : str
        As ``config.json`` has it.
    architecture : str or None
        Name of the class in transformers, if `run` executes it.
    keys : mapping of str to str
        Keys of ``config.json`` by Mixtral's name for the same number, where the two differ.
    defaults : mapping
        Values of keys that a ``config.json`` may leave out.
    rope_theta : float
        RoPE's base where ``config.json`` has none.
    shared_in_code : bool
        True if every layer has one shared expert, as wide as a routed one, of which ``config.json`` says nothing.
    tensors : TensorNames
    own_keys : tuple of str
        Keys that its ``config.json`` has beside those that all families have.
    qkv_bias : bool
        True if queries, keys and values have biases.
    qk_norm : HeadNorm or None
        RMSNorm of queries and keys before RoPE.
    shared_gate : bool
        True if the shared expert's output is multiplied by the sigmoid of a gate.
    only : mapping of str to tuple
        Values of keys that `run` can execute, beside an absent one; a checkpoint with any other is refused.
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
