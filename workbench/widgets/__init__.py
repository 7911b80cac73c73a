"""What notebooks show: the dashboard, and the live strip and lane charts that it is made of."""

from workbench.widgets.dashboard import Dashboard
from workbench.widgets.gantt import Gantt
from workbench.widgets.strip import Strip

__all__ = ["Dashboard", "Gantt", "Strip"]
