"""Exploring: fields of a scenario as controls and as axes of pictures, and the arguments of functions that draw."""

from workbench.widgets.explore.sliders import Sliders
from workbench.widgets.explore.view import Explore

__all__ = ["Explore", "Sliders"]
