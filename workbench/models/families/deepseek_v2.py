"""DeepSeek-V2: latent attention, dense first layers, shared experts."""

from workbench.models.family import Family

FAMILY = Family("deepseek_v2", keys={"num_local_experts": "n_routed_experts"})
