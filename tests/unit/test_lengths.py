"""Distributions of lengths: fitted statistics, and histograms that are checked before anything is drawn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from workbench.core.errors import WorkloadError
from workbench.workload.lengths import Gamma, Histogram, LogNormal

MANY = 20_000


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


@examples(30)
@given(st.floats(20, 5000), st.floats(1.05, 8))
def test_a_log_normal_has_its_mean_and_reaches_its_maximum_only(mean, ratio):
    """Its deviation is at most 0.83 of the mean here, so that 20 000 draws tell the mean to 2 %."""
    drawn = LogNormal(mean, mean * ratio).draw(generator(), MANY)
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.min() >= 1
    assert drawn.max() <= round(mean * ratio)


@examples(30)
@given(st.floats(50, 10_000), st.floats(0.1, 1))
def test_a_gamma_has_its_mean_and_deviation(mean, spread):
    drawn = Gamma(mean, spread * mean).draw(generator(), MANY)
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.std() == pytest.approx(spread * mean, rel=0.05)
    assert drawn.min() >= 1


def test_a_gamma_may_have_a_maximum():
    free, cut = Gamma(100, 80), Gamma(100, 80, 300)
    assert free.draw(generator(), MANY).max() > 300 >= cut.draw(generator(), MANY).max()
    assert str(free) == "gamma of mean 100 and deviation 80"
    assert str(cut) == "gamma of mean 100 and deviation 80, at most 300"


@pytest.mark.parametrize(("mean", "maximum"), [(0, 4), (-1, 4), (100, 100), (100, 90), (1, 119), (math.nan, 4)])
def test_statistics_that_no_log_normal_has_are_refused(mean, maximum):
    with pytest.raises(
        WorkloadError, match=r"no log-normal has the mean .* give a maximum above the mean and below 118"
    ):
        LogNormal(mean, maximum)


@pytest.mark.parametrize("values", [(0, 1), (1, 0), (1, -1), (10, 1, 10), (math.nan, 1), (1, math.inf)])
def test_statistics_that_no_gamma_has_are_refused(values):
    with pytest.raises(WorkloadError, match=r"no gamma distribution has mean .* give positive ones"):
        Gamma(*values)


@given(st.dictionaries(st.integers(1, 1000), st.integers(1, 9), min_size=1), st.integers(0, 99))
def test_only_what_was_counted_is_drawn(table, seed):
    histogram = Histogram.of(table)
    drawn = histogram.draw(np.random.default_rng(seed), 50)
    assert drawn.shape == (50, 1)
    assert set(drawn[:, 0].tolist()) <= set(table)
    assert not histogram.knows_outputs


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "needs at least one length"),
        ({0: 1}, r"has the length \(0,\); give whole numbers from 1 on"),
        ({1.5: 1}, r"has the length \(1\.5,\)"),
        ({(3, 0): 1}, r"has the length \(3, 0\)"),
        ({3: -1}, r"has \(3,\) -1 times; give counts that are not negative"),
        ({3: math.nan}, "nan times"),
        ({3: "4"}, "'4' times"),
        ({3: 10**400}, "times; give counts"),
        ({10**30: 1}, "has the length"),
        ({3: 0}, "counts nothing; give at least one positive count"),
        ({3: 1, (3, 4): 1}, "either prompt lengths or .* give one kind"),
        ({(3, 4, 5): 1}, "either prompt lengths or"),
    ],
)
def test_a_histogram_of_something_else_is_refused(table, words):
    with pytest.raises(WorkloadError, match=words):
        Histogram.of(table)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"chat\.csv has the columns of an empty file; its first line must be prompt,count or"),
        ("length,count\n3,4\n", r"has the columns length, count; its first line must be"),
        ("prompt,count\n3,4\nthree,4\n", r"chat\.csv:3 is no row of prompt and count .*; correct it"),
        ("prompt,output,count\n3,4\n", r"chat\.csv:2 is no row of prompt, output and count"),
        ("prompt,count\n3.5,4\n", r"chat\.csv:2 is no row"),
        ("prompt,count\n0,4\n", r"has the length \(0,\)"),
        ("prompt,count\n", "needs at least one length"),
        ("prompt,count\n3,4,5\n", r"chat\.csv:2 is no row"),
        ("prompt,prompt,count\n3,4,5\n", r"has the columns prompt, prompt, count"),
        (f"prompt,count\n{200_000 * '1'},4\n", r"chat\.csv is no CSV file"),
    ],
    ids=range(10),
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, text, words):
    path = tmp_path / "chat.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match=words):
        Histogram.read(path)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "chat.csv"
    path.write_bytes(b"prompt,count\n\xe9,4\n")
    with pytest.raises(WorkloadError, match=r"chat\.csv is no CSV file"):
        Histogram.read(path)


def test_counts_whose_sum_is_beyond_floats_are_drawn_as_often():
    assert set(Histogram.of({3: 1e308, 4: 1e308}).draw(np.random.default_rng(0), 99)[:, 0].tolist()) == {3, 4}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"nowhere\.csv' does not exist; give the path of a CSV file"):
        Histogram.read(tmp_path / "nowhere.csv")


def test_a_file_of_a_spreadsheet_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "chat.csv"
    path.write_text("\ufeffprompt,count\n3,4\n", encoding="utf-8")
    assert Histogram.read(path) == Histogram.of({3: 4})
