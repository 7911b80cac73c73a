"""Pictures of MoE-Lens' equations: that they show what the equations give, and what they start from."""

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from workbench.core.errors import ScenarioError
from workbench.hardware import machines
from workbench.models import models
from workbench.perfmodels import moe_lens
from workbench.perfmodels.moe_lens.plots import (
    plot_kv_life,
    plot_over_output_len,
    plot_saturation,
    plot_stage1_map,
    plot_utilisation_curves,
    plot_utilisation_map,
)

A40, MIXTRAL = machines["a40"], models["mixtral-8x7b"]


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def host():
    return moe_lens.streaming(MIXTRAL, A40)


# --------------------------------------------------------------------------------------- what the equations start from


def test_streaming_takes_its_numbers_from_model_and_machine(host):
    assert host.pass_seconds == pytest.approx(2 * MIXTRAL.params / 19.5e9, rel=1e-5)
    assert host.gpu_tok_s == pytest.approx(84.7e12 / MIXTRAL.flops_per_token())
    assert host.pass_tokens == pytest.approx(host.gpu_tok_s * host.pass_seconds)
    sizes = {"experts": 8, "chosen": 2, "expert_ratio": 14336 / 4096, "group_size": 4}
    assert host.intensity == pytest.approx(moe_lens.intensity(1, **sizes), rel=1e-4)
    assert host.kv_tokens("70GB") == 70e9 / 131072


def test_another_link_changes_the_pass_and_not_the_gpu(host):
    fast = moe_lens.streaming(MIXTRAL, A40, link="39GB/s")
    assert fast.pass_seconds == pytest.approx(host.pass_seconds / 2)
    assert fast.gpu_tok_s == host.gpu_tok_s
    with pytest.raises(ValueError, match=r"link .* is not a quantity"):
        moe_lens.streaming(MIXTRAL, A40, link="fast")
    with pytest.raises(ScenarioError, match="no known FLOP rate for fp16"):
        moe_lens.streaming(replace(MIXTRAL, dtype="fp16"), A40)


def test_experts_in_a_smaller_format_shorten_the_pass_and_raise_the_intensity(host):
    small = moe_lens.streaming(replace(MIXTRAL, expert_dtype="int8"), A40)
    assert 0.5 < small.pass_seconds / host.pass_seconds < 0.52
    assert 1.9 < small.intensity / host.intensity < 2
    assert small.gpu_tok_s == host.gpu_tok_s


def test_stages_by_capacity_are_the_equations_by_tokens_and_blocks(host):
    tokens, g = 70e9 / 131072, np.array([32.0, 256.0])
    rates = {"block": 16, "pass_seconds": host.pass_seconds, "pass_tokens": host.pass_tokens}
    job = (98, g, 20_000, tokens // 16)
    roof = moe_lens.stage1(98, g, tokens, host.pass_seconds, host.gpu_tok_s) * g / (98 + g)
    assert host.stage1(98, g, "70GB") == pytest.approx(roof)
    assert host.stage2(98, g, 20_000, "70GB").gen_tok_s == pytest.approx(moe_lens.stage2(*job, **rates).gen_tok_s)
    assert host.separated(98, g, 20_000, "70GB") == pytest.approx(moe_lens.separated_tok_s(*job, **rates))
    printed = host.stage2(128, 512, 74_000, 1e15, eq12=moe_lens.Eq12.PAPER).gen_tok_s
    assert printed > host.stage1(128, 512, 1e15) > host.stage2(128, 512, 74_000, 1e15).gen_tok_s


# ------------------------------------------------------------------------------------------------------------- pictures


def test_knees_stand_where_the_gpu_is_saturated():
    ax = plot_saturation({"A40": 150e12, "L40": 181e12}, 32e9, 0.25)
    knees = [line.get_xydata()[0].tolist() for line in ax.lines if line.get_marker() == "o"]
    assert knees == [[18750, 150], [22625, 181]]
    slope = ax.lines[0].get_xydata()[1]
    assert slope[1] / slope[0] == pytest.approx(32e9 * 0.25 / 1e12)
    assert "A40: from 18,750 tokens" in [text.get_text() for text in ax.texts]


def test_the_area_of_a_life_is_what_pme_divides_by():
    ax = plot_kv_life([(98, 256), (98, 32)])
    first = ax.lines[0].get_xydata()
    area = first[1:3, 1].mean() * first[2, 0]
    assert (98 + 256) / area == pytest.approx(moe_lens.parallelism_memory_efficiency(98, 256))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "98 + 256 tokens: PME 0.0061",
        "98 + 32 tokens: PME 0.036",
    ]


def test_the_map_of_stage_1_has_its_marks_and_a_line_where_the_gpu_is_full(host):
    ax = plot_stage1_map(host, "70GB", marks={"MTBench": (98, 32)})
    mesh, full = ax.collections[:2]
    shares = np.asarray(mesh.get_array())
    assert shares.max() == 1 > shares.min() > 0
    line = np.concatenate([path.vertices for path in full.get_paths()])
    found = moe_lens.stage1_utilisation(line[:, 0], line[:, 1], host.kv_tokens("70GB"), host.pass_tokens)
    assert found == pytest.approx(1, abs=0.05)
    assert ax.lines[0].get_xydata().tolist() == [[98, 32]]
    assert ax.texts[0].get_text() == "MTBench"


def test_a_map_without_a_full_gpu_has_no_line(host):
    assert len(plot_stage1_map(host, "1GB").collections) == 1
    assert len(plot_utilisation_map([8, 16], [8, 16], np.ones((2, 2))).collections) == 1


def test_the_roof_over_capacity_is_dashed_and_named():
    ax = plot_utilisation_curves([1e9, 2e9], {"a job": [0.1, 0.2]}, roof=[0.2, 0.4])
    assert [(line.get_label(), line.get_linestyle()) for line in ax.lines] == [("Stage 1", "--"), ("a job", "-")]


def test_predictions_are_lines_and_simulations_points():
    ax = plot_over_output_len(
        [16, 32], {"Stage 2": [1.0, 2.0]}, roof=("Stage 1", [3.0, 3.0]), points={"greedy": {32: 1.9}}, title="a title"
    )
    roof, line, points = ax.lines
    assert (roof.get_label(), line.get_label(), points.get_label()) == ("Stage 1", "Stage 2", "greedy")
    assert points.get_xydata().tolist() == [[32, 1.9]]
    assert points.get_linestyle() == "None"
    assert (ax.get_title(loc="left"), ax.get_ylabel()) == ("a title", "output tokens per second")
