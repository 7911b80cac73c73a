"""What counts as a disturbance."""

from types import SimpleNamespace

import psutil
import pytest

from workbench.core import quiet
from workbench.core.quiet import Noise, kept, listening


@pytest.mark.parametrize(("others", "still"), [(0.0, True), (0.02, True), (0.021, False), (0.5, False)])
def test_a_repetition_counts_if_others_took_little(others, still):
    assert Noise(others).quiet is still


def clocks(monkeypatch, own=0.0, **taken):
    """Two cores of which something takes so many seconds, `own` of them this process, while the body lasts a second."""
    idle = {"user": 5.0, "system": 1.0, "nice": 0.0, "irq": 0.0, "softirq": 0.0, "steal": 2.0}
    then = {name: seconds + taken.get(name, 0.0) for name, seconds in idle.items()}
    read = iter([SimpleNamespace(**idle), SimpleNamespace(**then)])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(read))
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)
    passes, runs = iter([0.0, 1.0]).__next__, iter([1.0, 1.0 + own]).__next__
    monkeypatch.setattr(quiet, "time", SimpleNamespace(perf_counter=passes, process_time=runs))


@pytest.mark.parametrize("what", ["user", "system", "nice", "irq", "softirq", "steal"])
def test_what_other_programs_and_other_guests_of_the_host_take_is_noise(monkeypatch, what):
    clocks(monkeypatch, **{what: 0.22})
    with listening() as noise:
        pass
    assert noise.others == pytest.approx(0.1)


def test_work_of_this_process_is_not_noise(monkeypatch):
    clocks(monkeypatch, own=0.7, user=0.8)
    with listening() as noise:
        pass
    assert noise.others == pytest.approx(0.04)


def test_two_ticks_of_a_clock_are_no_noise(monkeypatch):
    clocks(monkeypatch, user=0.02)
    with listening() as noise:
        pass
    assert noise.others == 0.0


def test_the_disturbed_are_kept_where_too_few_are_quiet():
    assert kept([1] * 3, [2]) == [1] * 3
    assert kept([1] * 2, [2]) == [1, 1, 2]
