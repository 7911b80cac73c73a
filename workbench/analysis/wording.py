"""Words for lanes, limits, rates and factors, which sentences and tables share."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.result import Result
from workbench.core.units import four_digits
from workbench.perfmodels.loads import CORES, DRAM

LANES = {
    "gpu": "the GPU",
    "cpu": "the CPU",
    "h2d": "the link to the GPU",
    "d2h": "the link to the host",
}
"""Lanes in words."""
GAIN = 1.02
"""Least factor between two rates that counts as a difference."""
LINKS = ("h2d", "d2h")
"""Lanes of the link."""
_OTHERS = {
    DRAM: "the bandwidth of the host's memory",
    CORES: "the speed of the cores that both lanes share",
    "KV memory": "the size of the KV cache",
}
"""Limits that are no lane, in words."""


def lane_of(binding: str) -> str:
    """The lane that a limit or a busiest lane is about ("h2d link" -> "h2d"), or "" for another limit."""
    first = binding.partition(" ")[0]
    return first if first in LANES else ""


def in_words(binding: str) -> str:
    """A limit or busiest lane in words: ``the link to the GPU (h2d)``."""
    lane = lane_of(binding)
    if lane:
        return f"{LANES[lane]} ({lane})" if lane in LINKS else LANES[lane]
    return _OTHERS.get(binding, binding)


def rate(result: Result, most: Result | None) -> str:
    """The rate of a result in words, and its share of the bound if that is known."""
    told = f"{result.origin} {four_digits(result.gen_tok_s)} output tok/s"
    if most is None:
        return told
    share = percent(result.gen_tok_s / most.gen_tok_s) if most.generated else percent(1.0)
    return f"{told}, {share} of the bound's {four_digits(most.gen_tok_s)}"


def capital(words: str) -> str:
    """The words with a capital at the beginning."""
    return words[:1].upper() + words[1:]


def listed(words: Sequence[str], joined: str = "and") -> str:
    """Words with commas between them, and "and" or another word before the last."""
    *first, last = words
    return f"{', '.join(first)} {joined} {last}" if first else last


def times(ratio: float) -> str:
    """A factor in words: ``1.72 times``, ``27 times``, ``1,150 times``."""
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:,.0f} times"


def percent(share: float) -> str:
    """A share in words: ``55 %``, or ``0.33 %`` below one percent."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"
