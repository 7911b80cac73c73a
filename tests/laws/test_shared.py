"""Law 7 for many scenarios: what they share changes no result, in whatever order they are read."""

from contextlib import suppress
from dataclasses import replace
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import scenarios, tiny_scenario, wirings
from tests.examples import examples
from workbench.core.errors import WorkbenchError
from workbench.perfmodels import bound
from workbench.schedules import Overlap, Sequential, VSLPipe
from workbench.serving import fits
from workbench.simulate import simulate, simulate_all

SHARED = [
    getattr(import_module(f"workbench.{module}"), name)
    for module, name in (
        ("pipeline.algebra", "resolve"),
        ("scenario.scenario", "_graph"),
        ("schedules.base", "_unordered"),
        ("schedules.base", "_issued"),
        ("serving.task_cost", "_number"),
        ("serving.prepared", "_task_cost"),
        ("serving.prepared", "_lowered"),
        ("serving.prepared", "_plans"),
        ("serving.capacity", "_lengths"),
        ("perfmodels.bound", "_held"),
        ("perfmodels.bound", "_least_limits"),
        ("serving.capacity", "_needs_of"),
        ("perfmodels.loads", "_terms"),
        ("perfmodels.loads", "_known_calls"),
        ("perfmodels.loads", "_multiples"),
    )
]
"""Every function that keeps what scenarios share."""


def forget():
    for function in SHARED:
        function.cache_clear()


def answer(read, scenario, schedule):
    """The reader's answer in plain values, or the reason that it gives for none."""
    try:
        found = read(scenario, schedule)
    except WorkbenchError as error:
        return type(error), str(error)
    return str(found) if read is fits else found.to_dict() | {"date": ""}


@st.composite
def alike(draw):
    """Scenarios that share most, and two schedules."""
    scenario, schedule = draw(scenarios())
    memory = scenario.memory
    machine = scenario.machine
    more = replace(memory, kv_capacity=1.5 * float(memory.kv_capacity))
    link = replace(machine.link, h2d=2 * machine.link.h2d)
    gpu = replace(machine.gpu, memory=draw(st.sampled_from([1e5, 2e5, 1e6])))
    faster = replace(machine.gpu, bandwidth=2 * machine.gpu.bandwidth)
    host = replace(machine.cpu, bandwidth=machine.cpu.bandwidth / 64)
    parts = (("link", link), ("gpu", gpu), ("gpu", faster), ("cpu", host))
    machines = (replace(machine, **{name: part}) for name, part in parts)
    changed = [{"memory": more}, *({"machine": each} for each in machines)]
    found = [scenario, *(scenario.on(**change) for change in changed)]
    pairs = [draw(st.permutations(found))[:2]]
    with suppress(WorkbenchError):  # a wiring that the model or the cache does not take
        pairs.append([scenario, scenario.on(pipeline=draw(wirings())[0])])
    other = draw(st.sampled_from([Sequential(), Sequential(2, prefetch=True), Overlap()]))
    return draw(st.sampled_from(pairs)), (schedule, other)


@examples(40)
@given(alike())
def test_a_reader_that_has_read_others_gives_what_a_fresh_one_gives(case):
    asked = [(read, each, schedule) for each in case[0] for schedule in case[1] for read in (bound, simulate, fits)]
    forget()
    warm = [answer(*each) for each in asked]
    for each, found in zip(asked, warm, strict=True):
        forget()
        assert answer(*each) == found


def test_all_are_simulated_as_one_by_one():
    some = [tiny_scenario(output=output) for output in (2, 5)]
    schedules = (Sequential(), VSLPipe())
    found = simulate_all(iter(some), iter(schedules))
    assert [[each.schedule for each in row] for row in found] == [[schedule.name for schedule in schedules]] * 2
    for scenario, row in zip(some, found, strict=True):
        for schedule, result in zip(schedules, row, strict=True):
            forget()
            assert result.to_dict() | {"date": ""} == answer(simulate, scenario, schedule)
    assert [[each.seconds for each in row] for row in simulate_all(some, VSLPipe())] == [
        [row[1].seconds] for row in found
    ]


@pytest.mark.parametrize("function", SHARED)
def test_what_is_kept_is_bounded(function):
    """A page with all schedules of one wiring asks for three times as many lists of tasks, again and again."""
    assert 0 < function.cache_info().maxsize <= 128
