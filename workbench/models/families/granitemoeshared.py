"""Granite MoE with shared experts."""

from workbench.models.family import Family

FAMILY = Family(
    "granitemoeshared", gguf="granitemoe", keys={"shared_expert_intermediate_size": "shared_intermediate_size"}
)
