"""Llama 4: one routed expert per token beside a shared one, attention in chunks in three of four layers."""

from workbench.models.family import Family

FAMILY = Family("llama4_text", gguf="llama4", shared_in_code=True)
