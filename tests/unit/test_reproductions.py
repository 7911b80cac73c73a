"""One row: when a computed value meets a printed one, and what is told of the difference."""

import math

import matplotlib as mpl
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from workbench.core.errors import CatalogueError
from workbench.reproductions import Evidence, Outcome, Reproduction, reproduce
from workbench.reproductions.rows import Printed, Row, Tolerance, _cells


def row(
    value,
    computed,
    *,
    rel=0.0,
    absolute=0.0,
    expected=Outcome.MET,
    item="Table 1",
    evidence=Evidence.RECOMPUTED,
) -> Row:
    one = Printed(
        "A paper",
        "g",
        "g.1",
        item,
        "speed",
        "tok/s",
        value,
        Tolerance(rel, absolute),
        evidence,
        expected,
        "",
        {},
        {},
        "Somebody, 2025",
    )
    return Row(one, computed)


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (row(100, 104.9, rel=0.05), Outcome.MET),
        (row(100, 105.1, rel=0.05), Outcome.MISSED),
        (row(-12, -11.5, absolute=0.5), Outcome.MET),
        (row(-12, -11.4, absolute=0.5), Outcome.MISSED),
        (row(3, 3.0), Outcome.MET),
        (row((1.0, 2.0), 1.5), Outcome.MET),
        (row((1.0, 2.0), 2.01), Outcome.MISSED),
        (row((1.0, 2.0), 2.01, rel=0.01), Outcome.MET),
        (row(True, True), Outcome.MET),
        (row(True, False), Outcome.MISSED),
        (row(True, 1.0), Outcome.MISSED),
        (row("AMX", "AMX"), Outcome.MET),
        (row("AMX", "AVX512"), Outcome.MISSED),
        (row(3, None), Outcome.OPEN),
        (row(3, math.nan, rel=0.5), Outcome.MISSED),
        (row(3, 4.0, expected=Outcome.MISPRINT), Outcome.MISPRINT),
        (row(3, 3.0, expected=Outcome.MISPRINT), Outcome.MET),
        (row(3, 3.0, expected=Outcome.COMPARED), Outcome.COMPARED),
        (row(3, 30.0, expected=Outcome.COMPARED), Outcome.COMPARED),
    ],
)
def test_a_row_is_held_to_its_tolerance(given, outcome):
    assert given.outcome is outcome


def test_differences_and_ratios_are_from_the_nearer_end():
    assert (row(100, 105.0).difference, row(100, 105.0).ratio) == (5.0, 1.05)
    assert (row((1.0, 2.0), 1.5).difference, row((1.0, 2.0), 1.5).ratio) == (0.0, 1.0)
    assert row((1.0, 2.0), 3.0).ratio == 1.5
    assert math.isnan(row(True, False).ratio)
    assert math.isnan(row(0, 1.0).ratio)


def test_a_factor_is_the_larger_over_the_smaller():
    assert row(2, 3.0).factor == row(3, 2.0).factor == 1.5
    assert math.isnan(row(True, True).factor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "g of paper has no evidence; give one of recomputed, size,"),
        ({"evidence": "size", "outcome": "not met"}, "g of paper is not met without a remark; say why"),
        ({"evidence": "measurement"}, "g of paper is met with evidence measurement; these two exclude each other"),
        ({"evidence": "size", "outcome": "not computed", "remark": "Theirs."}, "not computed with evidence size"),
    ],
)
def test_an_entry_says_what_a_match_is_worth(changes, message):
    group = {"id": "g", "item": "Table 1", "quantity": "speed", "published": 1, **changes}
    with pytest.raises(CatalogueError, match=message):
        list(_cells("paper", {"title": "A paper", "source": "Somebody, 2025"}, group))


def test_an_unknown_paper_is_named_beside_those_there_are():
    with pytest.raises(CatalogueError, match="no reproduction of 'moe'; there are ktransformers, layered_prefill"):
        reproduce("moe")


def test_the_table_shows_units_differences_and_why():
    found = Reproduction(
        "A paper", (row(100, 105.0, rel=0.01), row(True, True, item="Fig. 2"), row(20_000, None, item="Fig. 3"))
    )
    html = found._repr_html_()
    for text in (
        "100 tok/s",
        "+5",
        "± 1 %",
        "not met",
        "true",
        "20,000 tok/s",
        "1 met (1 recomputed), 1 not met, 1 not computed",
    ):
        assert text in html


def test_the_picture_has_one_line_per_item_and_leaves_out_what_has_no_ratio():
    from workbench.reproductions.plots import plot_ratios

    rows = (row(1, 1.0), row(2, 3.0, item="Fig. 2"), row(True, True, item="Fig. 3"), row(1, 495.0, item="Fig. 4"))
    ax = plot_ratios([Reproduction("A paper", rows)])
    assert [text.get_text() for text in ax.get_yticklabels()] == ["Table 1", "Fig. 2", "Fig. 4"]
    drawn = sorted(float(x) for line in ax.lines if line.get_marker() in "oDX" for x in line.get_xdata())
    assert drawn[:2] == [1.0, 1.5]
    assert drawn[2] == ax.get_xlim()[1]  # beyond the axis, at its edge
    plt.close("all")
