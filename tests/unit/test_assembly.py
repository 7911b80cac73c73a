"""Computers that people own in one line: memory by channels, links by generation and lanes, one memory for both."""

import json
from dataclasses import replace

import pytest

import workbench as wb
from tests.builders import tiny_scenario
from workbench.core.errors import CatalogueError, ScenarioError
from workbench.hardware import Machine, value_names
from workbench.hardware.assembly import machine
from workbench.hardware.processors import Processor, ProcessorKind, efficiencies, links, processors
from workbench.perfmodels import bound
from workbench.schedules import Sequential

SHARE = efficiencies["sustained"].cpu_bandwidth
CHIPS = [name for name, part in processors.items() if part.kind is ProcessorKind.UNIFIED]
OWN_CPU = Processor("own cpu", ProcessorKind.CPU, 1e11, memory=64e9, vector_flops=1e12)


# -- memory ------------------------------------------------------------------------------------------------------


def test_a_desktop_in_one_line():
    desktop = machine("rtx-4090", "ryzen-7950x", memory="64GB ddr5-6000 x2", efficiency="nominal")
    assert (desktop.gpu.memory, desktop.cpu.memory, desktop.cpu.bandwidth, desktop.link.h2d) == (
        24e9,
        64e9,
        96e9,
        31.5e9,
    )
    assert desktop.sources["cpu.bandwidth"] == "nominal: 2 channels x 6000 MT/s x 8 B, given"


def test_dram_is_derated_like_any_rate():
    desktop = machine("rtx-4090", "ryzen-7950x", memory="64GB ddr5-6000 x2")
    assert desktop.cpu.bandwidth == pytest.approx(SHARE * 96e9)
    assert desktop.sources["cpu.bandwidth"].startswith("derated to 0.72 of 96 GB/s: ")
    assert desktop.sources["cpu.bandwidth"].endswith("; nominal: 2 channels x 6000 MT/s x 8 B, given")


@pytest.mark.parametrize(
    ("cpu", "rate", "told"),
    [
        ("ryzen-7950x", 83.2e9, "2 channels x 5200 MT/s x 8 B"),
        ("core-i9-14900k", 89.6e9, "2 channels x 5600 MT/s x 8 B"),
        ("xeon-8380", 204.8e9, "8 channels x 3200 MT/s x 8 B"),
        ("epyc-9654", 460.8e9, "12 channels x 4800 MT/s x 8 B"),
    ],
)
def test_without_modules_a_cpu_has_its_fastest_official_dram_in_all_channels(cpu, rate, told):
    made = machine("rtx-4090", cpu, memory="64GB", efficiency="nominal")
    assert made.cpu.bandwidth == processors[cpu].bandwidth == rate
    assert made.sources["cpu.bandwidth"].startswith(f"nominal: {told}; ")


def test_the_second_kind_of_dram_that_a_cpu_takes_is_taken():
    assert (
        machine("rtx-3090", "core-i9-14900k", memory="64GB ddr4-3200 x2", efficiency="nominal").cpu.bandwidth == 51.2e9
    )


def test_channels_are_those_of_a_socket():
    two = machine("rtx-4090", "xeon-6454s", memory="1TB ddr5-4800 x8", sockets=2, efficiency="nominal")
    assert (two.cpu.memory, two.cpu.bandwidth) == (1e12, 2 * 8 * 4800e6 * 8)


def test_half_of_the_channels_give_half_of_the_rate():
    whole, half = (machine("rtx-4090", "epyc-9654", memory=f"384GB ddr5-4800 x{used}") for used in (12, 6))
    assert half.cpu.bandwidth == pytest.approx(whole.cpu.bandwidth / 2)


def test_modules_are_told_of_a_cpu_of_ones_own():
    assert machine("rtx-4090", OWN_CPU, memory="64GB ddr5-6000 x2", efficiency="nominal").cpu.bandwidth == 96e9
    assert machine("rtx-4090", OWN_CPU, memory="64GB", efficiency="nominal").cpu.bandwidth == 1e11


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ("64GB ddr5-6000 x4", "ryzen-7950x has 2 memory channels, not 4; write at most '64GB ddr5-6000 x2'"),
        ("64GB ddr4-3200 x2", "ryzen-7950x takes ddr5, not ddr4; write for example '64GB ddr5-5200 x2'"),
        ("64GB of ddr5", "is not a quantity of bytes.* Or add its modules"),
    ],
)
def test_memory_that_the_cpu_does_not_take_is_refused(memory, words):
    with pytest.raises(ScenarioError, match=words):
        machine("rtx-4090", "ryzen-7950x", memory=memory)


# -- the fabric --------------------------------------------------------------------------------------------------


def test_few_dies_read_less_than_the_channels_give():
    two_dies = machine("rtx-4090", "threadripper-5955wx", memory="256GB ddr4-3200 x8")
    assert SHARE * 204.8e9 > two_dies.cpu.bandwidth == 2 * 32 * 1600e6
    assert two_dies.sources["cpu.bandwidth"].startswith("limited by the fabric: 2 dies x 32 B x 1600 MHz")
    assert "; DRAM alone: derated to 0.72 of 205 GB/s" in two_dies.sources["cpu.bandwidth"]


def test_dram_below_the_fabric_is_not_limited():
    slow = machine("rtx-4090", "threadripper-5955wx", memory="64GB ddr4-3200 x2")
    assert slow.cpu.bandwidth == pytest.approx(SHARE * 51.2e9)
    assert slow.sources["cpu.bandwidth"].startswith("derated to")


@pytest.mark.parametrize(
    ("gpu", "cpu", "memory", "measured", "error"),
    [
        ("rtx-a6000", "threadripper-7965wx", "256GB ddr5-4800 x8", 225e9, 0.05),
        ("rtx-4090", "threadripper-5955wx", "256GB ddr4-3200 x8", 84.5e9, 0.25),
        ("rtx-3090", "epyc-9355", "512GB ddr5-6000 x12", 500e9, 0.20),
    ],
)
def test_published_machines_read_nearly_what_their_owners_measured(gpu, cpu, memory, measured, error):
    """ik_llama.cpp discussions 258 and 357, FreeToken issue 232."""
    assert machine(gpu, cpu, memory=memory).cpu.bandwidth == pytest.approx(measured, rel=error)


# -- the link ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "cpu", "link"),
    [
        ("rtx-5090", "ryzen-7950x", "pcie5-x16"),
        ("rtx-5090", "ryzen-5950x", "pcie4-x16"),
        ("rtx-5060-ti-16gb", "ryzen-7950x", "pcie5-x8"),
        ("rtx-5060-ti-16gb", "ryzen-5600x", "pcie4-x8"),
        ("rtx-4060-ti-16gb", "core-i9-10900x", "pcie3-x8"),
        ("rtx-3090", "core-i9-14900k", "pcie4-x16"),
        ("rtx-2080", "core-i9-10900x", "pcie3-x16"),
        ("rtx-4090", "xeon-8380", "pcie4-x16"),
    ],
)
def test_the_link_has_the_lanes_of_the_gpu_at_the_slower_rate(gpu, cpu, link):
    made = machine(gpu, cpu, memory="64GB", efficiency="nominal")
    assert made.link.h2d == made.link.d2h == pytest.approx(links[link].number)


def test_a_link_that_the_cpu_slows_says_so():
    made = machine("rtx-5060-ti-16gb", "ryzen-5600x", memory="32GB")
    assert "nominal: 8 lanes at the rate of ryzen-5600x: " in made.sources["link.h2d"]


def test_a_link_that_is_named_is_taken_on_any_cpu():
    assert machine("rtx-5090", "ryzen-5600x", memory="32GB", link="pcie5-x16", efficiency="nominal").link.h2d == 63e9


def test_a_sustained_link_is_not_slowed():
    card = replace(processors["rtx-5090"], sustained=("link",))
    assert machine(card, "ryzen-5600x", memory="32GB").link.h2d == 63e9


# -- GPU and CPU on one memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_with_both_makes_a_machine_alone(chip):
    made, part = machine(chip, efficiency="nominal"), processors[chip]
    assert made.name == f"{chip}, nominal"
    assert made.gpu.memory == part.gpu_share * part.memory
    assert made.gpu.memory + made.cpu.memory == pytest.approx(part.memory)
    assert made.gpu.bandwidth == part.bandwidth
    assert made.link.h2d == made.link.d2h == part.bandwidth / 2
    assert made.cpu.bandwidth <= part.bandwidth
    assert list(made.sources) == value_names(made)
    assert all(made.sources.values())


def test_a_chip_has_the_memory_that_was_bought():
    mac = machine("m3-max", memory="64GB")
    assert (mac.gpu.memory, mac.cpu.memory) == (48e9, 16e9)
    assert mac.sources["gpu.memory"].startswith("0.75 of 64 GB: ")
    assert mac.sources["cpu.memory"].startswith("the rest, 0.25 of 64 GB: ")
    assert mac.gpu.bandwidth == pytest.approx(0.8 * 400e9)
    assert mac.link.h2d == mac.gpu.bandwidth / 2


def test_the_cores_of_a_chip_have_their_own_limit():
    assert machine("m1-max", efficiency="nominal").cpu.bandwidth == 243e9


def test_a_chip_is_read_and_saved_like_any_machine(tmp_path):
    mac = machine("m3-max")
    assert Machine.load(mac.save(tmp_path / "m.json")) == mac
    assert json.loads(mac.to_json())
    assert bound(tiny_scenario(machine=mac), Sequential()).seconds > 0


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("m3-max", "ryzen-7950x"), {}, "m3-max has GPU and CPU on one memory; leave out cpu, link, gpus and sockets"),
        (("m3-max",), {"link": "pcie4-x16"}, "leave out cpu, link, gpus and sockets"),
        (("m3-max",), {"gpus": 2}, "leave out cpu, link, gpus and sockets"),
        (("m3-max",), {"memory": "192GB"}, "m3-max has at most 128 GB of memory, not '192GB'; give a smaller capacity"),
        (("m3-max",), {"memory": "64GB ddr5-6000 x2"}, "is not a quantity of bytes"),
        (("rtx-4090",), {}, "rtx-4090 is a GPU without a host; name a CPU too, such as wb.machine"),
        (("rtx-4090", "m3-max"), {"memory": "64GB"}, "m3-max is no cpu; give one of"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        machine(*arguments, **options)


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("RTX 4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("rtx_4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("RTX 5060 Ti", "rtx-5060-ti-16gb"),
        ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("i9-14900K", "core-i9-14900k"),
        ("Ryzen 9 7950X", "ryzen-7950x"),
        ("AMD Ryzen Threadripper PRO 7965WX", "threadripper-7965wx"),
        ("Xeon Gold 6454S", "xeon-6454s"),
        ("AMD EPYC 9355", "epyc-9355"),
        ("Apple M3 Max", "m3-max"),
        ("m2ultra", "m2-ultra"),
        ("thredripper-7965", "threadripper-7965wx"),
    ],
)
def test_a_name_in_another_spelling_is_answered_with_the_one_of_the_catalogue(name, close):
    with pytest.raises(CatalogueError, match=rf"has no entry '{name}' \(did you mean '{close}'\?\)"):
        machine(name, "xeon-8380", memory="64GB")


def test_an_unknown_name_is_answered_with_how_to_put_a_processor_together():
    with pytest.raises(CatalogueError) as caught:
        machine("voodoo", "xeon-8380", memory="64GB")
    assert "did you mean" not in str(caught.value)
    gpu = "wb.Processor('my gpu', wb.ProcessorKind.GPU, bandwidth=936e9, memory=24e9, flops=71.2e12, link=31.5e9)"
    cpu = "wb.Processor('my cpu', wb.ProcessorKind.CPU, bandwidth=83.2e9, vector_flops=2.3e12)"
    assert str(caught.value).endswith(f"Or put one together: {gpu}, or {cpu}.")
    made = machine(
        wb.Processor("my gpu", wb.ProcessorKind.GPU, bandwidth=936e9, memory=24e9, flops=71.2e12, link=31.5e9),
        wb.Processor("my cpu", wb.ProcessorKind.CPU, bandwidth=83.2e9, vector_flops=2.3e12),
        memory="64GB",
    )
    assert (made.gpu.memory, made.cpu.memory) == (24e9, 64e9)


def test_every_name_is_lower_case_with_dashes():
    for name in processors:
        assert name == name.lower()
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
