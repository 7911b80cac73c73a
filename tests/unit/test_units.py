"""Quantities: parsed into bytes, printed for people."""

import pytest

from workbench.core.units import format_bytes, format_seconds, parse_bytes


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
    [(4320, "1.2 h"), (3.4, "3.4 s"), (5.6e-3, "5.6 ms"), (7.8e-6, "7.8 us"), (59.94, "59.9 s"), (2490, "2490 s")],
)
def test_seconds_print_in_the_unit_that_suits_them(value, text):
    assert format_seconds(value) == text
