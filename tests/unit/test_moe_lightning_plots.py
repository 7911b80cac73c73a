"""Pictures of the hierarchical roofline and of policies, and the published runs that they are compared with."""

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels.moe_lightning import Job, LayerTime, Mode, Policy, estimate
from workbench.perfmodels.moe_lightning.evaluation import published_runs, scaling_runs, two_a100s
from workbench.perfmodels.moe_lightning.hrm import performance
from workbench.perfmodels.moe_lightning.plots import plot_beside_measured, plot_layer_times, plot_roofline, plot_scaling
from workbench.perfmodels.moe_lightning.policy_search import search

L4 = machines["moe-lightning-s2-optimiser"]


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


# ------------------------------------------------------------------------------------------------------ published runs


def test_published_runs_are_those_of_the_paper():
    runs = published_runs()
    assert [run.label for run in runs] == [f"{s}, {n}" for s in ("S1", "S2") for n in (32, 64, 128, 256)]
    assert [run.tok_s for run in runs] == [63.0, 101.3, 97.73, 96.7, 203.0, 294.5, 217.5, 167.9]
    assert (runs[2].batch, runs[2].micro_batch) == (164 * 14, 164)
    assert {run.assumed.prompt_len for run in runs} == {77}


def test_their_batch_and_shares_are_what_the_optimiser_finds():
    """The last run's host had a little less memory free, so that its batch is another."""
    for run in published_runs()[:-1]:
        assert run.policy == search(run.assumed, Mode.ARTIFACT).policy


def test_they_are_predicted_at_the_rates_that_one_asks_for():
    run = published_runs()[0]
    assert run.assumed.machine.link.h2d == pytest.approx(16 * 2**30)
    assert run.calibrated.machine.link.h2d == pytest.approx(5.4299 * 2**30)
    for job in (run.assumed, run.calibrated):
        assert run.predict(job, Mode.FULL) == estimate(job, run.policy, Mode.FULL).gen_tok_s


def test_runs_on_several_gpus_have_their_throughput_by_number():
    first, *_ = scaling_runs()
    assert first.tok_s == {2: 5.38, 4: 14.9}
    assert (first.assumed.model, first.assumed.output_len) == (models["mixtral-8x22b"], 32)
    pair = replace(first.assumed, machine=machines["moe-lightning-s6-optimiser"])
    assert search(replace(first.assumed, gpus=2)) == search(pair)


def test_two_a100s_run_at_the_share_that_one_asks_for():
    assert two_a100s(1.0).gpu_bandwidth == 2 * two_a100s().gpu_bandwidth == 2 * 2039e9
    with pytest.raises(ValueError, match=r"gpu_efficiency=1\.5 is no share"):
        two_a100s(1.5)


# ------------------------------------------------------------------------------------------------------------- pictures


def test_the_turning_points_stand_on_the_roofs():
    ax = plot_roofline(L4, 32, "fp16", operations={"decode attention": 4})
    _, _, over_the_link, on_the_cpu, p1, p2, attention = (line.get_xydata() for line in ax.lines)
    assert p1[0] == pytest.approx([1.6e12 / L4.link.h2d, 1.6])
    assert p2[0] == pytest.approx([32 * L4.gpu.bandwidth / L4.link.h2d, 32 * L4.gpu.bandwidth / 1e12])
    for points, roof in ((p1, on_the_cpu), (p1, over_the_link), (p2, over_the_link)):
        assert np.interp(points[0, 0], *roof.T) == pytest.approx(points[0, 1], rel=0.01)
    reached = performance(32, over_the_link[:, 0], flops=104e12, bandwidth=1e15, link=L4.link.h2d)
    assert over_the_link[:, 1] == pytest.approx(np.asarray(reached) / 1e12)
    assert attention[0, 0] == 4
    assert [text.get_text() for text in ax.texts] == ["P1", "P2", "decode attention"]


def test_bars_are_the_times_and_the_longest_is_named():
    times = {"one": LayerTime(0.2, 0.1, 0.0, 0.0), "other": LayerTime(0.1, 0.1, 0.4, 0.0)}
    ax = plot_layer_times(times)
    assert [bar.get_width() for bar in ax.patches] == [0.2, 0.1, 0.0, 0.1, 0.1, 0.4]
    assert [text.get_text().strip() for text in ax.texts] == ["200 ms, limits", "400 ms, limits"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["link to the GPU", "GPU", "CPU"]


def test_predictions_stand_over_what_was_measured():
    ax = plot_beside_measured({"S1, 32": 63.0, "S2, 32": 203.0}, {"full": [41.0, 267.0]})
    assert [bar.get_height() for bar in ax.patches] == [63.0, 203.0]
    assert ax.lines[0].get_xydata().tolist() == [[0, 41.0], [1, 267.0]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["S1, 32", "S2, 32"]


def test_scaling_is_drawn_beside_proportion():
    ax = plot_scaling((2, 4, 8), {"paper": [10.0, 15.0, 20.0]}, measured={2: 5.0, 4: 14.0}, title="T4s")
    paper, proportion, measured = (ax.lines[place].get_ydata() for place in (0, 1, 2))
    assert (list(paper), list(proportion), list(measured)) == ([10, 15, 20], [10, 20, 40], [5, 14])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["paper", "measured", "in proportion to the GPUs"]


def test_layer_times_of_real_policies_are_drawn():
    job = Job(models["mixtral-8x7b"], L4, 512, 64)
    found = estimate(job, Policy(1024, 128), Mode.FULL).layer
    assert len(plot_layer_times({"FULL": found}).patches) == 4
