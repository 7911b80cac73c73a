"""Parsing and printing of quantities. Inside the library everything is bytes, FLOP, seconds and tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeGuard

_SCALE = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_QUANTITY = re.compile(r"\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*((?:[KMGT]i?)?)B?(/s)?\s*", re.IGNORECASE)

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
INT4_GROUPS = (128, 64, 32)
"""Columns that share a scale in checkpoints whose INT4 stays as it is."""
STORED_INT4 = {f"{form}_g{group}": (form, group) for form in ("int4", "uint4") for group in INT4_GROUPS}
"""Formats of routed experts in checkpoints of GPTQ and AWQ, as they are held: the format, and the columns that share a
scale in fp32. In UINT4 groups have zero points too, which lie in the last bits of the scales."""
WEIGHT_BYTES: dict[str, float] = {
    **DTYPE_BYTES,
    "fp8": 1.0,
    "int8": 1.0,
    "mxfp4": 4.25 / 8,
    "int4": 0.5,
    "uint4": 0.5,
    **{name: 0.5 + 4 / group for name, (_, group) in STORED_INT4.items()},
}
"""Bytes per weight. MXFP4 includes its 8-bit scale per 32 weights; scales of larger blocks (0.02 %) are left out."""
QUANTISED = ("int8", "int4")
"""Formats into which routed experts can be rounded when a model is loaded."""
CPU_ONLY = ("uint4", "mxfp4")
"""Formats in which routed experts stay as their checkpoint has them, and which only the CPU's kernels compute with."""
PACKED = (*QUANTISED, *CPU_ONLY)
"""Formats of routed experts that the CPU's kernels compute with."""
GROUPS = (128, 64)
"""Columns of such weights that share a scale in fp32: the first number that divides the sizes of the experts. With 64
the kernel takes 1.3 times as long at 16 rows per expert (Zen 4)."""


SECONDS = (("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
"""Units of time [s]."""
BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
"""Units of size [B]."""
Units = tuple[tuple[str, float], ...]
_TIMES = {**dict(SECONDS), "min": 60.0, "us": 1e-6}
_TIME = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_TIMES)})\s*")


def is_whole(value: object) -> TypeGuard[int]:
    """True for whole numbers of Python and of numpy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """True for real numbers of Python and of numpy that a float can hold; NaN is one, a bool is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def parse_bytes(quantity: str | float, *, what: str = "size") -> float:
    """Bytes (or bytes per second) of a number or of text such as ``"16GB"``, ``"4 GiB"`` or ``"19.5GB/s"``.

    Raises
    ------
    ValueError
        If the text is no quantity or the value is not positive and finite.
    """
    if isinstance(quantity, str):
        match = _QUANTITY.fullmatch(quantity)
        if match is None:
            raise ValueError(f"{what} {quantity!r} is not a quantity of bytes; write for example '16GB' or '4GiB'.")
        value = float(match.group(1)) * _SCALE[match.group(2).upper()]
    else:
        try:
            value = math.nan if isinstance(quantity, bool) else float(quantity)
        except OverflowError:
            value = math.inf
        except TypeError:
            raise ValueError(f"{what} must be a number of bytes or text such as '16GB', not {quantity!r}.") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{what} must be a positive number of bytes, not {quantity!r}.")
    return value


def parse_seconds(quantity: str | float, *, what: str = "time") -> float:
    """Seconds of a number or of text such as ``"30 s"``, ``"2 min"``, ``"500 ms"`` or ``"1.5 h"``; inf is allowed.

    Raises
    ------
    ValueError
        If it is no positive number of seconds.
    """
    value = math.nan
    if isinstance(quantity, str):
        match = _TIME.fullmatch(quantity)
        value = float(match[1]) * _TIMES[match[2]] if match is not None else math.nan
    elif is_number(quantity):
        value = float(quantity)
    if not value > 0:
        raise ValueError(f"{what} {quantity!r} is no positive time; write for example '30 s' or '2 min'.")
    return value


def format_bytes(value: float) -> str:
    """Bytes in decimal units and three digits: ``16 GB``, ``94.5 MB``."""
    for unit, scale in BYTES[:-1]:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def format_bytes_up(value: float) -> str:
    """Bytes in three digits, rounded up."""
    unit = max(1.0, 10.0 ** (math.floor(math.log10(value)) - 2))
    return format_bytes(math.ceil(value / unit) * unit)


def format_seconds(value: float) -> str:
    """Seconds in three digits: ``1.2 h``, ``3.4 s``, ``5.6 ms`` or ``7.8 µs``; hours from 3600 s on."""
    if abs(value) >= 3599.5:
        return f"{_three(value / 3600)} h"
    for unit, scale in SECONDS[1:-1]:
        if abs(value) >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value * 1e6)} µs"


def format_quantity(value: float, unit: str) -> str:
    """A number with its unit, bytes and seconds in fitting ones: ``70 GB``, ``16 GB/s``, ``5 ms``, ``20,000 J``."""
    if unit in ("B", "B/s"):
        return format_bytes(value) + unit[1:]
    if unit == "s":
        return format_seconds(value)
    text = f"{value:,.6g}" if abs(value) < 1e7 else f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def four_digits(value: float) -> str:
    """A number in four digits, large ones without an exponent: ``577.9``, ``5105`` or ``31,990``."""
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10_000 else f"{rounded:.4g}"


def _three(value: float) -> str:
    """A number in three digits, or in all digits before the point if it has more."""
    rounded = float(f"{value:.3g}")
    return f"{value:.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"


def percents(parts: Sequence[float]) -> list[int]:
    """Shares of a positive sum in whole percent, which add up to 100; each is off by less than 1."""
    return _counted(parts, sum(parts) / 100)


def alike(parts: Sequence[float], units: Units) -> tuple[str, list[str]]:
    """Sum and parts of an amount in one unit and with equally many decimals, so that the parts add up to the sum.

    The largest of them has at least three digits. ``alike([5.0, 3.47], SECONDS)`` is
    ``("8.47 s", ["5.00 s", "3.47 s"])``.

    Parameters
    ----------
    parts : sequence of float
        Amounts in the base unit, seconds or bytes; negative ones are allowed.
    units : sequence of (str, float)
        `SECONDS` or `BYTES`.
    """
    most = max(abs(sum(parts)), *map(abs, parts))
    name, scale = next((unit for unit in units if most >= unit[1]), units[-1])
    digits = max(0, 2 - math.floor(math.log10(most / scale))) if most > 0 else 0
    counts = _counted(parts, scale / 10**digits)
    total, *told = (f"{count / 10**digits:.{digits}f} {name}" for count in (sum(counts), *counts))
    return total, told


def _counted(parts: Sequence[float], unit: float) -> list[int]:
    """Parts in whole units that add up to the rounded sum: those with the largest rest are rounded up."""
    exact = [part / unit if unit else 0.0 for part in parts]
    counts = [math.floor(value) for value in exact]
    missing = round(sum(exact)) - sum(counts)
    by_rest = sorted(range(len(parts)), key=lambda place: counts[place] - exact[place])
    for place in by_rest[:missing]:
        counts[place] += 1
    return counts
