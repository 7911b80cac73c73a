"""Rooflines and rates over threads: what is drawn."""

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from workbench.bench.cpu.plots import Roofline, plot_over_threads, plot_roofline, plot_rooflines, save_rooflines

POINTS = {"ours": [(1, 2e10), (4, 9e10)], "naive": [(4, 2e10)], "expert: ours": [(1, 1.5e10)]}
TWO = [Roofline(1, 3e10, 1.2e11, POINTS), Roofline(2, 4e10, 2.2e11, POINTS)]


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def lines(ax):
    return {line.get_label(): line for line in ax.get_lines()}


def test_the_roof_has_its_knee_where_reading_meets_multiplying():
    roof, *_ = plot_roofline(TWO[0]).get_lines()
    x, y = roof.get_data()
    np.testing.assert_allclose(y, np.minimum(30 * x, 120))
    assert x[0] < 1
    assert x[-1] > 4


def test_every_kernel_is_a_mark_and_another_kind_of_work_leaves_it_hollow():
    drawn = lines(plot_roofline(TWO[0]))
    assert drawn["ours"].get_xdata().tolist() == [1, 4]
    assert drawn["ours"].get_ydata().tolist() == [20, 90]
    assert drawn["expert: ours"].get_color() == drawn["ours"].get_color() != drawn["naive"].get_color()
    assert (drawn["expert: ours"].get_fillstyle(), drawn["ours"].get_fillstyle()) == ("none", "full")


def test_the_axes_are_logarithmic_and_say_their_units():
    ax = plot_roofline(TWO[1])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_xlabel() == "arithmetic intensity [FLOP/byte]"
    assert ax.get_ylabel() == "arithmetic rate [GFLOP/s]"
    assert {text.get_text() for text in ax.texts} == {"fp32 multiply-adds 220 GFLOP/s", "reading 40.0 GB/s"}


def test_one_picture_per_number_of_threads_and_one_legend(tmp_path):
    axes = plot_rooflines(TWO).axes
    assert [ax.get_title(loc="left") for ax in axes] == ["1 thread", "2 threads"]
    assert [ax.get_legend() is None for ax in axes] == [True, False]
    save_rooflines(TWO, tmp_path / "new" / "roof.png")
    assert (tmp_path / "new" / "roof.png").stat().st_size > 1000


def test_rates_over_threads_with_their_trend_and_what_is_required():
    ax = plot_over_threads({"ours": {2: 7e6, 1: 4e6}, "naive": {1: 1e6, 2: 2e6}}, required=9.5e6)
    drawn = lines(ax)
    assert drawn["ours"].get_xdata().tolist() == [1, 2]
    assert drawn["ours"].get_ydata().tolist() == [4, 7]
    assert drawn["required"].get_ydata()[0] == 9.5
    trends = [line.get_ydata().tolist() for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert trends == [[4, 8], [1, 2]]
    assert ax.get_ylabel() == "KV entries attended [million/s]"


def test_without_a_requirement_there_is_no_line():
    assert "required" not in lines(plot_over_threads({"ours": {1: 4e6}}))
