"""Llama 4: one routed expert per token beside a shared one; its attention in chunks counts as full."""

from workbench.models.family import Family

FAMILY = Family("llama4_text", gguf="llama4", shared_in_code=True)
