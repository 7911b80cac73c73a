"""The project's table of numeric cases, each computed with the public API and held to its own tolerance.

A module of cases says in COMPUTE how a case's inputs become a value, and in OPEN why a case cannot be computed yet. Of
a `direction`, the value is whether it holds; of a `band`, a number between its ends.
"""

import importlib
import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest

FAMILIES = ("tests.papers.lens_cases", "tests.papers.hrm_cases", "tests.papers.cap_cases")
MODULES = [importlib.import_module(name) for name in FAMILIES if find_spec(name)]
CASES = {case["id"]: case for case in json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))}
COMPUTE = {name: compute for module in MODULES for name, compute in module.COMPUTE.items()}
OPEN = {name: reason for module in MODULES for name, reason in module.OPEN.items()}


def allowed(expected: float, tolerance: dict[str, float]) -> float:
    return tolerance["abs"] if "abs" in tolerance else tolerance["rel"] * abs(expected)


def is_met(case: dict, found: object) -> bool:
    expected, tolerance = case["expected"], case["tolerance"]
    if case["kind"] == "direction":
        return found is True
    if isinstance(expected, bool):
        return found is expected
    if case["kind"] == "band":
        low, high = expected
        return low - allowed(low, tolerance) <= found <= high + allowed(high, tolerance)
    wanted, got = (value if isinstance(value, list) else [value] for value in (expected, found))
    return len(wanted) == len(got) and all(
        math.isfinite(b) and abs(a - b) <= allowed(a, tolerance) for a, b in zip(wanted, got, strict=True)
    )


@pytest.mark.parametrize("name", COMPUTE)
def test_the_case_is_met(name):
    case = CASES[name]
    found = COMPUTE[name](case["inputs"])
    assert is_met(case, found), f"{name}: expected {case['expected']} ({case['tolerance']}), found {found}"


def test_every_case_of_these_families_is_computed_or_open_and_none_is_both():
    families = {name.split(".")[0] for name in (*COMPUTE, *OPEN)}
    assert {name for name in CASES if name.split(".")[0] in families} == {*COMPUTE, *OPEN}
    assert not set(COMPUTE) & set(OPEN)


def test_an_open_case_says_why():
    assert all(len(reason) > 20 for reason in OPEN.values())


@pytest.mark.parametrize(
    ("case", "found", "met"),
    [
        ({"kind": "exact", "expected": 10, "tolerance": {"rel": 0.1}}, 11, True),
        ({"kind": "exact", "expected": 10, "tolerance": {"rel": 0.1}}, 11.1, False),
        ({"kind": "exact", "expected": 10, "tolerance": {"abs": 0}}, 10.0, True),
        ({"kind": "exact", "expected": 10, "tolerance": {"abs": 0}}, math.nan, False),
        ({"kind": "exact", "expected": [1, 2], "tolerance": {"abs": 0}}, [1, 3], False),
        ({"kind": "exact", "expected": [1, 2], "tolerance": {"abs": 0}}, [1], False),
        ({"kind": "exact", "expected": True, "tolerance": {"abs": 0}}, 1, False),
        ({"kind": "band", "expected": [1, 2], "tolerance": {"abs": 0}}, 2, True),
        ({"kind": "band", "expected": [1, 2], "tolerance": {"abs": 0}}, 2.01, False),
        ({"kind": "direction", "expected": "a > b", "tolerance": {"abs": 0}}, False, False),
    ],
)
def test_a_case_is_held_to_its_tolerance(case, found, met):
    assert is_met(case, found) is met
