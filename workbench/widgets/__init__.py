"""Widgets of notebooks: the dashboard, its live strip and lane charts, and sliders over any picture."""

from workbench.widgets.dashboard.dashboard import Dashboard
from workbench.widgets.explore import Explore
from workbench.widgets.parts.gantt import Gantt
from workbench.widgets.parts.strip import Strip

__all__ = ["Dashboard", "Explore", "Gantt", "Strip"]
