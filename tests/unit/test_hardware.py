"""Machines: limits, rates, records."""

from dataclasses import replace

import pytest

from tests.builders import small_machine
from workbench.errors import CatalogueError, ScenarioError
from workbench.hardware import Machine, machine_from_dict, machines


def test_the_a40_host_is_the_papers():
    """MoE-Lens section 8."""
    a40 = machines["a40"]
    assert (a40.gpu.memory, a40.link.h2d, a40.cpu.bandwidth) == (48e9, 19.5e9, 150e9)
    assert a40.gpu.flop_rate("bf16") == 97.9e12
    assert a40.host is None
    assert not a40.is_local


def test_a_limit_takes_memory_away_and_nothing_else():
    a40 = machines["a40"]
    limited = a40.limit(gpu_memory="16GB")
    assert limited == replace(a40, gpu=replace(a40.gpu, memory=16e9))
    assert a40.gpu.memory == 48e9


def test_a_slower_link_slows_both_directions_and_is_marked():
    limited = machines["a40"].limit(link="5GB/s")
    assert (limited.link.h2d, limited.link.d2h, limited.throttled) == (5e9, 5e9, True)
    assert "(throttled)" in str(limited)


def test_limits_combine():
    limited = machines["a40"].limit(gpu_memory="16GB", link=1e9)
    assert (limited.gpu.memory, limited.link.h2d) == (16e9, 1e9)


def test_no_limit_changes_nothing():
    assert machines["a40"].limit() == machines["a40"]


@pytest.mark.parametrize(
    ("limit", "words"),
    [({"gpu_memory": "49GB"}, "has 48 GB of GPU memory"), ({"link": "20GB/s"}, r"reaches 19\.5 GB/s")],
)
def test_a_limit_above_what_there_is_would_raise_it_and_is_refused(limit, words):
    with pytest.raises(ScenarioError, match=f"{words}.*would raise it. Give a smaller value"):
        machines["a40"].limit(**limit)


@pytest.mark.parametrize("memory", ["-1GB", 0, "lots"])
def test_a_limit_that_is_no_quantity_is_refused(memory):
    with pytest.raises(ValueError, match="gpu_memory"):
        machines["a40"].limit(gpu_memory=memory)


def test_an_unknown_machine_is_answered_with_the_known_ones():
    with pytest.raises(CatalogueError, match=r"machines\.toml has no entry 'b200'; it has a40"):
        machines["b200"]


def test_the_catalogue_is_a_mapping():
    assert "a40" in list(machines)
    assert len(machines) == len(list(machines))
    assert "a40" in repr(machines)


def test_an_unknown_precision_is_answered_with_the_known_ones():
    with pytest.raises(ScenarioError, match="no known FLOP rate for int8, only for bf16, fp32"):
        machines["a40"].gpu.flop_rate("int8")


@pytest.mark.parametrize("machine", [small_machine(overhead=1e-5), machines["a40"].limit(link="1GB/s")])
def test_a_saved_machine_comes_back_equal(machine, tmp_path):
    path = machine.save(tmp_path / "records" / "machine.json")
    assert Machine.load(path) == machine


def test_a_record_of_another_computer_is_not_local(tmp_path):
    there = replace(small_machine(), host="surely-another-computer")
    assert not Machine.load(there.save(tmp_path / "m.json")).is_local


def test_a_dict_of_a_machine_is_not_changed_by_reading_it():
    from dataclasses import asdict

    fields = asdict(small_machine())
    before = repr(fields)
    assert machine_from_dict(fields) == small_machine()
    assert repr(fields) == before


def test_a_machine_tells_its_rates():
    assert str(machines["a40"]) == "a40: gpu 48 GB, 97.9 TFLOP/s; cpu 375 GB, 150 GB/s; link 19.5 GB/s"
