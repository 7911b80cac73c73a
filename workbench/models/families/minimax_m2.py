"""MiniMax-M2: grouped queries, many small experts."""

from workbench.models.family import Family

FAMILY = Family("minimax_m2", gguf="minimax-m2")
