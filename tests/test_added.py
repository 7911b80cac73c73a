"""A schedule that is added as one module and its golden file is met by every law, live test and `bench sim`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.systems import MIXED
from workbench.schedules import Sequential

ROOT = Path(__file__).parents[1]
MODULE = '''"""One micro-batch, one task after the other."""

from dataclasses import dataclass, replace

from workbench.pipeline.layer_graph import LayerGraph
from workbench.schedules.base import Step
from workbench.schedules.plan import Task
from workbench.schedules.sequential import Sequential


@dataclass(frozen=True, repr=False)
class Plain(Sequential):
    """For the streamed weights of one layer after the other::

CHART

    It takes any pipeline.
    """

    example = Sequential.example

    def tasks(self, graph: LayerGraph, layers: int, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        return TASKS
'''
RIGHT = "super().tasks(graph, layers, step)"
WRONG = "tuple(replace(task, after=()) for task in super().tasks(graph, layers, step))"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the tree in which the packages that do not change are links."""
    for name in ("workbench", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels_cpu", "kernels_triton", "data", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def add(checkout: Path, tasks: str) -> None:
    pipeline = Sequential.example
    plan = str(Sequential().lower(pipeline, MIXED)).replace("Sequential", "Plain", 1)
    chart = plan.split("lanes if every task took one unit\n")[1]
    shown = "\n".join(f"        {line.strip()}" for line in chart.strip().splitlines())
    (checkout / "workbench/schedules/plain.py").write_text(MODULE.replace("CHART", shown).replace("TASKS", tasks))
    (checkout / "tests/golden/example.plain.txt").write_text(f"{pipeline}\n{plan}\n", encoding="utf-8")


def python(checkout: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=env, capture_output=True, text=True, check=False
    )


def pytest_there(checkout: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return python(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments)


def test_a_schedule_that_is_added_is_met_by_all(checkout: Path) -> None:
    add(checkout, RIGHT)
    golden = pytest_there(checkout, "tests/test_golden.py")
    assert golden.returncode == 0, golden.stdout
    live = pytest_there(checkout, "--collect-only", "tests/live/test_tokens.py", "tests/live/test_architectures.py")
    assert live.stdout.count("Plain()") > 3 or live.stdout.count("example.plain") > 3, live.stdout[-2000:]
    ways = python(checkout, "-c", "from workbench.bench.live.sim import WAYS; print(WAYS)")
    assert "Plain(" in ways.stdout, ways.stderr


def test_a_law_turns_red_where_an_added_schedule_is_wrong(checkout: Path) -> None:
    add(checkout, WRONG)
    law = pytest_there(checkout, "tests/laws/test_plans.py", "-k", "each_layer_once or weights_arrive")
    assert law.returncode == 1, law.stdout
    assert "Plain(" in law.stdout
