"""Every printed value of the five papers is computed, and meets its tolerance or misses it for the reason given."""

import html
import json
from pathlib import Path

import pytest

from workbench.reproductions import Outcome, papers, reproduce
from workbench.reproductions.rows import printed

CASES = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
TABLES = {
    "ktransformers": [1, 2],
    "layered_prefill": range(1, 9),
    "moe_cap": [1],
    "moe_lens": range(1, 4),
    "moe_lightning": range(3, 6),
}
"""Tables 1, 2, 6 and 7 of MoE-Lightning are notation and settings, which its other rows are computed from."""

pytestmark = pytest.mark.parametrize("paper", papers())


@pytest.fixture(scope="module")
def reproduced():
    return {paper: reproduce(paper) for paper in papers()}


def test_each_value_has_the_outcome_that_is_told(paper, reproduced):
    told = {row.printed.key: row.printed.expected for row in reproduced[paper].rows}
    assert {row.printed.key: row.outcome for row in reproduced[paper].rows} == told


def test_what_is_not_met_says_why(paper, reproduced):
    rows = [row for row in reproduced[paper].rows if row.outcome is not Outcome.MET]
    assert all(len(row.printed.remark) > 20 for row in rows)
    assert all(row.computed is None for row in rows if row.outcome is Outcome.OPEN)


def test_no_value_is_kept_twice(paper):
    keys = [one.key for one in printed(paper)]
    assert len(set(keys)) == len({(one.item, one.quantity) for one in printed(paper)}) == len(keys)
    assert not set(keys) & {case["id"] for case in CASES}


def test_all_tables_are_there(paper):
    items = " ".join(one.item for one in printed(paper)) + " "
    assert all(f"Table {number} " in items or f"Tables {number}" in items for number in TABLES[paper])


def test_fitted_values_are_not_called_the_papers(paper, reproduced):
    """What was calibrated to the same tables, or how near counts was chosen, is told apart from the print."""
    kinds = {row.printed.evidence for row in reproduced[paper].rows}
    assert kinds <= {"paper", "derived", "calibrated", "simulated", "own band"}


def test_the_table_and_the_text_tell_every_row(paper, reproduced):
    found = reproduced[paper]
    assert len(found.to_pandas()) == len(found.rows) == sum(found.count().values())
    assert found._repr_html_().count("<tr>") == len(found.rows) + 1
    assert all(remark in html.unescape(found._repr_html_()) for remark in found.remarks())
    assert str(found).startswith(found.paper)
