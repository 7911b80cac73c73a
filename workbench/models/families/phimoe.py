"""Phi-3.5-MoE: the layers of Mixtral, with other norms."""

from workbench.models.family import Family

FAMILY = Family("phimoe")
