"""Quantities: parsed into bytes, printed for people."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.units import (
    BYTES,
    SECONDS,
    alike,
    format_bytes,
    format_bytes_up,
    format_seconds,
    four_digits,
    parse_bytes,
    percents,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16GB", 16e9),
        ("4 GiB", 4 * 2**30),
        ("19.5GB/s", 19.5e9),
        ("1e3 kB", 1e6),
        ("1MiB", 2**20),
        ("2TB", 2e12),
        ("512", 512),
        ("512 B", 512),
        (" 3g ", 3e9),
        (70e9, 70e9),
        (1, 1),
    ],
)
def test_a_quantity_is_read_in_decimal_or_binary_units(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "12 apples", "1,5GB", "16 G B", "5iB", "1e"])
def test_what_is_no_quantity_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="is not a quantity of bytes; write for example '16GB' or '4GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [0, -1, "-5GB", "0GB", float("inf"), float("nan"), "1e999GB"])
def test_a_quantity_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match="link must be a positive number of bytes"):
        parse_bytes(value, what="link")


@pytest.mark.parametrize(
    ("value", "text"),
    [(16e9, "16 GB"), (94.5e6, "94.5 MB"), (1e12, "1 TB"), (1500, "1.5 kB"), (12, "12 B"), (0, "0 B"), (-2e9, "-2 GB")],
)
def test_bytes_print_with_three_digits(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4320, "1.2 h"),
        (3590, "3590 s"),
        (999, "999 s"),
        (999.7, "1000 s"),
        (0.9996, "1000 ms"),
        (3.4, "3.4 s"),
        (5.6e-3, "5.6 ms"),
        (7.8e-6, "7.8 µs"),
    ],
)
def test_seconds_print_in_the_unit_that_suits_them(value, text):
    assert format_seconds(value) == text


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(any))
def test_percents_add_up_and_are_off_by_less_than_one(parts):
    found = percents(parts)
    assert sum(found) == 100
    assert all(abs(share - 100 * part / sum(parts)) < 1 + 1e-9 for share, part in zip(found, parts, strict=True))


@pytest.mark.parametrize(
    ("parts", "units", "told"),
    [
        ([5.0, 3.47], SECONDS, ("8.47 s", ["5.00 s", "3.47 s"])),
        ([7000.0, 500.0], SECONDS, ("2.08 h", ["1.94 h", "0.14 h"])),
        ([310.0, 31.0, 31.0], SECONDS, ("372 s", ["310 s", "31 s", "31 s"])),
        ([1.64, -0.5, 0.001], SECONDS, ("1.14 s", ["1.64 s", "-0.50 s", "0.00 s"])),
        ([8e9, 0.47e9], BYTES, ("8.47 GB", ["8.00 GB", "0.47 GB"])),
        ([0.0, 0.0], BYTES, ("0 B", ["0 B", "0 B"])),
    ],
)
def test_amounts_of_a_sum_have_one_unit(parts, units, told):
    assert alike(parts, units) == told


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_amounts_of_a_sum_add_up_as_they_are_printed(parts):
    total, told = alike(parts, SECONDS)
    (unit,) = {amount.partition(" ")[2] for amount in (total, *told)}
    numbers = [float(amount.partition(" ")[0]) for amount in told]
    assert float(total.partition(" ")[0]) == pytest.approx(sum(numbers), abs=1e-9 * max(map(abs, numbers)) + 1e-9)
    scale = dict(SECONDS)[unit]
    step = scale * 10.0 ** -len(total.partition(" ")[0].partition(".")[2])
    assert all(abs(scale * number - part) < 1.0001 * step for number, part in zip(numbers, parts, strict=True))


@given(st.floats(1, 1e15))
def test_a_size_rounded_up_is_enough_when_pasted(size):
    assert size <= parse_bytes(format_bytes_up(size)) * (1 + 1e-12) <= 1.02 * size + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(577.92, "577.9"), (5105.4, "5105"), (31_987.0, "31,990"), (0.012345, "0.01235"), (9999.6, "10,000")],
)
def test_four_digits_have_no_exponent(value, text):
    assert four_digits(value) == text
