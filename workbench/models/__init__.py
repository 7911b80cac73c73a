"""Models: their sizes, the families that are understood, and the sources of descriptions.

Scenarios, stages and formulas take a `ModelConfig` and need nothing else of a model.
"""

from workbench.models.config import ModelConfig
from workbench.models.formats import bytes_per_weight
from workbench.models.generation import eos_token_ids
from workbench.models.huggingface import checkpoint, folder_of, model, models
from workbench.models.layers import LayerKind

__all__ = [
    "LayerKind",
    "ModelConfig",
    "bytes_per_weight",
    "checkpoint",
    "eos_token_ids",
    "folder_of",
    "model",
    "models",
]
