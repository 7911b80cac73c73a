"""GLM-4.5: half of each head rotated, dense first layers, one shared expert, a sigmoid router with groups."""

from workbench.models.family import Family, HeadNorm, TensorNames

FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    gguf="glm4moe",
    keys={"num_local_experts": "n_routed_experts"},
    defaults={
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    rope_theta=1e4,
    tensors=TensorNames(shared="shared_experts"),
    qk_norm=HeadNorm.EACH,
    scoring="sigmoid",
    choice_bias=True,
    exact_router=True,
    options=(
        "attention_bias",
        "first_k_dense_replace",
        "n_group",
        "n_shared_experts",
        "routed_scaling_factor",
        "topk_group",
        "use_qk_norm",
    ),
    only={"sliding_window": ()},
)
"""The defaults are those of transformers' `Glm4MoeConfig`."""
