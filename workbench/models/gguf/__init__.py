"""GGUF files: the sizes of the model in them, and the bytes of each of its operations."""

from workbench.models.gguf.contents import GgufModel, read_gguf

__all__ = ["GgufModel", "read_gguf"]
