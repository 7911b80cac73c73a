"""Granite MoE: factors of the embedding, the attention scores, each sublayer and the logits."""

from workbench.models.family import Family, Stacked, TensorNames

FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    gguf="granitemoe",
    defaults={"rms_norm_eps": 1e-6, "attention_multiplier": 1.0},
    rope_theta=1e4,
    tensors=TensorNames(
        "block_sparse_moe",
        router="router.layer",
        gate_up=(Stacked("input_linear.weight"),),
        down_stack=(Stacked("output_linear.weight"),),
    ),
    out_bias=True,
    options=(
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ),
    only={"sliding_window": (), "moe_intermediate_size": (), "norm_topk_prob": (True,)},
)
"""The defaults are those of transformers' `GraniteMoeConfig`."""
