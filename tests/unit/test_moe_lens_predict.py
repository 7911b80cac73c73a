"""MoE-Lens' Stage 2 as a reader: its result beside those of the other readers, where it applies, and its pictures."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from tests.systems import PIPELINES
from workbench.analysis.compare import compare
from workbench.core.errors import ScenarioError, ScheduleError
from workbench.core.result import Result, Source
from workbench.perfmodels import bound, moe_lens
from workbench.perfmodels.moe_lens.plots import plot_utilisation_curves, plot_utilisation_map
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.serving import prepare
from workbench.simulate import Detail, simulate
from workbench.stages import attention, combine, experts, out_proj, qkv, route, weights

FAST = {"gpu": 1e15, "hbm": 1e15, "cpu": 1e15, "dram": 1e15, "d2h": 1e15}


def delta(scenario) -> float:
    cost = prepare(scenario, VSLPipe()).cost
    return cost.weights_per_layer * scenario.model.num_hidden_layers / scenario.machine.link.h2d


def test_a_prediction_says_so_and_names_what_binds():
    scenario = tiny_scenario([8] * 50, [5] * 50, blocks=20, machine=small_machine(**FAST))
    result = moe_lens.predict(scenario, VSLPipe())
    assert result.source is Source.PREDICTED
    assert (result.generated, result.processed) == (250, 50 * 12)
    assert result.binding == "KV memory"
    q = 20 / sum(-(-(8 + i) // 4) for i in range(5))
    assert result.seconds == pytest.approx((50 / q + 5) * delta(scenario))
    assert result.iterations == 40


def test_with_ample_memory_the_gpu_binds_at_the_schedulers_budget():
    scenario = tiny_scenario([8] * 50, [5] * 50, blocks=5000, machine=small_machine(**FAST), token_budget=20)
    result = moe_lens.predict(scenario, VSLPipe())
    assert result.binding == "gpu compute"
    assert result.seconds == pytest.approx((50 * 13 / 20 + 5 * (1 - 5 / 26)) * delta(scenario))


def test_a_budget_beyond_the_gpu_gains_nothing():
    """The GPU then takes longer than the weights, and its rate is what counts."""
    slow = small_machine(gpu=1e6, hbm=1e15)
    rates = [
        moe_lens.predict(tiny_scenario([8] * 900, [5] * 900, blocks=50000, machine=slow, token_budget=b), VSLPipe())
        for b in (2_000, 20_000)
    ]
    assert rates[0].gen_tok_s == pytest.approx(rates[1].gen_tok_s, rel=0.05)


def test_unequal_lengths_count_with_what_each_holds():
    mixed = tiny_scenario([4, 40] * 30, [9, 2] * 30, blocks=20, machine=small_machine(**FAST))
    q = 20 / ((sum(-(-(4 + i) // 4) for i in range(9)) + sum(-(-(40 + i) // 4) for i in range(2))) / 2)
    assert moe_lens.predict(mixed, VSLPipe()).seconds == pytest.approx((60 / q + 5.5) * delta(mixed))


def test_it_is_a_fourth_reader_in_a_comparison():
    scenario = tiny_scenario([8] * 6, [5] * 6, blocks=9)
    results = [
        read(scenario, schedule)
        for schedule in (Sequential(), VSLPipe())
        for read in (bound, moe_lens.predict, simulate)
    ]
    rows = compare(results).rows()
    assert [row[1] for row in rows] == ["bound", "predicted by MoE-Lens", "simulated"] * 2
    assert rows[1][4] == f"{results[1].gen_tok_s / results[0].gen_tok_s:.0%}"
    assert rows[1][7] == ""
    assert len(compare(results).explanations()) == 6
    plt.close(compare(results).plot().figure)


def test_a_prediction_comes_back_from_a_file_as_one(tmp_path):
    result = moe_lens.predict(tiny_scenario(requests=3), VSLPipe())
    assert Result.load(result.save(tmp_path / "predicted.json")) == result


def test_it_speaks_only_of_pipelines_that_stream_weights():
    scenario = tiny_scenario(requests=3, pipeline=PIPELINES["all_gpu"], token_budget=50)
    with pytest.raises(ScenarioError, match="models pipelines that fetch weights"):
        moe_lens.predict(scenario, Sequential())


def test_it_refuses_what_stage_2_has_no_term_for():
    with pytest.raises(ScenarioError, match=r"has no term for fetch\(kv\)"):
        moe_lens.predict(tiny_scenario(requests=3, pipeline=PIPELINES["flexgen_s4"]), Sequential())
    on_cpu = fetch(weights) | gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    with pytest.raises(ScenarioError, match=r"has no term for cpu\(experts\).*use bound or simulate"):
        moe_lens.predict(tiny_scenario(requests=3, pipeline=on_cpu), Sequential())


def test_it_speaks_only_of_the_resource_aware_scheduler():
    other = SimpleNamespace(token_budget=None, open=ResourceAware().open, splits=ResourceAware().splits)
    with pytest.raises(ScenarioError, match=r"models ResourceAware\(\)"):
        moe_lens.predict(tiny_scenario(requests=3).on(scheduler=other), VSLPipe())


def test_it_has_no_term_for_a_limit_on_the_running_sequences():
    limited = tiny_scenario(requests=3, scheduler=ResourceAware(max_running=2))
    with pytest.raises(ScenarioError, match=r"no limit on the sequences that run; leave max_running out"):
        moe_lens.predict(limited, VSLPipe())


def test_the_schedule_is_checked_against_the_pipeline():
    with pytest.raises(ScheduleError):
        moe_lens.predict(tiny_scenario(requests=3, pipeline=PIPELINES["flexgen_s4"]), VSLPipe())


# ------------------------------------------------------------------------------------------------ the pipeline profiler


def test_the_profiler_reads_the_gpu_time_of_a_played_run():
    scenario = tiny_scenario([8] * 40, [6] * 40, machine=small_machine(gpu=1e9, hbm=1e15), token_budget=60)
    played = simulate(scenario, VSLPipe(), detail=Detail.TASK)
    tokens, seconds = moe_lens.profile_points(played)
    assert tokens.tolist() == [p + d for p, d in zip(played.steps.prefill, played.steps.decode, strict=True)]
    assert seconds.sum() == pytest.approx(played.busy["gpu"])
    fitted, model = moe_lens.fit_gpu_time(tokens, seconds), tiny_model()
    layer = model.flops_per_token() - 2 * model.vocab_size * model.hidden_size
    assert fitted.per_token == pytest.approx(layer / 1e9, rel=0.3)  # besides the head, for those that emit


def test_the_profiler_needs_tasks():
    played = simulate(tiny_scenario(requests=3), VSLPipe())
    with pytest.raises(ValueError, match=r"Detail\.TASK"):
        moe_lens.profile_points(played)


# ------------------------------------------------------------------------------------------------------------- pictures


def test_pictures_say_what_the_model_leaves_out():
    p, g = np.arange(50, 500, 50), np.arange(32, 300, 32)
    ax = plot_utilisation_map(p, g, moe_lens.utilisation_over_lengths(p, g, 8e5, 18500))
    assert "attention scores" in ax.get_title(loc="left")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("prompt tokens", "output tokens")
    assert ax.collections[0].get_array().shape == (len(g), len(p))
    plt.close(ax.figure)


def test_curves_over_capacity_share_one_picture():
    tokens = np.linspace(2e5, 2e6, 20)
    curves = moe_lens.utilisation_over_capacity(100, 128, np.array([2e4, 2e5]), tokens, 18500, block=16)
    labelled = {"20,000 requests": curves[0], "200,000 requests": curves[1]}
    _, axes = plt.subplots()
    ax = plot_utilisation_curves(tokens * 131072, labelled, axes)
    assert ax is axes
    assert [line.get_label() for line in ax.lines] == list(labelled)
    assert np.array_equal(ax.lines[1].get_ydata(), curves[1])
    assert "attention scores" in ax.get_title(loc="left")
    plt.close(ax.figure)


def test_a_link_that_never_lets_the_gpu_catch_up_is_predicted_too():
    """No number of tokens computes as long as the weights stream: n_it is all that the GPU computes meanwhile."""
    scenario = tiny_scenario([8] * 6, [5] * 6, machine=small_machine(**FAST, h2d=1e-3))
    assert prepare(scenario, VSLPipe()).token_budget == np.inf
    assert moe_lens.predict(scenario, VSLPipe()).seconds >= delta(scenario)
