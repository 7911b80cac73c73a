"""A compilation that lasts is told on stderr, once for all functions that it compiles; others are not."""

import time
from types import SimpleNamespace

import pytest
from numba.core import event

from kernels_cpu.codegen import progress


@pytest.fixture
def told(monkeypatch):
    """The lines that the package tells of itself, with a second shrunk to a few milliseconds."""
    lines = []
    monkeypatch.setattr(progress, "FIRST", 0.01)
    monkeypatch.setattr(progress, "NEXT", 0.02)
    monkeypatch.setattr(progress, "_say", lines.append)
    return lines


def compiling(module):
    function = SimpleNamespace(__module__=module)
    return event.trigger_event("numba:compile", data={"dispatcher": SimpleNamespace(py_func=function)})


def until(lines, count):
    end = time.monotonic() + 10
    while len(lines) < count and time.monotonic() < end:
        time.sleep(0.005)


def test_the_outermost_module_is_told_again_and_again_and_at_its_end(told):
    with compiling("kernels_cpu.attention.tasks"), compiling("kernels_cpu.threads.runs"):
        until(told, 3)
    *during, last = told
    assert len(during) >= 3
    assert {line.partition(" for this CPU")[0] for line in during} == {"compiling kernels_cpu.attention.tasks"}
    assert last.startswith("compiling kernels_cpu.attention.tasks took ")
    count = len(told)
    time.sleep(0.1)
    assert len(told) == count


def test_short_ones_and_those_of_other_packages_are_not_told(told, monkeypatch):
    with compiling("somebody.else"):
        time.sleep(0.1)
    monkeypatch.setattr(progress, "FIRST", 60.0)
    for _ in range(5):
        with compiling("kernels_cpu.rows.rope"):
            pass
    assert told == []


def fails(lines):
    with compiling("kernels_cpu.rows.rope"):
        until(lines, 1)
        raise ValueError


def test_an_error_ends_it_too(told):
    with pytest.raises(ValueError):
        fails(told)
    count = len(told)
    time.sleep(0.1)
    assert len(told) == count
    assert told[-1].startswith("compiling kernels_cpu.rows.rope took ")
