"""Parts, and machines put together of them: what is nominal, what is derated, and what is missing."""

import math
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import tiny_scenario
from workbench.core.catalogue import data_path, source_of
from workbench.core.errors import CatalogueError, ScenarioError
from workbench.hardware import Machine, value_names
from workbench.hardware.assembly import machine
from workbench.hardware.processors import Efficiency, Processor, ProcessorKind, drives, efficiencies, links, processors
from workbench.perfmodels import bound
from workbench.schedules import Sequential

GPUS = {
    "t4", "l4", "a10", "a10g", "a40", "rtx-a5000", "rtx-a6000", "l40", "l40s", "a100-40gb-sxm", "a100-40gb-pcie",
    "a100-80gb-sxm", "a100-80gb-pcie", "rtx-4080", "rtx-4090", "rtx-5090", "rtx-pro-6000", "h100-sxm", "h100-pcie",
    "h200-sxm", "b200-sxm", "mi300x", "mi355x", "h20",
}  # fmt: skip
CPUS = {
    "xeon-8380", "xeon-8375c", "xeon-8452y", "xeon-6454s", "xeon-8488c", "epyc-9654", "epyc-9684x", "epyc-7642",
    "epyc-7763", "gcp-g2-standard-48", "gcp-t4-host",
}  # fmt: skip
OWN_GPU = Processor("own gpu", ProcessorKind.GPU, 1e12, memory=8e9, flops=1e13, link=2e10)
OWN_CPU = Processor("own cpu", ProcessorKind.CPU, 1e11, memory=64e9, vector_flops=1e12)
NEEDED = {
    ProcessorKind.GPU: ("memory", "flops", "link"),
    ProcessorKind.CPU: ("vector_flops",),
    ProcessorKind.UNIFIED: ("memory", "flops", "vector_flops", "gpu_share"),
}


def complete(kind):
    """Parts of the catalogue of which nothing is missing that a machine needs."""
    return [name for name, part in processors.items() if part.kind is kind and is_complete(part)]


def is_complete(part):
    return not any(math.isnan(getattr(part, what)) for what in NEEDED[part.kind])


def test_24_gpus_and_11_cpus_are_there():
    assert (len(GPUS), len(CPUS)) == (24, 11)
    assert {name for name, part in processors.items() if part.kind is ProcessorKind.GPU} >= GPUS
    assert {name for name, part in processors.items() if part.kind is ProcessorKind.CPU} >= CPUS


def test_no_part_of_the_catalogue_lacks_what_a_machine_needs():
    assert [name for name, part in processors.items() if not is_complete(part)] == []


def test_every_value_of_a_part_has_a_source():
    entries = tomllib.loads(data_path("catalogue/processors.toml").read_text(encoding="utf-8"))
    for name, entry in entries.items():
        for value in set(entry) - {"name", "kind", "source", "sustained"}:
            assert source_of(entry["source"], value), name
    for rates in (links, drives):
        assert all(rate.source.startswith("nominal: ") and len(rate.source) > 20 for rate in rates.values())


def test_what_people_own_is_there():
    """The machines of published runs with offloading, as far as their parts are told."""
    owned = {
        "rtx-2080": "core-i9-10900x", "rtx-3090": "epyc-7343", "rtx-3090-ti": "ryzen-9950x", "rtx-4080": "ryzen-7950x",
        "rtx-4090": "threadripper-5955wx", "rtx-4090d": "xeon-6454s", "rtx-5090": "threadripper-7975wx",
        "rtx-a6000": "threadripper-7965wx", "rtx-pro-6000": "xeon-8480", "gtx-1650-super": "ryzen-3500",
        "l20": "xeon-6454s", "rtx-5070-ti": "ryzen-5950x", "rtx-3060": "ryzen-5800x", "rtx-a5000": "epyc-9355",
    }  # fmt: skip
    for gpu, cpu in owned.items():
        assert machine(gpu, cpu, memory="64GB").name == f"{gpu} + {cpu}, sustained"


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-3090-ti", "rtx-4070-ti", "rtx-4090d", "rtx-5080"])
def test_fp32_accumulation_halves_a_geforce_cards_rate(name):
    """fp32 rates of reviews [TFLOP/s]: twice as much with fp32 accumulation, four times with fp16 accumulation."""
    fp32 = {"rtx-3090": 35.6, "rtx-3090-ti": 40.0, "rtx-4070-ti": 40.09, "rtx-4090d": 73.54, "rtx-5080": 56.3}
    assert processors[name].flops == pytest.approx(2e12 * fp32[name], rel=0.002)


def test_drives_are_no_faster_than_their_interface():
    assert list(drives) == ["sata-ssd", "nvme-pcie3-x4", "nvme-pcie4-x4", "nvme-pcie5-x4"]
    assert drives["sata-ssd"].number < 0.6e9
    for generation in (3, 4, 5):
        lanes = links[f"pcie{generation}-x4"].number
        assert 0.85 * lanes < drives[f"nvme-pcie{generation}-x4"].number < lanes


@pytest.mark.parametrize("gpu", complete(ProcessorKind.GPU))
@pytest.mark.parametrize("efficiency", ["sustained", "nominal"])
def test_every_gpu_makes_a_machine(gpu, efficiency):
    made = machine(gpu, "xeon-8380", memory="512GB", efficiency=efficiency)
    part, shares = processors[gpu], efficiencies[efficiency]
    assert made.gpu.memory == part.memory
    assert made.gpu.bandwidth == pytest.approx(shares.gpu_bandwidth * part.bandwidth)
    assert made.gpu.flop_rate("fp16") == pytest.approx(shares.gpu_flops * part.flops)
    assert made.link.h2d == made.link.d2h == pytest.approx(shares.link * part.link)
    assert list(made.sources) == value_names(made)


@pytest.mark.parametrize("cpu", complete(ProcessorKind.CPU))
def test_every_cpu_makes_a_machine(cpu):
    made = machine("l4", cpu, memory="256GB")
    assert made.cpu.memory == 256e9
    assert 0 < made.cpu.flop_rate("fp32") <= made.cpu.flop_rate("bf16")
    assert 0 < made.cpu.bandwidth <= processors[cpu].bandwidth


def test_shares_are_the_published_ones():
    sustained = efficiencies["sustained"]
    assert sustained.gpu_bandwidth == 0.8
    assert sustained.gpu_flops == 0.7
    assert sustained.cpu_bandwidth == pytest.approx(220 / 307.2, abs=0.005)
    assert sustained.cpu_bandwidth == pytest.approx(150 / 204.8, abs=0.015)
    assert sustained.cpu_flops == pytest.approx(21.3 / 73.7, abs=0.005)
    assert efficiencies["nominal"] == Efficiency("nominal")


def test_nominal_and_derated_are_told_apart_in_name_and_sources():
    nominal = machine("h100-sxm", "xeon-8380", memory="512GB", efficiency="nominal")
    derated = machine("h100-sxm", "xeon-8380", memory="512GB")
    assert nominal.name == "h100-sxm + xeon-8380, nominal"
    assert derated.name == "h100-sxm + xeon-8380, sustained"
    assert nominal.sources["gpu.bandwidth"].startswith("nominal: ai-dynamo/aiconfigurator")
    assert derated.sources["gpu.bandwidth"].startswith("derated to 0.8 of 3.35 TB/s: ai-dynamo/aiconfigurator")
    assert "; nominal: ai-dynamo" in derated.sources["gpu.bandwidth"]
    assert derated.sources["cpu.memory"] == "given"
    assert "derated to 0.8 of 3.35 TB/s" in derated._repr_html_()


def test_what_was_measured_is_not_derated_again():
    made = machine("l4", "gcp-g2-standard-48")
    assert made.cpu.bandwidth == 76 * 2**30
    assert made.cpu.flop_rate("fp32") == 1.6e12
    assert made.cpu.memory == 192e9
    assert made.sources["cpu.bandwidth"].startswith("sustained: caoshiyi/artifacts")


def test_a_link_is_named_or_given_or_the_gpus_own():
    make = {"gpu": "h100-sxm", "cpu": "xeon-8380", "memory": "512GB"}
    assert machine(**make).link.h2d == pytest.approx(0.8 * 63e9)
    named = machine(**make, link="pcie4-x16")
    assert named.link.h2d == pytest.approx(0.8 * 31.5e9)
    assert named.name == "h100-sxm + xeon-8380 over pcie4-x16, sustained"
    assert named.sources["link.h2d"].startswith("derated to 0.8 of 31.5 GB/s")
    given_rate = machine(**make, link="19.5GB/s")
    assert given_rate.link.h2d == 19.5e9
    assert given_rate.sources["link.d2h"] == "given"


def test_links_of_one_generation_double_with_their_lanes_and_over_generations():
    for generation, speed in ((3, 8e9), (4, 16e9), (5, 32e9)):
        for lanes in (4, 8, 16):
            rate = links[f"pcie{generation}-x{lanes}"].number
            assert rate == pytest.approx(lanes * speed * 128 / 130 / 8, rel=5e-4)
            assert rate == lanes / 4 * 2 ** (generation - 3) * links["pcie3-x4"].number
    assert {part.link for name, part in processors.items() if name in GPUS} <= {rate.number for rate in links.values()}


@given(st.integers(1, 8), st.integers(1, 4))
def test_several_parts_are_counted_and_share_link_and_dram(gpus, sockets):
    one = machine("a100-80gb-sxm", "xeon-8380", memory="1TB")
    many = machine("a100-80gb-sxm", "xeon-8380", memory="1TB", gpus=gpus, sockets=sockets)
    assert (many.gpu, many.link) == (one.gpu.times(gpus), one.link)
    assert many.cpu == replace(one.cpu.times(sockets), memory=1e12)
    assert list(many.sources) == value_names(many)


def test_a_t4_has_no_bf16():
    assert [dtype for dtype, _ in machine("t4", "gcp-t4-host").gpu.flops] == ["fp16"]


def test_a_cpu_without_a_16_bit_rate_computes_bf16_as_fp32():
    made = machine("a40", "epyc-9654", memory="512GB")
    assert made.cpu.flop_rate("bf16") == made.cpu.flop_rate("fp32")
    amx = machine("a40", "xeon-8452y", memory="512GB")
    assert amx.cpu.flop_rate("bf16") == pytest.approx(21.3e12, rel=0.01)


def test_parts_and_shares_of_ones_own():
    made = machine(OWN_GPU, OWN_CPU, efficiency=Efficiency("mine", gpu_bandwidth=0.5))
    assert made.name == "own gpu + own cpu, mine"
    assert (made.gpu.bandwidth, made.cpu.bandwidth, made.link.h2d) == (5e11, 1e11, 2e10)
    assert made.sources["gpu.bandwidth"] == "derated to 0.5 of 1 TB/s: given; nominal: given"


def test_a_machine_of_parts_is_read_and_saved_like_any_other(tmp_path):
    made = machine("h100-sxm", "xeon-8380", memory="512GB", link="pcie4-x16", gpus=2)
    assert Machine.load(made.save(tmp_path / "m.json")) == made
    nominal = machine("h100-sxm", "xeon-8380", memory="512GB", link="pcie4-x16", gpus=2, efficiency="nominal")
    slow, fast = (bound(tiny_scenario(machine=each), Sequential()).seconds for each in (made, nominal))
    assert slow > fast


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("h9", "xeon-8380"), CatalogueError, r"processors\.toml has no entry 'h9'; it has a10,"),
        (("xeon-8380", "xeon-8380"), ScenarioError, "xeon-8380 is no gpu; give one of t4, l4,"),
        (("a40", "a40"), ScenarioError, "a40 is no cpu; give one of xeon-8380,"),
        (("a40", OWN_GPU), ScenarioError, "own gpu is no cpu; give one of"),
        (("a40", "xeon-8380"), ScenarioError, "no DRAM of its own; say what its host has, such as memory='512GB'"),
        (
            (replace(OWN_GPU, flops=math.nan), OWN_CPU),
            ScenarioError,
            r"own gpu has no known flops; give a Processor with flops=\.\.\.",
        ),
        ((None, "xeon-8380"), ScenarioError, "None is no gpu; give one of t4, l4,"),
        ((OWN_GPU, replace(OWN_CPU, vector_flops=math.nan)), ScenarioError, "no known vector_flops"),
    ],
)
def test_parts_that_do_not_make_a_machine_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        machine(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"link": "pcie9"}, "link 'pcie9' is not a quantity .* Or name one of pcie3-x4, pcie3-x8"),
        ({"gpus": 0}, "0 times a40 is no device; give a whole number from 1 on"),
        ({"sockets": 1.5}, r"1\.5 times xeon-8380 is no device"),
        ({"efficiency": 0.5}, "efficiency is 0.5; give one of sustained, nominal or an Efficiency"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, words):
    with pytest.raises(ScenarioError, match=words):
        machine("a40", "xeon-8380", memory="512GB", **options)


@pytest.mark.parametrize(
    "change",
    [
        {"bandwidth": -1e12},
        {"bandwidth": "1TB/s"},
        {"memory": 0},
        {"link": None},
        {"formats": "bf16"},
        {"gpu_share": 1.5},
        {"channels": 0},
        {"channels": 2.5},
        {"lanes": 0},
        {"dram": "ddr5-5200"},
        {"fabric": -1},
    ],
)
def test_a_part_with_values_that_mean_nothing_is_refused(change):
    with pytest.raises(ScenarioError, match=f"own gpu has {next(iter(change))}=.*; give a"):
        replace(OWN_GPU, **change)


@pytest.mark.parametrize("share", [0, -0.1, 1.1, math.nan, "0.5", None])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ScenarioError, match=r"efficiency 'mine' has link=.*; give a share above 0 and at most 1"):
        Efficiency("mine", link=share)


def test_unknown_shares_are_answered_with_the_known_ones():
    with pytest.raises(CatalogueError, match="it has nominal, sustained"):
        machine("a40", "xeon-8380", memory=1, efficiency="ideal")
