"""Widgets of notebooks: the pipeline builder, the dashboard, what explores, their parts, and sliders over pictures."""

from workbench.widgets.builder import Builder, Dashboard
from workbench.widgets.explore import Explore, Sliders
from workbench.widgets.parts.gantt import Gantt
from workbench.widgets.parts.strip import Strip
from workbench.widgets.stills import scenario_in

__all__ = ["Builder", "Dashboard", "Explore", "Gantt", "Sliders", "Strip", "scenario_in"]
