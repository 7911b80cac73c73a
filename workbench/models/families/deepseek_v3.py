"""DeepSeek-V3 and R1: latent attention, dense first layers, one shared expert."""

from workbench.models.family import Family

FAMILY = Family("deepseek_v3", keys={"num_local_experts": "n_routed_experts"})
