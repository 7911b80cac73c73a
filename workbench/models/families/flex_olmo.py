"""FlexOlmo: grouped queries, all experts of one width."""

from workbench.models.family import Family

FAMILY = Family("flex_olmo", keys={"num_local_experts": "num_experts"})
