"""Mixtral: grouped queries, a few wide experts."""

from workbench.models.family import Family, TensorNames

FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    gguf="llama",
    tensors=TensorNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    only={"moe_intermediate_size": (), "norm_topk_prob": (True,)},
)
