"""HOW FAST, in closed form."""

from workbench.perfmodels.bound import bound

__all__ = ["bound"]
