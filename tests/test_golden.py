"""The contract: printed plans that fix what the words of the algebra mean. Changing one needs its reason told."""

import inspect
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from tests.systems import ADDED, GOLDEN, MIXED, STACKS
from workbench import schedules
from workbench.schedules import Schedule
from workbench.schedules.registry import every_schedule

FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", GOLDEN)
def test_printed_plan(name: str) -> None:
    pipeline, schedule = GOLDEN[name]
    printed = f"{pipeline}\n{schedule.lower(pipeline, MIXED)}\n"
    assert printed == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STACKS)
def test_printed_plan_of_a_stack(name: str) -> None:
    stack, schedule = STACKS[name]
    printed = f"{stack}\n{schedule.lower(stack, replace(MIXED, layers=4))}\n"
    assert printed == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_golden_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {*GOLDEN, *STACKS}


SHOWN = {
    "vslpipe.sequential",
    "vslpipe.vslpipe",
    "lightning.cgopipe",
    "lightning.fastdecode",
    "lightning.flexgen_s3",
    "flexgen_s4.flexgen_s4",
    "streamed.layer_streaming",
    "ktransformers.ktransformers",
    "ktransformers.fiddler",
    "both_on_cpu.overlap",
    *ADDED,
}
"""Those that a schedule's docstring shows."""


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_docstring_shows_the_same_lane_chart(name: str) -> None:
    golden = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    chart = textwrap.dedent(golden.split("lanes if every task took one unit\n")[1]).strip()
    assert textwrap.indent(chart, "    ") in inspect.getdoc(type(GOLDEN[name][1]))


def test_every_schedule_shows_its_lane_chart() -> None:
    offered = {thing for thing in vars(schedules).values() if inspect.isclass(thing) and issubclass(thing, Schedule)}
    shown = {type(GOLDEN[name][1]) for name in SHOWN}
    assert shown == set(every_schedule())
    assert offered - {Schedule} <= shown
