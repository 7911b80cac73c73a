"""A model's description: its fields, and the sizes that follow from them for attention, networks and the whole."""

from workbench.models.config.fields import FORMATTED, LARGEST
from workbench.models.config.model import ModelConfig

__all__ = ["FORMATTED", "LARGEST", "ModelConfig"]
