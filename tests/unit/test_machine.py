"""Machines: limits, rates, records."""

import json
import math
from dataclasses import replace

import pytest

from tests.builders import small_machine
from workbench.core.catalogue import source_of
from workbench.core.errors import CatalogueError, ScenarioError
from workbench.hardware import Device, Link, Machine, machines, value_names
from workbench.hardware.processors import processors
from workbench.models import models


def test_the_a40_host_is_the_papers():
    """MoE-Lens section 8."""
    a40 = machines["a40"]
    assert (a40.gpu.memory, a40.link.h2d, a40.cpu.bandwidth) == (48e9, 19.5e9, 150e9)
    assert a40.gpu.flop_rate("bf16") == 84.7e12
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


@pytest.mark.parametrize(
    ("catalogue", "name", "close"),
    [
        (machines, "A40", "a40"),
        (machines, "ktransformers-a10", "ktransformers-a100"),
        (processors, "h100", "h100-sxm"),
        (processors, "A10", "a10"),
        (processors, "rtx4090", "rtx-4090"),
        (models, "Mixtral-8x7B", "mixtral-8x7b"),
        (models, "qwen3", "qwen3-30b-a3b"),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_one(catalogue, name, close):
    with pytest.raises(CatalogueError, match=rf"has no entry '{name}' \(did you mean '{close}'\?\); it has "):
        catalogue[name]


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


def test_a_machine_tells_its_rates():
    assert str(machines["a40"]) == "a40: gpu 48 GB, 84.7 TFLOP/s; cpu 375 GB, 150 GB/s; link 19.5 GB/s"


def test_every_value_of_the_catalogue_says_where_it_comes_from():
    for machine in machines.values():
        assert list(machine.sources) == value_names(machine)
        assert all(machine.sources.values())


def test_a_value_has_the_nearest_source():
    sources = machines["moe-lightning-s6"].sources
    assert sources["gpu.count"] == "MoE-Lightning, Table 2"
    assert sources["gpu.bandwidth"] == "NVIDIA data sheet, nominal"
    assert sources["link.d2h"].startswith("measured by the authors' FlexGen calibration")
    assert "assumed" in machines["moe-lightning-s6-optimiser"].sources["link.d2h"]


def test_a_value_without_a_source_is_refused():
    with pytest.raises(CatalogueError, match=r"gpu\.memory has no source; add one to the source table"):
        source_of({"gpu.bandwidth": "data sheet"}, "gpu.memory")


def test_a_user_sees_the_sources():
    shown = machines["a40"]._repr_html_()
    assert "<summary>sources</summary>" in shown
    assert "measured with 1 GB tensors" in shown
    assert "sources" not in small_machine()._repr_html_()


def test_a_limited_value_says_so_and_keeps_its_source():
    sources = machines["a40"].limit(gpu_memory="16GB", link="5GB/s").sources
    assert sources["gpu.memory"] == "limited on purpose, from 48 GB: NVIDIA data sheet"
    assert sources["link.d2h"].startswith("limited on purpose, from 19.5 GB/s: MoE-Lens")
    assert sources["cpu.memory"] == machines["a40"].sources["cpu.memory"]


def test_sources_are_saved_with_the_machine(tmp_path):
    a40 = machines["a40"]
    assert Machine.load(a40.save(tmp_path / "a40.json")).sources == a40.sources


def test_where_values_come_from_does_not_tell_machines_apart():
    a40 = machines["a40"]
    assert replace(a40, sources={}) == a40
    assert repr(replace(a40, sources={})) == repr(a40)


@pytest.mark.parametrize(
    "record", ["[]", "{}", '{"name": 3}', "no json", pytest.param(100_000 * "[", id="deep"), '{"name": "m", "gpu": 1}']
)
def test_a_file_that_is_no_record_is_refused(record, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(record, encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"is no machine record .*measure again"):
        Machine.load(path)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "900GB/s", None, True])
@pytest.mark.parametrize("what", ["memory", "bandwidth", "flops"])
def test_a_device_has_positive_numbers(what, value):
    values = {"memory": 1.0, "bandwidth": 1.0, "flops": (("bf16", 1.0),)}
    values[what] = (("bf16", value),) if what == "flops" else value
    with pytest.raises(ScenarioError, match=f"T has {what}.*; give a positive number"):
        Device("T", **values)


def test_a_device_has_some_rate():
    with pytest.raises(ScenarioError, match="T has no FLOP rate"):
        Device("T", 1.0, 1.0, ())


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "fast"])
def test_a_link_has_positive_rates(value):
    with pytest.raises(ScenarioError, match=r"h2d=.*; give a positive number"):
        Link(value, 1.0)
    with pytest.raises(ScenarioError, match=r"d2h=.*; give a positive number"):
        Link(1.0, value)


@pytest.mark.parametrize("change", [{"name": 3}, {"throttled": "no"}, {"sources": 3}])
def test_a_record_with_a_value_of_another_kind_is_refused(change, tmp_path):
    path = machines["a40"].save(tmp_path / "m.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}), encoding="utf-8")
    with pytest.raises(ScenarioError, match="is no machine record"):
        Machine.load(path)


# ------------------------------------------------------------------------------------------------- several as one


def test_several_devices_are_one_with_as_much_of_everything():
    one = Device("T", 16e9, 3e11, (("fp16", 65e12),), overhead=1e-5)
    assert one.times(1) is one
    assert one.times(4) == Device("4 x T", 64e9, 12e11, (("fp16", 260e12),), 1e-5, 4)
    assert one.times(2).times(2).count == 4


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_no_device_is_refused(count):
    with pytest.raises(ScenarioError, match="times T is no device; give a whole number from 1 on"):
        Device("T", 1.0, 1.0, (("fp16", 1.0),)).times(count)


def test_moe_lightnings_machines_have_the_gpus_and_memory_of_table_2():
    expected = {
        "s1": (1, None),
        "s2": (1, None),
        "s6": (2, 416 * 2**30),
        "s7": (4, 416 * 2**30),
        "s8": (2, 416 * 2**30),
        "s9": (4, 416 * 2**30),
    }
    for setting, (gpus, memory) in expected.items():
        for variant in ("", "-optimiser"):
            machine = machines[f"moe-lightning-{setting}{variant}"]
            assert machine.gpu.count == gpus
            assert memory in (None, machine.cpu.memory)
    assert machines["moe-lightning-s8"] == replace(machines["moe-lightning-s6"], name="moe-lightning-s8")


def test_ktransformers_two_machines_share_their_host():
    """Section 6.1: 1 TB and 220 GB/s per socket, and 440 GB/s of both."""
    a100, consumer = machines["ktransformers-a100"], machines["ktransformers-rtx-4080"]
    assert (a100.cpu, a100.link) == (consumer.cpu, consumer.link)
    assert (a100.cpu.memory, a100.cpu.bandwidth, a100.link.h2d) == (2e12, 440e9, 32e9)
    assert (a100.gpu.memory, consumer.gpu.memory) == (40e9, 16e9)


def test_the_machines_of_moe_cap_and_layered_prefill_are_the_papers():
    rates = {"a6000": (48e9, 768e9), "a100-pcie": (80e9, 1935e9), "a100-sxm": (80e9, 2037e9)}
    gpus = {name: machines[f"moe-cap-{name}"].gpu for name in rates}
    assert {name: (gpu.memory, gpu.bandwidth) for name, gpu in gpus.items()} == rates
    assert machines["layered-prefill"].gpu.count == 2
    assert machines["layered-prefill"].gpu.memory == 160e9


@pytest.mark.parametrize("overhead", [math.nan, math.inf, -1.0, "x", True])
def test_overheads_are_seconds(overhead):
    a40 = machines["a40"]
    for part in (a40.link, a40.gpu):
        with pytest.raises(ScenarioError, match=r"has overhead=.*; give seconds, at least 0"):
            replace(part, overhead=overhead)
