"""OLMoE: a norm over all heads of queries and keys together, many small experts."""

from workbench.models.family import Family, HeadNorm

FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    gguf="olmoe",
    keys={"num_local_experts": "num_experts"},
    defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
    rope_theta=1e4,
    own_keys=("norm_topk_prob",),
    qk_norm=HeadNorm.WHOLE,
    only={"sliding_window": (), "moe_intermediate_size": ()},
    example={"num_key_value_heads": 4},
)
"""The defaults are those of transformers' `OlmoeConfig`."""
