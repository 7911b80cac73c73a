"""Pictures of results, timelines, schedules and latencies, and the bars and labels that pictures share.

The package of a paper's model, or of a benchmark, has the pictures of its own.
"""

from workbench.plots.results import (
    COLOURS,
    PREDICTORS,
    SCHEDULE_COLOURS,
    TASK_COLOURS,
    middle,
    plot_gains,
    plot_iterations,
    plot_lanes,
    plot_throughput,
    plot_timeline,
    task_colour,
)
from workbench.plots.sweeps import plot_front, plot_sweep

__all__ = [
    "COLOURS",
    "PREDICTORS",
    "SCHEDULE_COLOURS",
    "TASK_COLOURS",
    "middle",
    "plot_front",
    "plot_gains",
    "plot_iterations",
    "plot_lanes",
    "plot_sweep",
    "plot_throughput",
    "plot_timeline",
    "task_colour",
]
