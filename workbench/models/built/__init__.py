"""Models as transformers builds them: on the meta device, without memory, counted tensor by tensor.

For models of types that the key table of `workbench.models.families` does not have.
"""

from workbench.models.built.network import EXTRA, built, hub_config

__all__ = ["EXTRA", "built", "hub_config"]
