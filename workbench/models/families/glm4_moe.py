"""GLM-4.5: grouped queries, dense first layers, one shared expert."""

from workbench.models.family import Family

FAMILY = Family("glm4_moe", keys={"num_local_experts": "n_routed_experts"})
