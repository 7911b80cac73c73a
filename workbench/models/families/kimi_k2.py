"""Kimi K2: the layers of DeepSeek-V3."""

from workbench.models.family import Family

FAMILY = Family("kimi_k2", keys={"num_local_experts": "n_routed_experts"})
