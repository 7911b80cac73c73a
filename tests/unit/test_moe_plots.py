"""Pictures of a layer's routed experts, from runs made up so that every answer is known."""

import matplotlib as mpl
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from workbench.bench.moe.plots import plot_moe_speeds, plot_ridges
from workbench.bench.moe.speeds import MoeRun, MoeShape, MoeSpeeds

SHAPE = MoeShape("dense enough", 100, 100, experts=8, chosen=2)
SPEEDS = MoeSpeeds(
    SHAPE,
    "1 thread",
    read=1e9,
    multiply=60e9,
    runs=tuple(
        MoeRun(name, tokens, min(8, 2 * tokens), (tokens * slow * 1e-3,))
        for name, slow in (("ours", 1), ("theirs", 4))
        for tokens in (1, 16)
    ),
)


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def heights(ax, label):
    return list(next(line for line in ax.lines if line.get_label() == label).get_ydata())


def test_rates_stand_under_their_roof():
    ax = plot_moe_speeds(SPEEDS)
    assert heights(ax, "ours") == pytest.approx([120e3 / 1e-3 / 1e9] * 2)
    assert heights(ax, "theirs") == pytest.approx([120e3 / 4e-3 / 1e9] * 2)
    first, last = heights(ax, "memory and arithmetic allow")
    assert first == pytest.approx(120e3 / (2 * (60e3 + 200)) * 1e9 / 1e9)
    assert last == pytest.approx(16 * 120e3 / (2 * (240e3 + 16 * 200)) * 1e9 / 1e9)
    assert ax.get_title(loc="left") == "dense enough, 8 experts of 100 x 100, top 2\n1 thread"


def test_ratios_are_to_the_contender_named():
    ax = plot_moe_speeds(SPEEDS, against="theirs")
    assert heights(ax, "ours") == pytest.approx([4, 4])
    assert ax.get_ylabel() == "times as fast as theirs"
    with pytest.raises(ValueError, match="there is no contender 'nobody': give one of"):
        plot_moe_speeds(SPEEDS, against="nobody")


def test_ridges_stand_where_experts_over_chosen_put_them():
    sparse = MoeShape("sparse", 100, 100, experts=64, chosen=2)
    ax = plot_ridges([SHAPE, sparse], read=1e9, multiply=100e9)
    marks = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":"]
    assert marks == [400, 3200]
    curve = next(line for line in ax.lines if line.get_label().startswith("sparse: top 2 of 64, ridge 3,200"))
    assert max(curve.get_ydata()) <= 1
    assert ax.get_title(loc="left") == "0.1 TFLOP/s, 1 GB/s"
