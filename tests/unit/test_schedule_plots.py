"""Pictures of schedules side by side show the numbers that they are given."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from workbench.core.result import Result, Source
from workbench.core.timeline import Span, Timeline
from workbench.plots.schedules import (
    against_best,
    middle_layers,
    needed,
    plot_against_best,
    plot_busy,
    plot_layers,
    plot_needed,
    plot_rates,
)

RATES = {"simple": {1: 10.0, 2: 9.9, 8: 5.0}, "other": {1: 5.0, 2: 10.0, 8: 50.0}, "small": {1: 2.5}}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def layers_of(seconds: float, count: int = 6) -> Timeline:
    """A layer computes for its first half; its weights come in the second half of the one before."""
    spans = [Span("gpu", "Ea", -1.0, 0.0)]
    for layer in range(count):
        spans.append(Span("gpu", f"A{layer}a", layer * seconds, (layer + 0.5) * seconds))
        spans.append(Span("h2d", f"W{layer}.0", (layer - 0.5) * seconds, layer * seconds))
    return Timeline(spans, {"A": "compute", "W": "weights"})


def result(schedule: str, seconds: float, **facts: str) -> Result:
    busy = {"gpu": 0.5, "h2d": 0.25}
    given = {"busy": busy, "timeline": layers_of(seconds), "facts": {"requests": "1200", **facts}}
    return Result(Source.SIMULATED, schedule, "model", "machine", seconds=1.0, generated=200, processed=300, **given)


def test_layers_are_cut_from_end_to_end():
    cut = middle_layers(layers_of(2.0), 2)
    assert cut.seconds == pytest.approx(4.0)
    assert [(s.name, s.start, s.end) for s in cut if s.lane == "gpu"] == [("A2a", 1, 2), ("A3a", 3, 4)]
    assert [(s.name, s.start, s.end) for s in cut if s.lane == "h2d"] == [("W2.0", 0, 1), ("W3.0", 2, 3)]
    assert cut.labels == {"A": "compute", "W": "weights"}


def test_a_transfer_over_the_edge_is_cut_off():
    timeline = layers_of(2.0)
    timeline.spans.append(Span("d2h", "Q2a", 4.5, 5.5))
    assert [(s.start, s.end) for s in middle_layers(timeline, 2) if s.lane == "d2h"] == [(1.5, 2.5)]
    timeline.spans.append(Span("h2d", "W9", 0.0, 100.0))
    assert [(s.start, s.end) for s in middle_layers(timeline, 2) if s.name == "W9"] == [(0, 4)]


def test_parts_past_the_alphabet_belong_to_their_layer():
    timeline = layers_of(2.0)
    timeline.spans.append(Span("gpu", "B3p26", 7.0, 7.5))
    assert middle_layers(timeline, 2).seconds == pytest.approx(4.5)


def test_more_layers_than_there_are_is_refused():
    with pytest.raises(ValueError, match="6 layers were asked for of a timeline of 6"):
        middle_layers(layers_of(1.0), 6)


def test_layers_stand_on_one_time_axis():
    axes = plot_layers([result("fast", 1.0), result("slow", 3.0, deferred="2 of 8 late")])
    titles = [ax.get_title(loc="left") for ax in axes]
    assert titles[0] == "fast: 1 s per layer, 200 output tokens/s"
    assert titles[1] == "slow, deferred 2 of 8 late: 3 s per layer, 200 output tokens/s"
    assert {ax.get_xlim() for ax in axes} == {(0.0, 6.0)}
    assert [ax.get_xlabel() for ax in axes] == ["", "time"]


def test_busy_shares_are_written_beside_rate_and_requests():
    ax = plot_busy([result("fast", 1.0)])
    assert [text.get_text() for text in ax.texts] == ["50%", "25%"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["fast, 1,200 requests"]
    assert [tick.get_text() for tick in ax.child_axes[0].get_yticklabels()] == ["200 output tokens/s"]


def test_rates_and_their_shares_of_the_best():
    assert against_best(RATES)["simple"] == {1: 1.0, 2: 0.99, 8: 0.1}
    for plot, drawn in ((plot_rates, [10.0, 9.9, 5.0]), (plot_against_best, [1.0, 0.99, 0.1])):
        ax = plot(RATES, over="requests", title="picture")
        assert ax.get_lines()[0].get_xdata().tolist() == [1, 2, 8]
        assert ax.get_lines()[0].get_ydata().tolist() == pytest.approx(drawn)
        assert [text.get_text() for text in ax.get_legend().get_texts()] == list(RATES)
        assert (ax.get_xlabel(), ax.get_title(loc="left")) == ("requests", "picture")


def test_the_first_that_is_near_the_best_is_needed():
    assert needed(RATES, 0.02) == {1: "simple", 2: "simple", 8: "other"}
    assert needed(RATES, 0.001) == {1: "simple", 2: "other", 8: "other"}


def test_the_map_has_a_cell_for_each_place_and_white_where_nothing_fits():
    ax = plot_needed({10.0: RATES, 20.0: {"simple": {1: 1.0}, "other": {}}}, over="requests", along="link, GB/s")
    cells = ax.collections[0].get_array()
    assert np.array_equal(np.ma.filled(cells, -1), [[0, 0, 1], [0, -1, -1]])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["simple", "other"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "2", "8"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["10", "20"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("requests", "link, GB/s")
