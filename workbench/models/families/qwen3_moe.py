"""Qwen3-MoE: a norm of every head of queries and keys, many small experts."""

from workbench.models.family import Family, HeadNorm

FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    gguf="qwen3moe",
    keys={"num_local_experts": "num_experts"},
    defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False, "use_sliding_window": False},
    rope_theta=1e4,
    own_keys=("moe_intermediate_size", "norm_topk_prob"),
    qk_norm=HeadNorm.EACH,
    window_everywhere=True,
    options=("decoder_sparse_step", "mlp_only_layers"),
    example={"rms_norm_eps": 1e-6, "moe_intermediate_size": 20},
)
"""The defaults are those of transformers' `Qwen3MoeConfig`."""
