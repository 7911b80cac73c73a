"""The record of the mutation run: each mutant has a verdict, and the sums are those of its rows."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "data" / "measured" / "mutants.json").read_text(encoding="utf-8"))
KILLED = {"killed", "killed by a test outside the selection", "killed by a new test"}


def test_every_mutant_has_a_verdict_with_its_test_or_reason():
    for row in RECORD["rows"]:
        if row["verdict"] in KILLED:
            assert row["killed by"]
        elif row["verdict"] == "equivalent":
            assert row["killed by"] is None
            assert row["reason"]
        else:
            assert row["verdict"] == "not judged yet"


def test_the_figures_are_those_of_the_rows():
    killed = [row for row in RECORD["rows"] if row["killed by"] is not None]
    assert RECORD["mutants"] == len(RECORD["rows"]) >= 150
    assert RECORD["killed"] == len(killed)


def test_killing_tests_are_in_the_tree():
    for row in RECORD["rows"]:
        path, _, name = (row["killed by"] or "").partition("::")
        if name and row["verdict"] != "killed":
            function = name.partition("[")[0]
            assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")
