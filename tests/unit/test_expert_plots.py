"""Speeds of expert kernels and their pictures, from runs made up so that every answer is known."""

from dataclasses import replace

import matplotlib as mpl
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from workbench.bench.experts.plots import plot_expert_speeds, plot_memory_share
from workbench.bench.experts.speeds import ExpertRun, ExpertSpeeds

READ = 10e9
BYTES = {"exact": 6_000_000, "small": 1_500_000, "dense": 6_000_000}


def speeds(threads: int = 2) -> ExpertSpeeds:
    """Exact: memory's time or 1 ms per 4 tokens; small: a quarter of it; dense: 2 ms for any number of tokens."""
    runs = {}
    for n in (1, 4, 16, 64):
        exact = max(0.6e-3, n * 0.25e-3)
        runs["exact", n] = tuple(ExpertRun(exact * k, READ / k) for k in (0.5, 1, 2))
        runs["small", n] = (ExpertRun(exact / 4, READ),) * 3
        if n > 1:
            runs["dense", n] = (ExpertRun(2e-3, READ),) * 3
    return ExpertSpeeds(1000, 1000, threads, BYTES, runs, 90e9)


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def test_rates_are_work_over_the_median_time():
    found = speeds()
    assert found.tokens("exact") == (1, 4, 16, 64)
    assert found.tokens("dense") == (4, 16, 64)
    assert found.seconds("exact", 16) == 4e-3
    assert found.flop_rate("exact", 16) == pytest.approx(6 * 1000 * 1000 * 16 / 4e-3)
    assert found.read == READ
    assert found.memory_limit("exact", 1) == pytest.approx(6e6 * READ / 6e6)
    assert found.memory_limit("small", 2) == pytest.approx(8 * found.memory_limit("exact", 1))


def test_disturbed_rounds_are_told():
    noisy = replace(speeds(), disturbed=2)
    assert str(noisy) == "experts 1000 x 1000, 2 threads, 3 rounds, 2 of them disturbed by other programs"


def test_a_share_of_memory_is_of_the_reading_beside_it():
    assert speeds().memory_share("exact", 4) == pytest.approx(0.6)
    # A run that took as much longer as the reading before it: the memory's slow state is not the kernel's.
    slow = {**speeds().runs, ("exact", 1): (ExpertRun(0.6e-3, READ), *(ExpertRun(1.2e-3, READ / 2),) * 2)}
    assert replace(speeds(), runs=slow).memory_share("exact", 1) == pytest.approx(1)


def test_overtaking_is_for_good():
    found = speeds()
    assert found.overtakes("dense", "exact") == 16
    assert found.overtakes("exact", "dense") is None
    assert found.overtakes("small", "exact") == 1
    lost = {**found.runs, ("dense", 64): (ExpertRun(1.0, READ),)}
    assert replace(found, runs=lost).overtakes("dense", "exact") is None
    once = {**found.runs, ("dense", 4): (ExpertRun(0.1e-3, READ),), ("dense", 16): (ExpertRun(1.0, READ),)}
    assert replace(found, runs=once).overtakes("dense", "exact") == 64


def test_the_picture_shows_rates_limits_and_the_crossing():
    ax = plot_expert_speeds(speeds(), marks=[("dense", "exact"), ("small", "exact")])
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert list(lines["dense"].get_xdata()) == [4, 16, 64]
    assert lines["exact"].get_ydata()[0] == pytest.approx(6e6 / 0.6e-3 / 1e9)
    assert set(lines["fp32 multiply-adds"].get_ydata()) == {90}
    limits = [line for line in ax.get_lines() if line.get_linestyle() == "--"]
    assert sorted(line.get_ydata()[0] for line in limits) == pytest.approx([10, 40])
    said = [text.get_text() for text in ax.texts]
    assert said == ["dense is ahead of\nexact from 16 tokens on", "small is ahead of\nexact from 1 token on"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("tokens per expert", "GFLOP per second")


def test_ratios_leave_out_what_the_other_has_not_done():
    ax = plot_expert_speeds(speeds(1), against="dense", marks=[("exact", "dense")])
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert list(lines["exact"].get_xdata()) == [4, 16, 64]
    assert list(lines["exact"].get_ydata()) == pytest.approx([2, 0.5, 0.125])
    assert "fp32 multiply-adds" not in lines
    assert ax.texts[0].get_text() == "exact is not ahead\nof dense"
    assert ax.get_title(loc="left") == "experts 1000 x 1000, 1 thread, 3 rounds"


def test_who_was_not_measured_cannot_be_drawn():
    with pytest.raises(ValueError, match=r"no contender 'amx': give one of \['exact', 'small', 'dense'\]"):
        plot_expert_speeds(speeds(), against="amx")


def test_bars_are_shares_of_memory():
    ax = plot_memory_share([speeds(1), speeds(2)])
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([1, 1, 1, 1])
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "exact\n6.0 MB per expert",
        "small\n1.5 MB per expert",
    ]
    assert "1 thread: 100% = 10.0 GB/s, 0.60 ms per expert" in [text.get_text() for text in ax.texts]
