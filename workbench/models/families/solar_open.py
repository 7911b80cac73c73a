"""Solar Open: grouped queries, one shared expert."""

from workbench.models.family import Family

FAMILY = Family("solar_open", keys={"num_local_experts": "n_routed_experts"})
