"""Pictures of results, timelines, schedules and latencies, and the bars and labels that pictures share.

A picture of one paper's equations lies with that paper's model, one of a benchmark with the benchmark.
"""

from workbench.plots.results import (
    COLOURS,
    PREDICTORS,
    SCHEDULE_COLOURS,
    TASK_COLOURS,
    frame_sweep,
    middle,
    plot_gains,
    plot_iterations,
    plot_lanes,
    plot_sweep,
    plot_throughput,
    plot_timeline,
    sweep_lines,
)

__all__ = [
    "COLOURS",
    "PREDICTORS",
    "SCHEDULE_COLOURS",
    "TASK_COLOURS",
    "frame_sweep",
    "middle",
    "plot_gains",
    "plot_iterations",
    "plot_lanes",
    "plot_sweep",
    "plot_throughput",
    "plot_timeline",
    "sweep_lines",
]
