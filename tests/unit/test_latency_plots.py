"""Pictures of online serving show the numbers that they are given."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from workbench.plots.latency import layer_tokens, plot_attainment, plot_passes, plot_shares
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.layered_prefill import LayeredPrefill


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_shares_rise_to_one_and_show_the_objective():
    ax = plot_shares({"a": [3.0, 1.0, 2.0], "b": [5.0]}, limit=4.0, title="first tokens")
    line = ax.get_lines()[0]
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert line.get_ydata().tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    assert ax.get_lines()[-1].get_xdata() == [4.0, 4.0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]


def test_attainment_is_drawn_over_the_rate():
    ax = plot_attainment({"a": {1.0: 1.0, 2.0: 0.4}}, target=0.8)
    assert ax.get_lines()[0].get_xdata().tolist() == [1, 2]
    assert ax.get_lines()[0].get_ydata().tolist() == [1, 0.4]
    assert ax.get_lines()[1].get_ydata() == [0.8, 0.8]


@pytest.mark.parametrize("scheduler", [ChunkedPrefill(8), LayeredPrefill(8), ContinuousBatching()], ids=repr)
def test_every_token_passes_every_layer_once(scheduler):
    tokens = layer_tokens(scheduler, [30, 5], 4)
    assert tokens.sum(axis=1).tolist() == [35] * 4
    ax = plot_passes(tokens, title="passes")
    assert np.array_equal(ax.get_images()[0].get_array(), tokens)


def test_chunks_pass_all_layers_and_groups_take_turns():
    assert layer_tokens(ChunkedPrefill(8), [16], 2).tolist() == [[8, 8], [8, 8]]
    assert layer_tokens(LayeredPrefill(8), [16], 2).tolist() == [[16, 0], [0, 16]]
