"""Widgets of notebooks: the pipeline builder, the dashboard, their parts, and sliders over any picture."""

from workbench.widgets.builder import Builder, Dashboard
from workbench.widgets.explore import Explore
from workbench.widgets.parts.gantt import Gantt
from workbench.widgets.parts.strip import Strip
from workbench.widgets.stills import scenario_in

__all__ = ["Builder", "Dashboard", "Explore", "Gantt", "Strip", "scenario_in"]
