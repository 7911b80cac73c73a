"""The contract: printed plans that fix what the words of the algebra mean. Changing one needs its reason told."""

import inspect
import textwrap
from pathlib import Path

import pytest

from tests.systems import GOLDEN, MIXED
from workbench.schedules import Sequential, VSLPipe

FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", GOLDEN)
def test_printed_plan(name: str) -> None:
    pipeline, schedule = GOLDEN[name]
    printed = f"{pipeline}\n{schedule.lower(pipeline, MIXED)}\n"
    assert printed == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_golden_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(GOLDEN)


@pytest.mark.parametrize(("schedule", "name"), [(Sequential, "vslpipe.sequential"), (VSLPipe, "vslpipe.vslpipe")])
def test_docstring_shows_the_same_lane_chart(schedule: type, name: str) -> None:
    golden = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    chart = textwrap.dedent(golden.split("lanes if every task took one unit\n")[1]).strip()
    assert textwrap.indent(chart, "    ") in inspect.getdoc(schedule)
