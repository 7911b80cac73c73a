"""ERNIE 4.5: RoPE of neighbours, dense first layers, shared experts, a bias for the choice of experts."""

from workbench.models.family import Family, TensorNames

FAMILY = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    gguf="ernie4_5-moe",
    keys={
        "num_local_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
    },
    defaults={"moe_layer_start_index": 1, "norm_topk_prob": True, "moe_num_shared_experts": 2},
    rope_theta=5e5,
    tensors=TensorNames(
        shared="shared_experts",
        choice_bias="moe_statics.e_score_correction_bias",
        choice_bias_in_row=True,
    ),
    interleaved=True,
    choice_bias=True,
    exact_router=True,
    kept_router=True,
    only={"use_bias": (False,), "sliding_window": (), "norm_topk_prob": (True,)},
)
"""The defaults are those of transformers' `Ernie4_5_MoeConfig`."""
