"""CAP diagrams and bandwidth against power: what is drawn."""

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from workbench.hardware.processors import processors
from workbench.models import models
from workbench.perfmodels.moe_cap.plots import (
    bandwidth_against_power,
    cap_diagram,
    plot_bandwidth_against_power,
    plot_cap,
    plot_cost,
    plot_coverage,
)

TWO = {name: models[name] for name in ("deepseek-v2-lite", "qwen1.5-moe-a2.7b")}
BOXES = {name: processors[name] for name in ("rtx-a6000", "a100-80gb-sxm")}


def diagram(**changes):
    given = {"batch": [1, 32, 64, 128], "context": 4000, "tpot": 0.25}
    return cap_diagram(TWO, BOXES, **(given | changes))


def test_a_diagram_has_a_line_per_model_and_a_verdict_per_box():
    data = diagram(smbu=0.25, smfu=0.25)
    assert set(data.lines) == set(TWO)
    assert set(data.fits()) == {(model, box) for model in TWO for box in BOXES}
    for name, line in data.lines.items():
        assert np.all(np.diff(line.bandwidth) > 0)
        assert data.practical[name].bandwidth == pytest.approx(4 * line.bandwidth)


def test_the_picture_shows_lines_and_boxes():
    ax = plot_cap(diagram(smbu=0.5))
    assert len(ax.lines) == 2 * len(TWO)
    assert len(ax.patches) == len(BOXES)
    solid, dashed = ax.lines[0].get_ydata(), ax.lines[1].get_ydata()
    assert dashed == pytest.approx(2 * np.asarray(solid))
    assert ax.patches[0].get_height() == pytest.approx(768)
    ops = plot_cap(diagram(), ops=True)
    assert ops.patches[0].get_height() == pytest.approx(154.8)
    plt.close("all")


def test_the_picture_says_what_was_asked_and_names_every_line_and_box():
    ax = plot_cap(diagram(smbu=0.5))
    said = [text.get_text() for text in (*ax.texts, *ax.get_legend().get_texts())]
    legend = {"the same at S-MBU 0.5", "needed, batch 1 (low end) to 128 (name)", "GPU has"}
    assert {*TWO, *BOXES, *legend, "1", "32", "64", "128"} == set(said)
    assert "250 ms" in ax.get_title("left")
    assert "4000 cached tokens" in ax.get_title("left")
    plt.close("all")


def test_skewed_routing_needs_less_bandwidth_between_one_and_many_sequences():
    even, skewed = (diagram(sigma=sigma).lines["deepseek-v2-lite"].bandwidth for sigma in (0.0, 1.42))
    assert skewed[0] == pytest.approx(even[0])
    assert np.all(skewed[1:] < even[1:])


def test_costs_are_stacked_per_million_tokens():
    ax = plot_cost(["a", "b"], {"hardware": [1e-6, 2e-6], "energy": [3e-6, 4e-6]})
    assert [text.get_text() for text in ax.texts] == [" 4", " 6"]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([1, 2, 3, 4])
    plt.close("all")


def test_coverage_is_drawn_as_given():
    ax = plot_coverage([1, 2, 4], {"uniform": [0.1, 0.2, 0.4]})
    assert list(ax.lines[0].get_ydata()) == [0.1, 0.2, 0.4]
    plt.close("all")


def test_a_processor_of_unknown_size_has_no_box():
    data = cap_diagram(TWO, {"xeon-8380": processors["xeon-8380"]}, batch=1, context=0, tpot=1)
    assert not plot_cap(data).patches
    assert not any(fit.memory for fit in data.fits().values())
    plt.close("all")


def test_the_whole_catalogue_is_drawn():
    ax = plot_cap(cap_diagram(models, processors, batch=2 ** np.arange(8), context=4000, tpot=0.25, smbu=0.5))
    plt.close("all")
    assert len(ax.lines) == 2 * len(models)


def test_what_does_not_fit_has_a_second_dot_that_offloads_and_draws_the_hosts_power_too():
    points = bandwidth_against_power(processors, 100e9, host_power=350)
    dots = {(point.name, point.offloaded): (point.power, point.bandwidth) for point in points}
    assert dots["h200-sxm", False] == (700, 4.8e12)
    assert dots["rtx-4090", False] == (450, 1008e9)
    assert dots["rtx-4090", True] == (800, pytest.approx(31.5e9 / 0.76))
    assert dots["xeon-8380", False] == (270, 204.8e9)
    assert not {("h200-sxm", True), ("xeon-8380", True)} & set(dots)
    assert ("gcp-t4-host", False) not in dots  # of unknown power
    ax = plot_bandwidth_against_power(points, {"batch 1": 1040e9})
    assert ax.lines[-1].get_ydata()[0] == pytest.approx(1040)
    plt.close("all")
