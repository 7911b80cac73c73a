"""Mixtral: grouped queries, a few wide experts."""

from workbench.models.family import Family, TensorNames

FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    tensors=TensorNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    only={
        "sliding_window": (),
        "moe_intermediate_size": (),
        "shared_expert_intermediate_size": (0,),
        "norm_topk_prob": (True,),
    },
)
