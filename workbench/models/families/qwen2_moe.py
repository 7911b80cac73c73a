"""Qwen1.5-MoE and Qwen2-MoE: biases before attention, a shared expert behind a gate."""

from workbench.models.family import Family, TensorNames

FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    gguf="qwen2moe",
    keys={"num_local_experts": "num_experts"},
    defaults={
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "shared_expert_intermediate_size": 5632,
    },
    rope_theta=1e4,
    tensors=TensorNames(shared="shared_expert"),
    own_keys=("moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
    qkv_bias=True,
    shared_gate=True,
    options=("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    only={"qkv_bias": (True,)},
    example={
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "norm_topk_prob": False,
    },
)
"""The defaults are those of transformers' `Qwen2MoeConfig`."""
