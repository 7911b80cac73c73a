"""Every test in two runs of pytest: which tests each takes, and what their outcomes are together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.every import runs, worst

SCRIPT = Path(__file__).with_name("every.py")
TESTS = """
import os, pytest

def test_shared():
    assert "PYTEST_XDIST_WORKER" in os.environ
    assert "shared" != {failing!r}

@pytest.mark.alone
def test_alone():
    assert "PYTEST_XDIST_WORKER" not in os.environ
    assert "alone" != {failing!r}

def test_depth():
    assert os.environ.get("WB_TEST_DEEP", "") == {deep!r}
"""


def test_a_selection_narrows_both_and_other_arguments_go_to_both() -> None:
    shared, alone = runs("slow or gpu", False, ["tests/laws", "-x"])
    assert shared[:5] == ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    assert shared[-4:] == ["tests/laws", "-x", "-m", "(slow or gpu) and not alone"]
    assert alone == ["tests/laws", "-x", "-m", "(slow or gpu) and alone", "-n", "0"]


def test_more_processes_can_be_asked_for_but_not_for_what_needs_the_computer_alone() -> None:
    shared, alone = runs("", False, ["-n", "8"])
    assert shared.index("8") > shared.index("2")
    assert alone[-2:] == ["-n", "0"]


@pytest.mark.parametrize(
    "codes, told",
    [((0, 0), 0), ((0, 1), 1), ((1, 0), 1), ((5, 0), 0), ((0, 5), 0), ((5, 1), 1), ((5, 5), 5), ((-9, 0), 9)],
)
def test_the_worse_outcome_counts(codes: tuple[int, int], told: int) -> None:
    assert worst(codes) == told


@pytest.mark.parametrize(
    "failing, code, told, options, deep",
    [
        ("", 0, ("2 passed", "1 passed"), ["--deep"], "1"),
        ("shared", 1, ("1 failed, 1 passed", "1 passed"), [], ""),
        ("alone", 1, ("2 passed", "1 failed"), [], ""),
    ],
)
def test_each_test_runs_in_its_place(
    failing: str, code: int, told: tuple[str, str], options: list[str], deep: str, tmp_path: Path
) -> None:
    (tmp_path / "test_here.py").write_text(TESTS.format(failing=failing, deep=deep))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "WB_TEST_"))}
    command = [sys.executable, str(SCRIPT), *options, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    shared, alone = (line for line in done.stdout.splitlines() if " in " in line and line[0].isdigit())
    assert shared.startswith(told[0])
    assert alone.startswith(told[1])
