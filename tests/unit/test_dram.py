"""DRAM by kind, speed and channels: its rate in closed form, and what is no DRAM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.errors import ScenarioError
from workbench.hardware.dram import Dram, parse_dram, parse_memory

DESKTOP = {"host": "my cpu", "channels": 2, "takes": ("ddr5-5200", "ddr4-3200")}


@pytest.mark.parametrize(
    ("name", "channels", "rate"),
    [("ddr5-6000", 2, 96e9), ("ddr4-3200", 2, 51.2e9), ("ddr4-3200", 8, 204.8e9), ("ddr5-4800", 12, 460.8e9)],
)
def test_the_rate_is_channels_times_transfers_times_8_bytes(name, channels, rate):
    dram = parse_dram(name, channels)
    assert dram.rate == rate
    assert str(dram) == f"{channels} channels x {name[5:]} MT/s x 8 B"


def test_one_channel_is_told_as_one():
    assert str(parse_dram("ddr5-6000", 1)) == "1 channel x 6000 MT/s x 8 B"


@given(st.integers(1, 12), st.integers(3200, 10_000))
def test_every_channel_adds_as_much(channels, speed):
    assert Dram("ddr5", speed, channels).rate == channels * Dram("ddr5", speed, 1).rate


@pytest.mark.parametrize("text", ["64GB ddr5-6000 x2", " 64 GB  DDR5-6000  X2 ", "64e9 ddr5-6000 x2"])
def test_a_text_has_capacity_and_modules(text):
    assert parse_memory(text, **DESKTOP) == (64e9, Dram("ddr5", 6000, 2))


@pytest.mark.parametrize("text", ["64GB", 64e9, "64 GB"])
def test_a_capacity_alone_tells_no_modules(text):
    assert parse_memory(text, **DESKTOP) == (64e9, None)


def test_without_channels_all_of_the_cpu_are_in_use():
    assert parse_memory("64GB ddr5-6000", **DESKTOP) == (64e9, Dram("ddr5", 6000, 2))


def test_a_cpu_of_unknown_channels_takes_what_is_told():
    unknown = {"host": "my cpu", "channels": None, "takes": ()}
    assert parse_memory("1TB ddr4-3200 x8", **unknown) == (1e12, Dram("ddr4", 3200, 8))
    with pytest.raises(ScenarioError, match="does not say how many channels are in use; write for example '64GB"):
        parse_memory("1TB ddr4-3200", **unknown)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("64GB ddr5-6000 x4", "my cpu has 2 memory channels, not 4; write at most '64GB ddr5-6000 x2'"),
        ("64GB ddr3-1600 x2", "my cpu takes ddr5 or ddr4, not ddr3; write for example '64GB ddr5-5200 x2'"),
        ("64GB lpddr5x-8000", "my cpu takes ddr5 or ddr4, not lpddr5x; write"),
        ("64GB ddr5-60000 x2", "no ddr5 has 60000 MT/s; give a speed from 3200 to 10000"),
        ("64GB ddr5-6000 x0", "DRAM in 0 channels is none; give a whole number from 1 on"),
        (
            "64GB ddr5 6000",
            "memory '64GB ddr5 6000' is not a quantity of bytes.* Or add its modules: '64GB ddr5-6000 x2'",
        ),
        ("2x32GB", "memory '2x32GB' is not a quantity"),
        ("ddr5-6000 x2", "memory 'ddr5-6000 x2' is not a quantity"),
        ("lots ddr5-6000 x2", "memory 'lots' is not a quantity"),
        ("64GB ddr5-6000 x2 x2", "is not a quantity"),
        (-1, "memory must be a positive number of bytes, not -1"),
        (None, "memory must be a number of bytes or text"),
    ],
)
def test_a_text_that_is_no_memory_is_refused(text, words):
    with pytest.raises(ScenarioError, match=words):
        parse_memory(text, **DESKTOP)


@pytest.mark.parametrize(
    ("name", "words"),
    [("ddr5", "DRAM 'ddr5' has no speed; write for example 'ddr5-5200'"), ("hbm3-6400", "kind 'hbm3' is unknown")],
)
def test_a_name_that_is_no_dram_is_refused(name, words):
    with pytest.raises(ScenarioError, match=words):
        parse_dram(name, 2)


@pytest.mark.parametrize("channels", [1.5, True, None])
def test_channels_are_whole(channels):
    with pytest.raises(ScenarioError, match="channels is none; give a whole number from 1 on"):
        Dram("ddr4", 3200, channels)
