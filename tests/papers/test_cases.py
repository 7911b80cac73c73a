"""The project's table of numeric cases, each computed with the public API and held to its own tolerance.

A module of cases says in COMPUTE how a case's inputs become a value, and in OPEN why a case cannot be computed yet. Of
a `direction`, the value is whether it holds; of a `band`, a number between its ends, or a list of such numbers.
"""

import importlib
import json
import math
from pathlib import Path

import pytest

FAMILIES = (
    "tests.papers.lens_cases",
    "tests.papers.hrm_cases",
    "tests.papers.cap_cases",
    "tests.papers.sched_cases",
)
MODULES = [importlib.import_module(name) for name in FAMILIES]
CASES = {case["id"]: case for case in json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))}
COMPUTE = {name: compute for module in MODULES for name, compute in module.COMPUTE.items()}
OPEN = {name: reason for module in MODULES for name, reason in module.OPEN.items()}


def allowed(expected: float, tolerance: dict[str, float]) -> float:
    return tolerance["abs"] if "abs" in tolerance else tolerance["rel"] * abs(expected)


def is_met(case: dict, found: object) -> bool:
    expected, tolerance = case["expected"], case["tolerance"]
    if case["kind"] == "direction":
        return found is True
    if case["kind"] == "band":
        low, high = expected
        least, most = low - allowed(low, tolerance), high + allowed(high, tolerance)
        values = found if isinstance(found, list) else [found]
        return len(values) > 0 and all(least <= value <= most for value in values)
    return is_near(expected, found, tolerance)


def is_near(expected: object, found: object, tolerance: dict[str, float]) -> bool:
    """Whether numbers are within the tolerance, lists item by item at any depth; words and truth values are equal."""
    if isinstance(expected, list):
        return (
            isinstance(found, list | tuple)
            and len(expected) == len(found)
            and all(is_near(a, b, tolerance) for a, b in zip(expected, found, strict=True))
        )
    if isinstance(expected, bool | str):
        return type(found) is type(expected) and found == expected
    return math.isfinite(found) and abs(expected - found) <= allowed(expected, tolerance)


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
        ({"kind": "band", "expected": [1, 2], "tolerance": {"abs": 0}}, [1, 1.5], True),
        ({"kind": "band", "expected": [1, 2], "tolerance": {"abs": 0}}, [1, 2.01], False),
        ({"kind": "band", "expected": [1, 2], "tolerance": {"abs": 0}}, [], False),
        ({"kind": "exact", "expected": "AMX", "tolerance": {"abs": 0}}, "AMX", True),
        ({"kind": "exact", "expected": "AMX", "tolerance": {"abs": 0}}, "AVX512", False),
        ({"kind": "exact", "expected": [[[0], [1]], []], "tolerance": {"abs": 0}}, [[[0], [1]], []], True),
        ({"kind": "exact", "expected": [[[0], [1]], []], "tolerance": {"abs": 0}}, [[[0], [1, 2]], []], False),
        ({"kind": "direction", "expected": "a > b", "tolerance": {"abs": 0}}, True, True),
        ({"kind": "direction", "expected": "a > b", "tolerance": {"abs": 0}}, False, False),
    ],
)
def test_a_case_is_held_to_its_tolerance(case, found, met):
    assert is_met(case, found) is met
