"""Public runs with experts on the CPU: the data are whole, each run is simulated or says why not, nothing is fitted."""

import math
from statistics import median

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from workbench.__main__ import main
from workbench.core.errors import CatalogueError
from workbench.hardware.processors import efficiencies, processors
from workbench.models import bytes_per_weight, models
from workbench.perfmodels import bound
from workbench.reproductions import Outcome
from workbench.reproductions.offload_gaps import compute_rates, depth_costs, memory_rates, token_times
from workbench.reproductions.offload_runs import (
    DATA,
    Compared,
    Lengths,
    Phase,
    compared,
    machine_of,
    model_of,
    public_run,
    public_runs,
    scenario_of,
    schedule_of,
)
from workbench.reproductions.offload_tables import (
    KNOWN,
    error_line,
    median_error,
    offload_reproduction,
    rank_correlations,
    ratios,
    spearman,
)
from workbench.reproductions.plots import plot_public_runs
from workbench.reproductions.rows import published
from workbench.serving import fits
from workbench.simulate import simulate

FULL = [run for run in public_runs() if run.known == "full"]
SAYABLE = [run for run in FULL if run.simulated]
KINDS = {(run.name.partition("/")[0], run.entry["place"], run.entry.get("prompts")): run for run in SAYABLE}
MIB = 2**20


# ------------------------------------------------------------------------------------------------------------ the data


@pytest.mark.parametrize(
    ("name", "phase", "first", "last"),
    [
        ("trp7965wx-a6000/08", Phase.DECODE, 10.93, 6.7),
        ("trp7965wx-a6000/08", Phase.PREFILL, 164.36, 119.39),
        ("trp7965wx-a6000/09", Phase.PREFILL, 54.94, 52.03),
        ("trp7965wx-a6000/02", Phase.DECODE, 13.13, 13.13),
        ("kt-2x6454s-4090d/03", Phase.DECODE, 13.4, 12.4),
        ("kt-2x6454s-4090d/09", Phase.PREFILL, 185.96, 195.62),
        ("epyc9355-2x3090/03", Phase.DECODE, 14.13, 1.32),
        ("i9-10900x-2080/01", Phase.DECODE, 36.7, 36.7),
        ("imp-5090/01", Phase.PREFILL, 10580, 10580),
        ("3090-gptoss-ub/05", Phase.PREFILL, 2090.68, 2090.68),
        ("kt-6454s-4x4090/52", Phase.DECODE, 112.32, 112.32),
    ],
)
def test_rates_are_those_that_were_published(name, phase, first, last):
    rates = [rate for _, rate in public_run(name).rates[phase]]
    assert (rates[0], rates[-1]) == (first, last)


def test_41_runs_are_fully_known_and_each_is_simulated_or_says_why_not():
    assert len(FULL) == 41
    assert len(SAYABLE) >= 20
    for run in FULL:
        for phase in Phase:
            if run.rates[phase]:
                assert (phase in run.simulated) is not (phase in run.unsayable), run.name
        assert all(len(reason) > 40 for reason in run.unsayable.values()), run.name


def test_every_entry_has_what_a_reader_needs_to_judge_it():
    tables = published(DATA)
    names = [run.name for run in public_runs()]
    assert len(set(names)) == len(names)
    for run in public_runs():
        entry = run.entry
        assert run.known in KNOWN
        assert entry["evidence"] in ("log", "table", "claim"), run.name
        assert len(entry["source"]) > 10, run.name
        lengths = {len(entry[name]) for name in ("before", "prompt", "output", "prefill", "decode") if name in entry}
        assert len(lengths) == 1, run.name
        if run.simulated:
            parts = tables["machines"][run.name.partition("/")[0]]
            assert parts["gpu"] in processors, run.name
            assert parts["cpu"] in processors, run.name
            assert entry["quant"] in tables["quants"], run.name
            assert entry["model"] in models or entry["model"] in tables["models"], run.name
    assert all(len(one["source"]) > 10 for one in tables["machines"].values())
    assert all(len(one["source"]) > 10 for one in tables["quants"].values())
    assert all(one["source"] for one in tables["engines"].values())


def test_every_sweep_is_listed_and_says_why_nothing_of_it_is_simulated():
    listed = {sweep["id"]: sweep for sweep in published(DATA)["sweeps"]}
    assert len(listed) == len(published(DATA)["sweeps"])
    assert {run.sweep for run in public_runs() if run.sweep} <= set(listed)
    played = {run.sweep for run in public_runs() if run.simulated}
    for name, sweep in listed.items():
        assert (name in played) is not ("unsayable" in sweep), name


@pytest.mark.parametrize(
    ("name", "host", "card"),
    [
        ("trp7965wx-a6000/07", 205716.0, 9885.95),
        ("trp7965wx-a6000/08", 196001.25, 41723.89),
        ("epyc9355-2x3090/02", 186011.39, None),
        ("epyc9355-2x3090/05", 167201.25, None),
        ("epyc9355-2x3090/07", None, 203017.61),
    ],
)
def test_bytes_on_each_side_are_those_of_the_engines_log(name, host, card):
    """The load log has them, so that bits per weight and placement are right together; the embedding is left out."""
    run = public_run(name)
    model = model_of(run)
    ledger = fits(scenario_of(run), schedule_of(run))
    embedding = model.embedding_params * dict(model.formats)["embed"]
    if host is not None:
        assert ledger.host["weights"] == pytest.approx(host * MIB, rel=0.01)
    if card is not None:
        whole = embedding if run.entry["place"] == "cpu" else 0.0
        assert ledger.gpu["weights"] - embedding + whole == pytest.approx(card * MIB, rel=0.02)


def test_bits_that_follow_from_a_formats_blocks_are_those_of_its_blocks():
    quants = published(DATA)["quants"]
    q4, q5, q6, iq4, mxfp4 = (8 * bytes_per_weight(name) for name in ("q4_k", "q5_k", "q6_k", "iq4_xs", "mxfp4"))
    assert quants["q6_k"]["experts"] == q6
    assert quants["q4_k_m"]["experts"] == pytest.approx((2 * q4 + (q4 + q6) / 2) / 3, abs=1e-3)
    assert (quants["iq4_xs"]["experts"], quants["iq4_xs"]["others"]) == (iq4, q5)
    assert quants["mxfp4"]["experts"] == mxfp4
    assert quants["q8_0"]["experts"] == pytest.approx(8 * bytes_per_weight("q8_0"), rel=1e-3)


# ---------------------------------------------------------------------------------------------------- nothing is fitted


@pytest.mark.parametrize("run", KINDS.values(), ids=lambda run: run.name)
def test_a_machine_has_its_parts_nominal_rates_times_the_one_set_of_shares(run):
    shares = efficiencies["sustained"]
    nominal, derated = (machine_of(run, name) for name in ("nominal", "sustained"))
    if run.entry["place"] != "cpu":
        assert derated.gpu.bandwidth == pytest.approx(shares.gpu_bandwidth * nominal.gpu.bandwidth)
        assert derated.gpu.flop_rate("bf16") == pytest.approx(shares.gpu_flops * nominal.gpu.flop_rate("bf16"))
    assert derated.cpu.flop_rate("fp32") == pytest.approx(shares.vector_flops * nominal.cpu.flop_rate("fp32"))
    assert derated.link.h2d == pytest.approx(shares.link * nominal.link.h2d)
    assert derated.cpu.bandwidth <= nominal.cpu.bandwidth


@pytest.mark.parametrize("run", KINDS.values(), ids=lambda run: run.name)
def test_no_run_is_simulated_faster_than_its_bound(run):
    scenario = scenario_of(run)
    schedule = schedule_of(run)
    assert simulate(scenario, schedule).gen_tok_s <= bound(scenario, schedule).gen_tok_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["trp7965wx-a6000/09", "trp7965wx-a6000/01", "kt-2x6454s-4090d/02", "imp-5090/01"])
def test_rates_are_those_of_the_iterations_that_simulate_plays(name):
    """The prompt is the first iteration, and a decoded token one of the others."""
    run = public_run(name)
    steps = simulate(scenario_of(run), schedule_of(run)).steps
    prefill = next(one for one in compared(run) if one.phase is Phase.PREFILL)
    decode = next(one for one in compared(run) if one.phase is Phase.DECODE)
    assert steps.prefill[0] == prefill.lengths.prompt
    assert prefill.simulated == pytest.approx(steps.prefill[0] / steps.seconds[0])
    assert decode.simulated == pytest.approx(1 / np.mean(steps.seconds[1:]), rel=0.002)


def test_more_layers_on_the_gpu_and_fewer_experts_per_token_are_faster():
    def decode(name):
        return next(one.simulated for one in compared(public_run(name)) if one.phase is Phase.DECODE)

    assert decode("epyc9355-2x3090/05") > decode("epyc9355-2x3090/02") > decode("epyc9355-2x3090/07")
    assert decode("kt-2x6454s-4090d/04") > decode("kt-2x6454s-4090d/05") > decode("kt-2x6454s-4090d/07")


# -------------------------------------------------------------------------------------------------------------- tables


def test_the_table_has_every_full_run_and_marks_what_is_not_computed():
    found = offload_reproduction()
    assert {row.printed.item for row in found.rows} == {run.name for run in FULL}
    opened = {row.printed.item for row in found.rows if row.outcome is Outcome.OPEN}
    assert opened == {run.name for run in FULL if run.unsayable}
    assert all(row.printed.remark for row in found.rows if row.outcome is Outcome.OPEN)
    assert len({row.printed.key for row in found.rows}) == len(found.rows)


def test_errors_are_medians_over_runs_of_medians_over_lengths():
    for phase in Phase:
        by_run = ratios(phase)
        name = next(iter(by_run))
        assert by_run[name] == median(one.ratio for one in compared(public_run(name)) if one.phase is phase)
        assert median_error(phase) == median(abs(ratio - 1) for ratio in by_run.values())
        assert f"{len(by_run)} runs, median error {median_error(phase):.0%}" in error_line(phase)


@pytest.mark.parametrize(
    ("ours", "expected"), [((1.0, 2.0, 9.0), 1.0), ((3.0, 2.0, 1.0), -1.0), ((1.0, 3.0, 2.0), 0.5)]
)
def test_order_is_spearmans(ours, expected):
    lengths = Lengths(0, 1, 1)
    points = [
        Compared(public_runs()[0], Phase.DECODE, lengths, theirs, found)
        for theirs, found in zip((10.0, 20.0, 30.0), ours, strict=True)
    ]
    assert spearman(points) == pytest.approx(expected)


def test_a_sweep_whose_simulated_rates_are_all_equal_has_no_order():
    points = [Compared(public_runs()[0], Phase.DECODE, Lengths(0, 1, 1), rate, 5.0) for rate in (1.0, 2.0)]
    assert math.isnan(spearman(points))


def test_every_simulated_sweep_has_an_order_or_one_point():
    table = rank_correlations()
    told = table[table["phase"].notna()]
    assert set(told["sweep"]) == {run.sweep for run in public_runs() if run.simulated and run.sweep}
    assert told["correlation"].between(-1, 1).all()
    assert set(table[table["phase"].isna()]["sweep"]).isdisjoint(told["sweep"])


def test_the_gaps_are_told_of_the_published_rates():
    reads = memory_rates()
    model = models["qwen3-235b-a22b"]
    per_token = 80 * model.num_experts_per_tok * model.expert_params * 8.505 / 8
    assert reads.loc["trp7965wx-a6000/08", "published GB/s"] == pytest.approx(per_token * 10.93 / 1e9)
    assert reads.loc["epyc9355-2x3090/05", "nominal GB/s"] == pytest.approx(12 * 6 * 8)
    flops = compute_rates()
    assert flops.loc["trp7965wx-a6000/08", "published TFLOP/s"] == pytest.approx(
        2 * 80 * model.num_experts_per_tok * model.expert_params * 165.89 / 1e12
    )
    slopes = depth_costs().loc["trp7965wx-a6000/08"]
    assert slopes["published ms"] == pytest.approx((1000 / 6.7 - 1000 / 10.93) / 32.256, rel=0.1)
    assert len(token_times("kt-experts-sched-55")) == 33


# --------------------------------------------------------------------------------------------------- where it is shown


def test_the_command_prints_the_table_the_reasons_and_the_errors(capsys):
    assert main(["reproduce", DATA]) == 0
    told = capsys.readouterr().out
    assert all(error_line(phase) in told for phase in Phase)
    assert all(run.name in told for run in FULL)
    assert "kt-experts-sched-55" in told


def test_the_command_knows_the_papers_too_and_refuses_other_names(capsys):
    assert main(["reproduce", "moe_cap"]) == 0
    assert "Table 1" in capsys.readouterr().out
    assert main(["reproduce", "moe"]) == 1
    assert "no reproduction of 'moe'" in capsys.readouterr().err


def test_the_picture_has_a_marker_for_each_engine_a_colour_for_each_phase_and_units():
    points = [one for run in SAYABLE for one in compared(run)]
    ax = plot_public_runs(points)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "published [tokens/s]" in ax.get_xlabel()
    assert "[tokens/s]" in ax.get_ylabel()
    lines = {line.get_label(): line for line in ax.lines if line.get_marker() not in ("None", "")}
    assert set(lines) == {f"{one.run.engine}, {one.phase.value}" for one in points}
    markers = {label.partition(",")[0]: line.get_marker() for label, line in lines.items()}
    assert len(set(markers.values())) == len(markers)
    assert sum(len(line.get_xdata()) for line in lines.values()) == len(points)
    plt.close("all")


def test_a_run_that_is_not_there_or_cannot_be_said_is_refused_by_name():
    with pytest.raises(CatalogueError, match="no public run 'a40/1'; there are kt-6454s-4x4090/01"):
        public_run("a40/1")
    with pytest.raises(CatalogueError, match="'w790-qyfs/01' cannot be simulated: Gate projections"):
        scenario_of(public_run("w790-qyfs/01"))
