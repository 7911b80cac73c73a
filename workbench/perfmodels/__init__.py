"""Performance models in closed form (HOW FAST): the bound, and the models of five papers, imported on first use."""

import importlib
from typing import TYPE_CHECKING, Any

from workbench.perfmodels.bound import bound

if TYPE_CHECKING:
    from workbench.perfmodels import ktransformers, layered_prefill, moe_cap, moe_lens, moe_lightning

__all__ = ["bound", "ktransformers", "layered_prefill", "moe_cap", "moe_lens", "moe_lightning"]


def __getattr__(name: str) -> Any:
    """Import a paper's model on first use (PEP 562)."""
    if name in __all__:
        return importlib.import_module(f"workbench.perfmodels.{name}")
    raise AttributeError(f"module 'workbench.perfmodels' has no attribute {name!r}")
