"""DeepSeek-V3 and R1: latent attention, dense first layers, one shared expert, a sigmoid router with groups."""

from workbench.models.family import LATENT, Family, TensorNames

FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    gguf="deepseek2",
    keys={"num_local_experts": "n_routed_experts"},
    defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": True},
    rope_theta=1e4,
    tensors=TensorNames(shared="shared_experts"),
    interleaved=True,
    scoring="sigmoid",
    choice_bias=True,
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
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "sliding_window": (),
        "topk_method": ("noaux_tc",),
    },
)
"""The defaults are those of transformers' `DeepseekV3Config`; groups, factors and dense layers must be told."""
