"""The architectures that `run` executes: how their checkpoints name things, and what their layers have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """A decoder of Hugging Face's whose layers are grouped-query attention and a mixture of experts.

    Attributes
    ----------
    name, model_type : str
        As ``config.json`` has them.
    mixture : str
        What a layer calls its mixture of experts.
    gate, up, down : str
        What an expert calls its projections.
    experts_key : str
        Under which ``config.json`` has the number of experts.
    own_keys : tuple of str
        Keys of ``config.json`` that only some architectures have.
    qkv_bias : bool
        Biases on queries, keys and values.
    qk_norm : bool
        RMSNorm of every head of queries and keys, before RoPE.
    shared : bool
        One more expert that every token passes, times the sigmoid of a gate.
    rope_theta : float
    defaults : mapping
        What a ``config.json`` that leaves a key out means.
    only : mapping of str to tuple
        Values of keys with which its layers are of the kind that is executed; no entry but these will do.
    """

    name: str
    model_type: str
    mixture: str
    gate: str
    up: str
    down: str
    experts_key: str
    own_keys: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    shared: bool = False
    rope_theta: float = 1e6
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def expert(self, number: int) -> str:
        """What a layer calls one of its routed experts."""
        return f"{self.mixture}.experts.{number}"

    @property
    def shared_expert(self) -> str:
        """What a layer calls its shared expert; that expert's gate has the same name and ``_gate``."""
        return f"{self.mixture}.shared_expert"


MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    "block_sparse_moe",
    "w1",
    "w3",
    "w2",
    "num_local_experts",
    only={
        "sliding_window": (),
        "moe_intermediate_size": (),
        "shared_expert_intermediate_size": (0,),
        "norm_topk_prob": (True,),
    },
)
_QWEN = ("mlp", "gate_proj", "up_proj", "down_proj", "num_experts")
_QWEN_DEFAULTS = {"rms_norm_eps": 1e-6, "norm_topk_prob": False, "use_sliding_window": False}
QWEN2_MOE = Architecture(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    *_QWEN,
    own_keys=("moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
    qkv_bias=True,
    shared=True,
    rope_theta=1e4,
    defaults={**_QWEN_DEFAULTS, "shared_expert_intermediate_size": 5632},
    only={"use_sliding_window": (False,), "qkv_bias": (True,)},
)
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    *_QWEN,
    own_keys=("moe_intermediate_size", "norm_topk_prob"),
    qk_norm=True,
    rope_theta=1e4,
    defaults=_QWEN_DEFAULTS,
    only={"use_sliding_window": (False,), "attention_bias": (False,), "shared_expert_intermediate_size": (0,)},
)
"""The defaults are those of transformers' `Qwen2MoeConfig` and `Qwen3MoeConfig`."""
ARCHITECTURES = {known.name: known for known in (MIXTRAL, QWEN2_MOE, QWEN3_MOE)}


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """The architecture that a ``config.json`` names, if it is one of these."""
    found = config.get("architectures") or [config.get("model_type")]
    return next((known for known in ARCHITECTURES.values() if found in ([known.name], [known.model_type])), None)
