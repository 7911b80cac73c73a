"""DeepSeek-V2: latent attention, dense first layers, shared experts, a softmax router with groups."""

from workbench.models.family import LATENT, Family, TensorNames

FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    gguf="deepseek2",
    keys={"num_local_experts": "n_routed_experts"},
    defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False, "topk_method": "greedy"},
    rope_theta=1e4,
    tensors=TensorNames(shared="shared_experts"),
    interleaved=True,
    exact_router=True,
    options=(
        *LATENT,
        "first_k_dense_replace",
        "n_group",
        "n_shared_experts",
        "routed_scaling_factor",
        "topk_group",
    ),
    only={
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "sliding_window": (),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
)
"""The defaults are those of transformers' `DeepseekV2Config`."""
