"""Every printed value of the five papers is computed, and meets its tolerance or misses it for the reason given.

Each row has a class that says what a match is worth, a source, and a way to fail.
"""

import html
import json
import re
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from workbench.core.catalogue import data_path
from workbench.reproductions import Evidence, Outcome, papers, reproduce, summary
from workbench.reproductions.reproduce import compute
from workbench.reproductions.rows import UNFITTED, Printed, Row, Value, printed

CASES = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))

EVERY_PAPER = pytest.mark.parametrize("paper", papers())


class Reproduced(dict):
    """The papers' reproductions, each made when it is first asked for."""

    def __missing__(self, paper):
        return self.setdefault(paper, reproduce(paper))


@pytest.fixture(scope="module")
def reproduced():
    return Reproduced()


@EVERY_PAPER
def test_each_value_has_the_outcome_that_is_told(paper, reproduced):
    told = {row.printed.key: row.printed.expected for row in reproduced[paper].rows}
    assert {row.printed.key: row.outcome for row in reproduced[paper].rows} == told


@EVERY_PAPER
def test_what_is_not_met_says_why(paper, reproduced):
    rows = [row for row in reproduced[paper].rows if row.outcome is not Outcome.MET]
    assert all(len(row.printed.remark) > 20 for row in rows)
    assert all(row.computed is None for row in rows if row.outcome is Outcome.OPEN)


@EVERY_PAPER
def test_no_value_is_kept_twice(paper):
    keys = [one.key for one in printed(paper)]
    assert len(set(keys)) == len({(one.item, one.quantity) for one in printed(paper)}) == len(keys)
    assert not set(keys) & {case["id"] for case in CASES}


@EVERY_PAPER
def test_all_tables_are_there(paper):
    file = data_path(f"catalogue/reproductions/{paper}.toml")
    tables = tomllib.loads(file.read_text(encoding="utf-8"))["tables"]
    items = " ".join(one.item for one in printed(paper)) + " "
    assert all(f"Table {number} " in items or f"Tables {number}" in items for number in tables)


# ------------------------------------------------------------------------------------------ what a match is worth


@EVERY_PAPER
def test_no_row_is_without_class_and_source(paper):
    for one in printed(paper):
        assert isinstance(one.evidence, Evidence), one.key
        assert len(one.source) > 20, one.key
        assert re.match(r"(Tables?|Figs?\.|Eq\.|Sections?|Artifact)( |$)", one.item), one.key
        assert (one.evidence is Evidence.MEASURED) == (one.expected is Outcome.OPEN), one.key


def wrong(one: Printed, found: Value) -> list[Value]:
    """Values that must not pass for the printed one: half and twice the computed number.

    Of a statement, a word or a printed 0 it is what the same computation gives for the inputs in `otherwise`.
    """
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    by_factor = is_number and one.value != 0
    assert by_factor is not bool(one.otherwise), f"{one.key}: a statement, a word or a 0, and no other, has `otherwise`"
    return [found / 2, found * 2] if by_factor else [compute(one, one.otherwise)]


@EVERY_PAPER
def test_every_row_that_is_met_can_fail(paper, reproduced):
    passed = [
        (row.printed.key, value)
        for row in reproduced[paper].rows
        if row.outcome is Outcome.MET
        for value in wrong(row.printed, row.computed)
        if Row(row.printed, value).outcome is Outcome.MET
    ]
    assert passed == []


def half_a_digit(value: float) -> float:
    """What rounding to the printed digits can change."""
    digits = str(value).removesuffix(".0").partition(".")[2]
    return 0.5 * 10.0 ** -len(digits)


@EVERY_PAPER
def test_where_nothing_was_fitted_five_percent_or_rounding_is_all_that_may_differ(paper):
    for one in printed(paper):
        if one.evidence in UNFITTED and isinstance(one.value, int | float):
            allowed = max(0.05 * abs(one.value), half_a_digit(one.value))
            assert one.tolerance.allowed(one.value) <= allowed * (1 + 1e-9), one.key


@EVERY_PAPER
def test_a_compared_row_states_no_tolerance(paper, reproduced):
    for row in reproduced[paper].rows:
        if row.outcome is Outcome.COMPARED:
            assert row.printed.tolerance.allowed(1.0) == 0, row.printed.key
            assert row.factor >= 1, row.printed.key


def test_moe_lightning_is_given_as_a_factor(reproduced):
    """As the remarks and the notebook say it: ours, and the authors' own optimiser, over the same 13 cells."""
    ours, theirs = (reproduced["moe_lightning"].factors(group) for group in ("hrm.tok_s", "hrm.promised"))
    assert len(ours) == len(theirs) == 13
    assert (median(ours), max(ours)) == (pytest.approx(1.40, abs=0.005), pytest.approx(1.91, abs=0.005))
    assert (median(theirs), max(theirs)) == (pytest.approx(3.2, abs=0.05), pytest.approx(9.6, abs=0.05))


# ----------------------------------------------------------------------------------------------- counted from the rows


def test_the_summary_counts_the_rows_by_class_and_outcome(reproduced):
    every = [reproduced[paper] for paper in papers()]
    table = summary(every)
    rows = [row for one in every for row in one.rows]
    found = Counter((row.printed.evidence.value, row.outcome.value) for row in rows)
    assert {(kind, outcome): table.loc[kind, outcome] for kind, outcome in found} == dict(found)
    assert table.drop("all").to_numpy().sum() == table.loc["all"].sum() == len(rows)


@EVERY_PAPER
def test_the_text_splits_what_is_met_by_class(paper, reproduced):
    found = reproduced[paper]
    told = re.search(r"(\d+) met \((.*?)\)", str(found))
    parts = dict(reversed(part.split(" ", 1)) for part in told[2].split(", "))
    met = [row.printed.evidence.value for row in found.rows if row.outcome is Outcome.MET]
    assert {name: int(count) for name, count in parts.items()} == dict(Counter(met))
    assert int(told[1]) == len(met)


def test_a_row_that_changes_its_class_or_outcome_moves_in_the_summary(reproduced):
    one = reproduced["moe_cap"]
    first = one.rows[0]
    fitted = replace(first, printed=replace(first.printed, evidence=Evidence.REDRAWN))
    before, after = (summary([replace(one, rows=(row, *one.rows[1:]))]) for row in (first, fitted))
    assert after.loc["size", "met"] == before.loc["size", "met"] - 1
    assert after.loc["redrawn fit", "met"] == before.loc["redrawn fit", "met"] + 1
    missed = replace(first, computed=2 * first.computed)
    assert replace(one, rows=(missed, *one.rows[1:])).count()[Outcome.MISSED] == one.count()[Outcome.MISSED] + 1


def test_no_page_writes_down_how_many_values_are_met():
    """README, docs and notebooks print counts that are made from the rows."""
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "notebooks").glob("*.ipynb"))]
    count = re.compile(r"\b\d+ (printed )?(values|rows)\b|\b\d+ (are |is )?(met|not met|recomputed)\b")
    assert {page.name: found for page in pages if (found := count.findall(page.read_text(encoding="utf-8")))} == {}


# --------------------------------------------------------------------------------------------------- the table itself


@EVERY_PAPER
def test_the_table_and_the_text_tell_every_row(paper, reproduced):
    found = reproduced[paper]
    assert len(found.to_pandas()) == len(found.rows) == sum(found.count().values())
    assert found._repr_html_().count("<tr>") == len(found.rows) + 1
    assert all(remark in html.unescape(found._repr_html_()) for remark in found.remarks())
    assert str(found).startswith(found.paper)
