"""K-EXAONE: sliding windows in three of four layers, a dense first layer, shared experts."""

from workbench.models.family import Family

FAMILY = Family(
    "exaone_moe", gguf="exaone-moe", keys={"num_local_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
)
