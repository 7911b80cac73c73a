"""Pictures of deferral and skipping show the numbers that they are given."""

import matplotlib.pyplot as plt

from workbench.perfmodels.ktransformers.plots import plot_left_out


def test_every_way_is_a_line_over_the_experts_left_out():
    ax = plot_left_out({"deferred": {0: 5.0, 1: 6.0}, "skipped": {0: 5.0, 2: 8.0}}, ylabel="tokens", title="speed")
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}
    assert drawn == {"deferred": ([0, 1], [5.0, 6.0]), "skipped": ([0, 2], [5.0, 8.0])}
    assert (ax.get_ylabel(), ax.get_title(), ax.get_ylim()[0]) == ("tokens", "speed", 0)
    plt.close("all")
