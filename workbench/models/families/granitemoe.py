"""Granite MoE: grouped queries, all experts of one width."""

from workbench.models.family import Family

FAMILY = Family("granitemoe")
