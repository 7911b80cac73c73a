"""GLM-4.7-Flash: latent attention, a dense first layer, one shared expert."""

from workbench.models.family import Family

FAMILY = Family("glm4_moe_lite", keys={"num_local_experts": "n_routed_experts"})
